"""Parameters of the model that a configuration describes, per layer and stage, and FLOPs per token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.schema import RunConfig

_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary of each tensor-parallel rank to a multiple of this."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table.

    >>> padded_vocab_size(257, 2)
    512
    """
    multiple = _VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Parameter counts of a layer, summed over the ranks that share it.

    Attributes:
        experts: Of `num_parameters`, those of the experts that a router chooses from.
        idle: Of `experts`, those by which a token is not multiplied.
        matrices: The matrices by which each token is multiplied.
    """

    num_parameters: int
    experts: int
    idle: int
    matrices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameter counts of a GPT, summed over the ranks of a stage.

    Attributes:
        is_tied: The output layer shares the embedding table.
    """

    embedding: int
    positions: int
    layers: tuple[LayerShape, ...]
    final_norm: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a shared table counts once."""
        tables = self.embedding * (1 if self.is_tied else 2)
        return tables + self.positions + sum(layer.num_parameters for layer in self.layers) + self.final_norm

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in the computation of a token."""
        return self.num_parameters - sum(layer.idle for layer in self.layers)

    def of_stages(self, num_stages: int) -> list[int]:
        """Parameters of each pipeline stage; with tied tables the last stage holds a copy."""
        stages = [sum(layer.num_parameters for layer in layers) for layers in self._stages(num_stages)]
        stages[0] += self.embedding + self.positions
        stages[-1] += self.final_norm + (0 if num_stages == 1 and self.is_tied else self.embedding)
        return stages

    def experts_of_stages(self, num_stages: int) -> list[int]:
        """The part of `of_stages` that is divided over expert-parallel ranks."""
        return [sum(layer.experts for layer in layers) for layers in self._stages(num_stages)]

    def _stages(self, num_stages: int) -> list[tuple[LayerShape, ...]]:
        size = len(self.layers) // num_stages
        return [self.layers[stage * size : (stage + 1) * size] for stage in range(num_stages)]


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that Megatron builds, including the effect of `[megatron]` fields."""
    model, megatron = config.model, model_fields(config)
    hidden = model.hidden_size
    has_bias = bool(megatron["add_bias_linear"])
    num_heads = model.num_attention_heads
    head = megatron.get("kv_channels") or hidden // num_heads
    keys = head * (megatron["num_query_groups"] or num_heads)
    heads = head * num_heads
    ffn = model.ffn_hidden_size or 4 * hidden
    per_value = 1 if megatron["normalization"] == "RMSNorm" else 2
    norm = hidden * per_value
    others = 2 * norm
    gates = heads if megatron.get("attention_output_gate") else 0
    attention = hidden * (heads + gates + 2 * keys) + heads * hidden
    if has_bias or megatron["add_qkv_bias"]:
        others += heads + gates + 2 * keys
    if megatron["qk_layernorm"]:
        others += 2 * head * per_value
    if has_bias:
        others += hidden
    feed_forward = _matrices(megatron, hidden, ffn)
    biases = ffn * (2 if megatron["gated_linear_unit"] else 1) + hidden if has_bias else 0
    dense = LayerShape(
        num_parameters=attention + feed_forward + others + biases,
        experts=0,
        idle=0,
        matrices=attention + feed_forward,
    )
    layers = (dense,) * model.num_layers
    if model.num_experts is not None:
        mixture = _mixture(config, model.num_experts, attention, others)
        layers = (*layers[: model.num_dense_layers], *(mixture for _ in layers[model.num_dense_layers :]))
    return ModelShape(
        embedding=padded_vocab_size(model.vocab_size, config.layout.tensor_parallel) * hidden,
        positions=model.seq_length * hidden if model.position_embedding == "learned_absolute" else 0,
        layers=layers,
        final_norm=norm,
        is_tied=model.tie_embeddings,
    )


def _mixture(config: RunConfig, num_experts: int, attention: int, others: int) -> LayerShape:
    """A layer with experts; `attention` are the parameters of its other matrices, `others` those of no matrix."""
    model, megatron = config.model, model_fields(config)
    hidden = model.hidden_size
    expert = _matrices(megatron, hidden, megatron["moe_ffn_hidden_size"])
    of_every_token = attention + hidden * num_experts
    if model.shared_expert_ffn_hidden_size is not None:
        gate = hidden if megatron.get("moe_shared_expert_gate") else 0
        of_every_token += _matrices(megatron, hidden, model.shared_expert_ffn_hidden_size) + gate
    return LayerShape(
        num_parameters=of_every_token + num_experts * expert + others,
        experts=num_experts * expert,
        idle=(num_experts - model.experts_per_token) * expert,
        matrices=of_every_token + model.experts_per_token * expert,
    )


def _matrices(megatron: Mapping[str, Any], hidden: int, ffn: int) -> int:
    return hidden * ffn * (3 if megatron["gated_linear_unit"] else 2)


def flops_per_token(config: RunConfig) -> float:
    """Floating-point operations to train on one token: a forward pass, and twice as many backward.

    A forward pass takes 2 per element of each matrix that the token is multiplied by and 4 s h per layer for attention,
    with s tokens in a sequence and h the width of all heads (Narayanan et al., arXiv 2104.04473, appendix), also with a
    sliding window. Norms, activations, softmax, recomputation and redundant microbatches do not count.
    """
    shape, model = model_shape(config), config.model
    matrices = sum(layer.matrices for layer in shape.layers)
    head = config.megatron.get("kv_channels") or model.hidden_size // model.num_attention_heads
    scores = 4 * model.seq_length * head * model.num_attention_heads
    forward = 2 * (matrices + shape.embedding) + model.num_layers * scores
    return 3.0 * forward
