"""What is wrong with `[megatron]`, as far as that can be said without Megatron; `mcore.transformer` says the rest."""

from collections.abc import Iterable, Iterator

from spare_megatron.config.building import describe_kind
from spare_megatron.config.schema import RunConfig

OURS_IN_MEGATRON_WORDS = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "hidden_dropout": "model.hidden_dropout",
    "attention_dropout": "model.attention_dropout",
    "seq_length": "model.seq_length",
    "bf16": "model.precision",
    "fp16": "model.precision",
    "params_dtype": "model.precision",
    "pipeline_dtype": "model.precision",
    "autocast_dtype": "model.precision",
    "transformer_impl": "model.transformer_impl",
    "tensor_model_parallel_size": "layout.tensor_parallel",
    "context_parallel_size": "layout.context_parallel",
    "pipeline_model_parallel_size": "layout.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "layout.virtual_pipeline",
    "micro_batch_size": "train.micro_batch_size",
}
"""Megatron's fields that follow from ours, and the setting they follow from."""

FIXED_IN_MEGATRON = {
    "calculate_per_token_loss": "gradients are always summed over tokens and scaled once, after the reduction",
    "finalize_model_grads_func": "gradients are finished after the commit, not inside the schedule",
    "grad_sync_func": "groups reduce after the schedule, not inside it",
    "no_sync_func": "groups reduce after the schedule, not inside it",
    "param_sync_func": "parameters are never sharded over groups",
    "grad_scale_func": "gradients are scaled once, after the reduction",
}
"""Megatron's fields that a masked loss depends on, and why they are not to be had."""

OF_TRANSFORMER_ENGINE = (
    "cpu_offloading",
    "fp4",
    "fp8",
    "softmax_type",
    "window_attn_skip_freq",
    "window_size",
)
"""Megatron's fields that only layers of transformer-engine heed: others would pass most of them over in silence."""

ON_GPUS_ALONE = (
    *OF_TRANSFORMER_ENGINE,
    "fused_single_qkv_rope",
    "gradient_accumulation_fusion",
    "layernorm_zero_centered_gamma",
    "memory_efficient_layer_norm",
    "persist_layer_norm",
    "recompute_granularity",
    "sequence_parallel",
)
"""Megatron's fields with which no rank could be built, or none could compute, on CPUs."""

COUNTED_WITH: dict[str, type] = {
    "add_bias_linear": bool,
    "add_qkv_bias": bool,
    "attention_output_gate": bool,
    "batch_p2p_comm": bool,
    "gated_linear_unit": bool,
    "kv_channels": int,
    "normalization": str,
    "num_query_groups": int,
    "qk_layernorm": bool,
    "recompute_granularity": str,
    "sequence_parallel": bool,
}
"""Megatron's fields on which limits, sizes and memory depend that are worked out before Megatron is there."""


def megatron_problems(config: RunConfig) -> Iterator[str]:
    """Every field that is not the user's to set, or of another type than what is worked out with it needs."""
    for key, value in config.megatron.items():
        if key in OURS_IN_MEGATRON_WORDS:
            yield f"megatron.{key} follows from {OURS_IN_MEGATRON_WORDS[key]}; set that instead"
        elif key in FIXED_IN_MEGATRON:
            yield f"megatron.{key} cannot be set: {FIXED_IN_MEGATRON[key]}; remove it"
        elif type(value) is not COUNTED_WITH.get(key, type(value)):
            yield f"megatron.{key}={value!r} must be {describe_kind(COUNTED_WITH[key])}; change it"
        elif COUNTED_WITH.get(key) is int and isinstance(value, int) and value < 1:
            yield f"megatron.{key}={value} must be at least 1; raise it"


def fields_set(config: RunConfig, names: Iterable[str]) -> Iterator[str]:
    """Those of Megatron's fields with these names that are switched on, as they are written."""
    for name in names:
        value = config.megatron.get(name)
        if value not in (None, False, "vanilla"):
            yield f"megatron.{name}={'true' if value is True else value}"
