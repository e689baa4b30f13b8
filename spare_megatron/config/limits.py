"""Types of the schema's fields: limits of single settings, and what violates them; terms that may change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition on a setting's value; `text` states it and the remedy, and follows `key=value` in a problem."""

    is_met: Callable[[float], bool]
    text: str


PositiveInt = Annotated[int, Limit(lambda value: value >= 1, "must be at least 1; raise it")]
NonNegativeInt = Annotated[int, Limit(lambda value: value >= 0, "must be at least 0; raise it")]
PositiveFloat = Annotated[float, Limit(lambda value: value > 0, "must be above 0; raise it")]
FloatFromOne = Annotated[float, Limit(lambda value: value >= 1, "must be at least 1; raise it")]
NonNegativeFloat = Annotated[float, Limit(lambda value: value >= 0, "must be at least 0; raise it")]
Share = Annotated[float, Limit(lambda value: 0 <= value <= 1, "lies outside [0, 1]; choose a value from 0 to 1")]
ShareBelowOne = Annotated[
    float, Limit(lambda value: 0 <= value < 1, "lies outside [0, 1); choose a value from 0 to below 1")
]

# fmt: off
ChangeableTerm = Literal[
    "corpus", "program", "train.seed", "model.seq_length", "model.precision", "model.activation", "model.norm_eps",
    "model.experts_per_token", "model.rope_base", "model.rope_scaling_factor", "model.sliding_window",
    "data.eod_mask_loss", "data.reset_attention_mask", "data.reset_position_ids", "data.end_of_document",
    "data.fim_rate", "data.fim_spm_rate", "data.fim_tokens",
    "megatron.activation_func_clamp_value", "megatron.glu_linear_offset", "megatron.moe_apply_probs_on_input",
    "megatron.moe_router_group_topk", "megatron.moe_router_num_groups", "megatron.moe_router_pre_softmax",
    "megatron.moe_router_score_function", "megatron.moe_router_topk_scaling_factor", "megatron.no_rope_freq",
    "megatron.softmax_scale", "megatron.window_attn_skip_freq", "megatron.beta_fast", "megatron.beta_slow",
    "megatron.correction_range_round_to_int", "megatron.mscale", "megatron.mscale_all_dim",
    "megatron.original_max_position_embeddings", "megatron.rope_type", "megatron.rotary_scaling_factor", "sites.site",
]
"""Terms of a training that shape none of its state, nor what the parameters mean."""
# fmt: on


def violations(config: Any, prefix: str = "") -> Iterator[str]:
    """Every setting outside its limit: the value, the limit, the remedy. A setting that is None has no limit.

    >>> from spare_megatron.config.schema import LayoutConfig
    >>> list(violations(LayoutConfig(num_groups=0), "layout."))
    ['layout.num_groups=0 must be at least 1; raise it']
    """
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if is_dataclass(value):
            yield from violations(value, f"{prefix}{name}.")
        elif value is not None:
            yield from (f"{prefix}{name}={value} {limit.text}" for limit in _limits(kind) if not limit.is_met(value))


def _limits(kind: Any) -> Iterator[Limit]:
    """The limits in a type: its own annotation's, or those of a union's members."""
    for part in get_args(kind):
        yield from (part,) if isinstance(part, Limit) else _limits(part)
