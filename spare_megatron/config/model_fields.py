"""The model in Megatron's words: what `[model]` sets, as fields of its TransformerConfig, and what `[megatron]` sets.

A `[megatron]` field counts where it and the setting that stands for it are given; the loader refuses two that differ.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spare_megatron.config.schema import ModelConfig, RunConfig

_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "quick_geglu": ("quick_gelu", True),
    "squared_relu": ("squared_relu", False),
}
"""Activation -> Megatron's function, and whether the first layer has a gate."""

SETTING_OF: Mapping[str, str] = {
    "activation_func": "activation",
    "add_bias_linear": "linear_bias",
    "add_qkv_bias": "qkv_bias",
    "gated_linear_unit": "activation",
    "layernorm_epsilon": "norm_eps",
    "normalization": "normalization",
    "num_query_groups": "num_query_groups",
    "qk_layernorm": "qk_norm",
    "window_size": "sliding_window",
}
"""Megatron's fields that a setting of `[model]` stands for, and that setting."""


_LATENT = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Sizes of latent attention where they are not set, as in Megatron's MLATransformerConfig."""


def model_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that `[model]` fixes, named as in `SETTING_OF`, and all of `[megatron]`."""
    latent = _LATENT if is_latent(config) else {}
    return {**_fields_of(config.model), **latent, **config.megatron}


def is_latent(config: RunConfig) -> bool:
    """Whether queries, keys and values come from latent vectors (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    return bool(config.megatron.get("multi_latent_attention"))


YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "correction_range_round_to_int",
)
"""Constants of YaRN (arXiv 2309.00071), which stretches the wavelengths of rotary position encoding."""


def uses_yarn(config: RunConfig) -> bool:
    """Whether positions are encoded with YaRN, which is Megatron's default for latent attention alone."""
    kind = config.megatron.get("rope_type", "yarn" if is_latent(config) else "rope")
    return config.model.position_embedding == "rope" and kind == "yarn"


def num_future_tokens(config: RunConfig) -> Any:
    """Tokens after the next one that multi-token prediction predicts."""
    return config.megatron.get("mtp_num_layers") or 0


def head_widths(config: RunConfig) -> tuple[Any, Any]:
    """Values of a query or key in one attention head, and of a value."""
    if is_latent(config):
        fields = model_fields(config)
        return fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
    width = config.megatron.get("kv_channels") or config.model.hidden_size // max(config.model.num_attention_heads, 1)
    return width, width


def rotated_width(config: RunConfig) -> Any:
    """Values of a query or key in one head that rotary position encoding rotates."""
    if is_latent(config):
        return model_fields(config)["qk_pos_emb_head_dim"]
    width, part = head_widths(config)[0], config.megatron.get("rotary_percent", 1.0)
    return int(width * part) if isinstance(width, int) and isinstance(part, int | float) else width


def _fields_of(model: ModelConfig) -> dict[str, Any]:
    function, is_gated = _ACTIVATIONS[model.activation]
    return {
        **_expert_fields_of(model),
        "activation_func": function,
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias,
        "gated_linear_unit": is_gated,
        "layernorm_epsilon": model.norm_eps,
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.normalization],
        "num_query_groups": model.num_query_groups,
        "qk_layernorm": model.qk_norm,
        # Megatron counts the tokens before the current one.
        "window_size": None if model.sliding_window is None else [model.sliding_window - 1, 0],
    }


def _expert_fields_of(model: ModelConfig) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    layers = [int(layer >= model.num_dense_layers) for layer in range(model.num_layers)]
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
        # Megatron names tensors of layers that are not all alike by their number, and stacks the others'.
        "moe_layer_freq": layers if model.num_dense_layers else 1,
    }


def as_written(config: RunConfig, field: str) -> str:
    """The key=value by which one of the fields in `SETTING_OF` is set, for messages."""
    if field in config.megatron:
        return f"megatron.{field}={config.megatron[field]}"
    return f"model.{SETTING_OF[field]}={getattr(config.model, SETTING_OF[field])}"


def computed_activation(config: RunConfig) -> str:
    """The value of `model.activation` that is computed, or Megatron's words for it if there is none.

    Megatron's fusion of gelu with the bias before it is the tanh form.
    """
    fields = model_fields(config)
    given = fields["activation_func"], fields["gated_linear_unit"]
    if given == ("gelu", False) and config.megatron.get("bias_activation_fusion") and fields["add_bias_linear"]:
        return "gelu_tanh"
    return next((setting for setting, found in _ACTIVATIONS.items() if found == given), str(given))


def contradictions(config: RunConfig, given: Collection[str]) -> Iterator[tuple[str, str]]:
    """The dotted key of each given `[model]` setting that a `[megatron]` field contradicts, and the reason."""
    ours = _fields_of(config.model)
    for field in sorted(config.megatron.keys() & SETTING_OF):
        setting = SETTING_OF[field]
        if f"model.{setting}" in given and config.megatron[field] != ours[field]:
            meant = f"model.{setting}={getattr(config.model, setting)} means megatron.{field}={ours[field]}"
            yield f"model.{setting}", f"{meant}, but {as_written(config, field)}; remove one of them"


def replaced_settings(config: RunConfig) -> set[str]:
    """Settings of `[model]` that have their defaults and a field of `[megatron]` in their place."""
    replaced = {SETTING_OF[field] for field in config.megatron if field in SETTING_OF}
    return {setting for setting in replaced if getattr(config.model, setting) == getattr(ModelConfig(), setting)}
