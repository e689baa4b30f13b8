"""Problems of mixture-of-experts settings, in `[model]` and `[megatron]`."""

from collections.abc import Iterator, Mapping
from typing import Any

from spare_megatron.config.model_fields import as_written, model_fields
from spare_megatron.config.schema import ModelConfig, RunConfig

_PREFIX = "moe_"

_OFF = (None, False)

_CAPACITY = "whether a token is dropped would depend on the tokens that ranks of the group hold beside it"

_UNCHECKED = "it was not checked here"

_REFUSED: Mapping[str, str] = {
    "moe_expert_capacity_factor": _CAPACITY,
    "moe_pad_expert_input_to_capacity": _CAPACITY,
    "moe_token_dropping": _CAPACITY,
    "moe_router_force_load_balancing": "it routes tokens at random, for benchmarks",
    "moe_router_topk_limited_devices": "routes would depend on the layout; choose moe_router_num_groups",
    "moe_input_jitter_eps": "its noise would not be that of the microbatch",
    "moe_enable_routing_replay": _UNCHECKED,
    "moe_enable_deepep": _UNCHECKED,
    "moe_use_legacy_grouped_gemm": _UNCHECKED,
    "moe_latent_size": _UNCHECKED,
    "moe_shared_expert_overlap": _UNCHECKED,
    "moe_layer_recompute": "it is deprecated; choose recompute_modules",
}
"""Megatron fields of mixtures that cannot be had, with the reason."""

_BALANCING = ("aux_loss", "seq_aux_loss", "none")
"""Values of `moe_router_load_balancing_type` that are functions of a single microbatch."""


def expert_problems(config: RunConfig) -> Iterator[str]:
    """Why a mixture of experts cannot be trained as the settings say, or that they describe none."""
    model = config.model
    if model.num_experts is None:
        yield from _without_experts(config)
        return
    yield from _shape(model)
    yield from _fields(config)
    if model_fields(config)["add_bias_linear"]:
        yield (
            f"{as_written(config, 'add_bias_linear')} with model.num_experts={model.num_experts}: experts have no "
            f"biases here; set model.linear_bias=false"
        )
    tensor = config.layout.tensor_parallel
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
    for key, value in (
        ("expert_ffn_hidden_size", width),
        ("shared_expert_ffn_hidden_size", model.shared_expert_ffn_hidden_size or tensor),
    ):
        if value % tensor:
            yield f"model.{key}={value} is not a multiple of layout.tensor_parallel={tensor}; change one of them"
    if tensor > 1 and not config.megatron.get("sequence_parallel"):
        yield (
            f"layout.tensor_parallel={tensor} with model.num_experts={model.num_experts} needs "
            f"megatron.sequence_parallel=true, which works on GPUs alone: without it every tensor-parallel rank would "
            f"route all tokens; set it, or layout.tensor_parallel=1"
        )


def _without_experts(config: RunConfig) -> Iterator[str]:
    neutral = ModelConfig()
    names = ("experts_per_token", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size", "num_dense_layers")
    given = [f"model.{name}={getattr(config.model, name)}" for name in names if _differs(config.model, neutral, name)]
    if (size := config.layout.expert_parallel) is not None:
        given.append(f"layout.expert_parallel={size}")
    given += [f"megatron.{key}={value}" for key, value in config.megatron.items() if key.startswith(_PREFIX)]
    for text in given:
        yield f"{text} has no effect without experts; remove it, or set model.num_experts"


def _differs(model: ModelConfig, neutral: ModelConfig, name: str) -> bool:
    return bool(getattr(model, name) != getattr(neutral, name))


def _shape(model: ModelConfig) -> Iterator[str]:
    assert model.num_experts is not None
    if model.experts_per_token > model.num_experts:
        yield (
            f"model.experts_per_token={model.experts_per_token} exceeds model.num_experts={model.num_experts}; "
            f"lower the first or raise the second"
        )
    if model.num_dense_layers >= model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} leaves none of model.num_layers={model.num_layers} for "
            f"model.num_experts={model.num_experts}; lower the first, or remove the last"
        )


def _fields(config: RunConfig) -> Iterator[str]:
    megatron = config.megatron
    for key, reason in _REFUSED.items():
        if megatron.get(key) not in _OFF:
            yield f"megatron.{key}={megatron[key]} cannot be had: {reason}; remove it"
    if megatron.get("moe_token_dispatcher_type") == "flex":
        yield f"megatron.moe_token_dispatcher_type=flex cannot be had: {_UNCHECKED}; choose alltoall or allgather"
    score = megatron.get("moe_router_score_function", "softmax")
    if megatron.get("moe_router_enable_expert_bias") and score != "sigmoid":
        yield (
            f"megatron.moe_router_enable_expert_bias=true with megatron.moe_router_score_function={score}: biases are "
            f"added to the scores of sigmoid alone; set that, or remove the first"
        )
    balancing = megatron.get("moe_router_load_balancing_type", "aux_loss")
    for kind in balancing if isinstance(balancing, list) else [balancing]:
        if kind not in _BALANCING:
            yield _not_of_a_microbatch(kind)


def _not_of_a_microbatch(kind: Any) -> str:
    reason = "its value depends on other microbatches" if kind == "global_aux_loss" else _UNCHECKED
    return (
        f"megatron.moe_router_load_balancing_type={kind} cannot be had: {reason}; choose {', '.join(_BALANCING[:-1])} "
        f"or {_BALANCING[-1]}"
    )
