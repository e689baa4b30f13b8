"""A GPT in NumPy with float64, written from the papers: what the settings of `[model]` mean."""

from collections.abc import Sequence
from dataclasses import replace
from math import erf

import numpy as np

from spare_megatron.config.schema import ModelConfig

Arrays = dict[str, np.ndarray]


def token_losses(
    model: ModelConfig,
    parameters: Arrays,
    tokens: np.ndarray,
    labels: np.ndarray,
    windows: Sequence[int] = (),
    part_rotated: float = 1.0,
) -> np.ndarray:
    """The cross entropy at each position of [batch, sequence], over the tokens of the vocabulary alone. `windows`: of
    which layers the window is; absent, of all. `part_rotated`: of each head.
    """
    weights = {name: value.astype(np.float64) for name, value in parameters.items()}
    table = weights["embedding.word_embeddings.weight"][: model.vocab_size]
    hidden = table[tokens]
    if model.position_embedding == "learned_absolute":
        hidden = hidden + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for index in range(model.num_layers):
        prefix = f"decoder.layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        of_layer = replace(model, sliding_window=None) if windows and not windows[index] else model
        hidden = hidden + _attention(of_layer, layer, _norm(model, layer, "input_layernorm", hidden), part_rotated)
        compute = _mixture if "mlp.router.weight" in layer else _feed_forward
        hidden = hidden + compute(model, layer, _norm(model, layer, "pre_mlp_layernorm", hidden))
    output = table if model.tie_embeddings else weights["output_layer.weight"][: model.vocab_size]
    logits = _norm(model, weights, "decoder.final_layernorm", hidden) @ output.T
    log_sums = np.log(np.exp(logits).sum(-1))
    return log_sums - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def inverse_wavelengths(model: ModelConfig, width: int) -> np.ndarray:
    """Radians per position of each pair: Su et al., arXiv 2104.09864, stretched as in Llama 3.1."""
    frequencies = model.rope_base ** (-2.0 * np.arange(width // 2) / width)
    if model.rope_scaling_factor == 1.0:
        return frequencies
    wavelengths = 2 * np.pi / frequencies
    # Wavelengths up to 8192 / 4 stay, those from 8192 on are stretched, and between them both are mixed.
    share_kept = np.clip((8192 / wavelengths - 1) / (4 - 1), 0, 1)
    return share_kept * frequencies + (1 - share_kept) * frequencies / model.rope_scaling_factor


def may_attend(model: ModelConfig, length: int) -> np.ndarray:
    """[query, key], pair by pair."""
    window = model.sliding_window or length
    return np.array([[0 <= query - key < window for key in range(length)] for query in range(length)])


def _norm(model: ModelConfig, weights: Arrays, name: str, values: np.ndarray) -> np.ndarray:
    if model.normalization == "layernorm":
        values = values - values.mean(-1, keepdims=True)
    scaled = values / np.sqrt((values**2).mean(-1, keepdims=True) + model.norm_eps) * weights[f"{name}.weight"]
    return scaled + weights[f"{name}.bias"] if model.normalization == "layernorm" else scaled


def _linear(weights: Arrays, name: str, values: np.ndarray, has_bias: bool) -> np.ndarray:
    assert (f"{name}.bias" in weights) == has_bias
    return values @ weights[f"{name}.weight"].T + (weights[f"{name}.bias"] if has_bias else 0.0)


def _attention(model: ModelConfig, layer: Arrays, values: np.ndarray, part_rotated: float) -> np.ndarray:
    batch, length, _ = values.shape
    num_groups = model.num_query_groups or model.num_attention_heads
    num_queries = model.num_attention_heads // num_groups
    width = model.hidden_size // model.num_attention_heads
    mixed = _linear(layer, "self_attention.linear_qkv", values, model.linear_bias or model.qkv_bias)
    # Megatron keeps the queries of a group together with its key and its value.
    mixed = mixed.reshape(batch, length, num_groups, num_queries + 2, width)
    query, key, value = mixed[..., :num_queries, :], mixed[..., num_queries, :], mixed[..., num_queries + 1, :]
    if model.qk_norm:
        query = _norm(model, layer, "self_attention.q_layernorm", query)
        key = _norm(model, layer, "self_attention.k_layernorm", key)
    if model.position_embedding == "rope":
        angles = np.outer(np.arange(length), inverse_wavelengths(model, round(width * part_rotated)))
        query, key = _rotated(query, angles[:, None, None, :]), _rotated(key, angles[:, None, :])
    scores = np.einsum("bqgnw,bkgw->bgnqk", query, key) / np.sqrt(width)
    scores[..., ~may_attend(model, length)] = -np.inf
    sinks = layer.get("self_attention.core_attention.softmax_offset")
    highest = scores.max(-1, keepdims=True)
    shares = np.exp(scores - highest)
    unused = 0.0 if sinks is None else np.exp(sinks.reshape(num_groups, num_queries)[:, :, None, None] - highest)
    shares /= shares.sum(-1, keepdims=True) + unused
    attended = np.einsum("bgnqk,bkgw->bqgnw", shares, value).reshape(batch, length, -1)
    return _linear(layer, "self_attention.linear_proj", attended, model.linear_bias)


def _rotated(values: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Of each head as much as there are angles for, in halves; the rest stays."""
    first, second, rest = np.split(values, [angles.shape[-1], 2 * angles.shape[-1]], axis=-1)
    sines, cosines = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def _mixture(model: ModelConfig, layer: Arrays, values: np.ndarray) -> np.ndarray:
    """Shazeer et al., arXiv 1701.06538, token by token: the softmax is over the experts chosen."""
    tokens = values.reshape(-1, values.shape[-1])
    results = np.zeros_like(tokens)
    for token, result in zip(tokens, results, strict=True):
        logits = layer["mlp.router.weight"] @ token
        chosen = np.argsort(-logits)[: model.experts_per_token]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for number, weight in zip(chosen, weights, strict=True):
            result += weight * _feed_forward(model, _part(layer, f"mlp.experts.local_experts.{number}."), token)
        if model.shared_expert_ffn_hidden_size is not None:
            result += _feed_forward(model, _part(layer, "mlp.shared_experts."), token)
    return results.reshape(values.shape)


def _part(layer: Arrays, prefix: str) -> Arrays:
    """The parameters of one expert under the names of a feed-forward layer."""
    return {f"mlp.{name.removeprefix(prefix)}": value for name, value in layer.items() if name.startswith(prefix)}


def _feed_forward(model: ModelConfig, layer: Arrays, values: np.ndarray) -> np.ndarray:
    wide = _linear(layer, "mlp.linear_fc1", values, model.linear_bias)
    if model.activation in ("swiglu", "geglu"):
        gate, wide = np.split(wide, 2, axis=-1)
        wide = wide * (gate / (1 + np.exp(-gate)) if model.activation == "swiglu" else _gelu(gate))
    elif model.activation == "squared_relu":
        wide = np.maximum(wide, 0) ** 2
    elif model.activation == "gelu_tanh":
        wide = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    else:
        wide = _gelu(wide)
    return _linear(layer, "mlp.linear_fc2", wide, model.linear_bias)


def _gelu(values: np.ndarray) -> np.ndarray:
    return 0.5 * values * (1 + np.vectorize(erf)(values / np.sqrt(2)))
