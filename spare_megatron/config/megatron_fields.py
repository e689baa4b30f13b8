"""Which fields of `[megatron]` are set elsewhere, refused, ignored or honoured, and what an honoured one needs.

The table is `megatron_fields.toml`, with every field of megatron-core's TransformerConfig on one list. A field that is
on none is refused.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from spare_megatron.config.building import nearest
from spare_megatron.config.limits import Limit, NonNegativeFloat, PositiveFloat, PositiveInt
from spare_megatron.config.model_fields import YARN, is_latent, model_fields, uses_yarn
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.codec import parsed_toml

_TABLE = parsed_toml(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def by_field(lists: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """Maps each field to the value of its row; a row names fields separated by blanks. ValueError: listed twice."""
    found: dict[str, Any] = {}
    for name, value in ((name, value) for names, value in lists for name in names.split()):
        if name in found:
            raise ValueError(f"megatron_fields.toml: {name} is listed twice")
        found[name] = value
    return found


def _defaults(which: str) -> Mapping[str, Any]:
    return by_field((row["fields"], row.get("value")) for row in _TABLE["defaults"][which])


OURS_IN_MEGATRON_WORDS: Mapping[str, str] = by_field((names, setting) for setting, names in _TABLE["ours"].items())
"""Fields that follow from our settings, and those settings."""
FIXED_IN_MEGATRON: Mapping[str, str] = _TABLE["fixed"]
"""Fields that masking losses depends on, and why they cannot be set."""
REFUSED: Mapping[str, str] = by_field((names, reason) for reason, names in _TABLE["refused"].items())
"""Why fields cannot be had: each would train something else, end every rank, or change nothing."""
IGNORED: Mapping[str, str] = _TABLE["ignored"]
"""Fields without effect by Megatron's own rules, and the rule. They are accepted, with a warning."""
DEFAULTS = _defaults("usual")
"""Megatron's defaults other than None and false, of fields that are refused or need something."""
FUNCTION_IN_MEGATRON = _defaults("function")
"""Fields that change the function the model computes, with their defaults; others may change between runs."""
_FURTHER_DEFAULTS = _defaults("further")


def is_off(name: str, value: object) -> bool:
    """Whether a value of a field is Megatron's default, in any supported version."""
    default = DEFAULTS.get(name, False)
    defaults = (default, _FURTHER_DEFAULTS.get(name, default))
    return value is None or any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in defaults)


def fields_set(config: RunConfig, names: Iterable[str]) -> Iterator[str]:
    """Those of the named fields that are not off, as a user writes them."""
    values = {name: _value(config, name) for name in names}
    return (f"megatron.{name}={_written(value)}" for name, value in values.items() if not is_off(name, value))


def _value(config: RunConfig, name: str) -> Any:
    return config.megatron.get(name, DEFAULTS.get(name))


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ what has an effect


@dataclass(frozen=True, slots=True)
class Condition:
    """What a field needs beside it; `text` follows `megatron.FIELD=VALUE` in a problem."""

    is_met: Callable[[RunConfig], object]
    text: str


def _reproducible(reason: str) -> Condition:
    return Condition(
        lambda config: config.reduce.mode != "reproducible",
        f"does not go with reduce.mode=reproducible: {reason}; remove it, or set reduce.mode=fast",
    )


def _listed(config: RunConfig, name: str) -> list[Any]:
    """The value of a field that takes one or a list."""
    value = _value(config, name)
    return value if isinstance(value, list) else [value]


def _is_balanced(config: RunConfig) -> bool:
    return any(kind != "none" for kind in _listed(config, "moe_router_load_balancing_type"))


def _is_fused(config: RunConfig) -> bool:
    """Whether Megatron has a fusion for the activation."""
    fields = model_fields(config)
    functions = ["silu", "gelu"] if config.model.num_experts is None else ["silu"]
    return fields["activation_func"] in (functions if fields["gated_linear_unit"] else functions[1:])


def _has_enough_experts(config: RunConfig) -> bool:
    """Whether a token finds its experts in the groups that it is limited to; true for fields of wrong types."""
    num_groups, chosen = config.megatron.get("moe_router_num_groups"), config.megatron["moe_router_group_topk"]
    if type(num_groups) is not int or num_groups < 1 or chosen < 1:
        return True
    return bool(chosen <= config.model.experts_per_token <= chosen * (config.model.num_experts or 0) // num_groups)


def _is_window(config: RunConfig) -> bool:
    match config.megatron["window_size"]:
        case [int(before), int(after)]:
            return before >= 0 and after == 0
    return False


def _is_window_pattern(config: RunConfig) -> bool:
    match config.megatron["window_attn_skip_freq"]:
        case int(every):
            return every >= 2
        case [*layers]:
            return len(layers) == config.model.num_layers and set(layers) <= {0, 1}
    return False


# fmt: off
_NOT_LATENT = (
    "apply_rope_fusion", "attention_output_gate", "correction_range_round_to_int", "fused_single_qkv_rope",
    "kv_channels", "no_rope_freq", "rotary_interleaved", "rotary_percent", "sequence_parallel", "softmax_scale",
    "softmax_type",
)
"""Fields that latent attention ignores or refuses, or that were not checked with it."""

_SHARED_NEEDS: Mapping[str, Callable[[RunConfig], object]] = {
    "a gated model.activation": lambda c: model_fields(c)["gated_linear_unit"],
    "layout.context_parallel above 1": lambda c: c.layout.context_parallel > 1,
    "layout.pipeline_parallel above 1": lambda c: c.layout.pipeline_parallel > 1,
    "layout.tensor_parallel above 1": lambda c: c.layout.tensor_parallel > 1,
    "layout.virtual_pipeline above 1": lambda c: c.layout.virtual_pipeline > 1,
    "megatron.moe_router_load_balancing_type other than none": _is_balanced,
    "megatron.rope_type=yarn": uses_yarn,
    "model.position_embedding=rope": lambda c: c.model.position_embedding == "rope",
    "model.precision=bf16": lambda c: c.model.precision == "bf16",
    "model.shared_expert_ffn_hidden_size": lambda c: c.model.shared_expert_ffn_hidden_size,
    "model.sliding_window": lambda c: model_fields(c)["window_size"] is not None,
}
"""Needs that are not fields, as the table names them; any number of fields may share one."""

_FIELD_CONDITIONS: tuple[tuple[str, Condition], ...] = (
    ("activation_func_clamp_value", Condition(lambda c: not c.megatron.get("bias_activation_fusion"),
         "has no effect with megatron.bias_activation_fusion=true; remove one of them")),
    ("attention_backend", Condition(lambda c: c.megatron["attention_backend"] != "local",
         "leaves transformer-engine no attention; set model.transformer_impl=local instead")),
    ("bias_activation_fusion", Condition(_is_fused,
         "fuses swiglu and, without experts, gelu and geglu alone; remove it, or choose of these")),
    ("bias_dropout_fusion", Condition(
         lambda c: not (c.model.num_experts and c.may_use_transformer_engine and model_fields(c)["add_bias_linear"]),
         "does not go with biases of experts in megatron-core's layers of transformer-engine; remove it")),
    ("cp_comm_type", Condition(lambda c: {*map(str, _listed(c, "cp_comm_type"))} <= {"p2p", "all_gather", "a2a"},
         "cannot be had: process groups for it are not made here; choose p2p, all_gather or a2a")),
    ("cp_comm_type", Condition(lambda c: not c.data.reset_attention_mask,
         "has no effect with data.reset_attention_mask=true, for which keys and values are gathered; remove it")),
    ("fused_single_qkv_rope", Condition(lambda c: not model_fields(c)["qk_layernorm"],
         "does not go with model.qk_norm=true, whose norms stand between; remove one of them")),
    ("gradient_accumulation_fusion", _reproducible(
         "the kernel adds to the sum, and hides the gradient of a single microbatch")),
    ("microbatch_group_size_per_vp_stage", Condition(lambda c: c.rounds.multiple >= c.layout.pipeline_parallel,
         "is below layout.pipeline_parallel, with which Megatron's schedule cannot run; raise it")),
    ("moe_apply_probs_on_input", Condition(lambda c: c.model.experts_per_token == 1,
         "needs model.experts_per_token=1; remove it, or set that")),
    ("moe_aux_loss_coeff", Condition(
         lambda c: isinstance(c.megatron["moe_aux_loss_coeff"], list)
         is isinstance(_value(c, "moe_router_load_balancing_type"), list),
         "must be a list where megatron.moe_router_load_balancing_type is one, else a number; change one")),
    ("moe_router_enable_expert_bias", Condition(lambda c: c.megatron.get("moe_router_score_function") == "sigmoid",
         "with megatron.moe_router_score_function=softmax: biases are added to the scores of sigmoid alone; set that, "
         "or remove the first")),
    ("moe_router_group_topk", Condition(_has_enough_experts,
         "must be at most model.experts_per_token, and so many groups, of megatron.moe_router_num_groups, must have as "
         "many experts; change one of them")),
    ("moe_router_load_balancing_type", Condition(
         lambda c: {*map(str, _listed(c, "moe_router_load_balancing_type"))} <= {"aux_loss", "seq_aux_loss", "none"},
         "cannot be had: global_aux_loss depends on other microbatches, and nothing but aux_loss, seq_aux_loss and "
         "none was checked here; choose of these")),
    ("moe_router_load_balancing_type", Condition(
         lambda c: not _is_balanced(c) or any(_listed(c, "moe_aux_loss_coeff")),
         "has no effect without megatron.moe_aux_loss_coeff; remove it, or set that")),
    ("moe_router_score_function", Condition(
         lambda c: c.megatron["moe_router_score_function"] in ("softmax", "sigmoid"),
         "cannot be had: it was not checked here; choose softmax or sigmoid")),
    ("moe_token_dispatcher_type", Condition(lambda c: c.megatron["moe_token_dispatcher_type"] != "flex",
         "cannot be had: it was not checked here; choose alltoall or allgather")),
    ("mtp_num_layers", Condition(lambda c: not c.data.mask_settings,
         "does not go with settings of [data] that mask by the ends of documents: the ratio of the tokens that count "
         "for its losses and for the next token would differ between microbatches; remove it, or them")),
    ("mtp_num_layers", Condition(lambda c: c.layout.context_parallel == 1,
         "does not go with layout.context_parallel above 1: it moves tokens over Megatron's global group; change one")),
    ("mtp_num_layers", Condition(
         lambda c: not c.model.tie_embeddings or c.layout.pipeline_parallel * c.layout.virtual_pipeline == 1,
         "with several stages needs model.tie_embeddings=false: Megatron would make an output layer that nothing uses; "
         "set that")),
    ("mtp_num_layers", Condition(lambda c: c.megatron.get("recompute_granularity") != "full",
         "was not checked with megatron.recompute_granularity=full; remove one of them, or recompute modules")),
    ("mtp_num_layers", Condition(
         lambda c: c.megatron.get("no_rope_freq") is None and c.megatron.get("window_attn_skip_freq") is None,
         "does not go with megatron.no_rope_freq nor megatron.window_attn_skip_freq, which number the model's layers "
         "alone; remove it, or them")),
    ("multi_latent_attention", Condition(lambda c: model_fields(c)["num_query_groups"] is None,
         "has keys and values for every head, and query groups would be ignored; remove num_query_groups")),
    ("multi_latent_attention", Condition(lambda c: not model_fields(c)["add_qkv_bias"],
         "has projections without biases, and model.qkv_bias would be ignored; remove it")),
    ("multi_latent_attention", Condition(lambda c: c.model.rope_scaling_factor == 1.0,
         "stretches wavelengths by megatron.rotary_scaling_factor, and model.rope_scaling_factor would be ignored; set "
         "that instead")),
    ("multi_latent_attention", Condition(lambda c: c.layout.tensor_parallel == 1,
         "gathers latent queries over Megatron's global groups of ranks, which are not there; set "
         "layout.tensor_parallel=1")),
    ("multi_latent_attention", Condition(
         lambda c: not c.may_use_transformer_engine
         or (c.layout.context_parallel == 1 and not c.data.reset_attention_mask),
         "with layers of transformer-engine was not checked with layout.context_parallel above 1, nor with "
         "data.reset_attention_mask; change these, or set model.transformer_impl=local")),
    ("rope_type", Condition(lambda c: c.megatron["rope_type"] in ("rope", "yarn"),
         "cannot be had: Megatron has rope and yarn; choose one of them")),
    ("rope_type", Condition(lambda c: is_latent(c) or not uses_yarn(c) or c.model.rope_scaling_factor == 1.0,
         "stretches wavelengths by megatron.rotary_scaling_factor, and model.rope_scaling_factor would be ignored; set "
         "that instead")),
    ("rope_type", Condition(lambda c: is_latent(c) or not uses_yarn(c) or c.layout.context_parallel == 1,
         "does not go with layout.context_parallel above 1: Megatron does not divide its positions; change one")),
    ("rotary_percent", Condition(
         lambda c: not isinstance(part := c.megatron["rotary_percent"], int | float) or part <= 1.0,
         "is the part of a head that is rotated, at most 1; lower it")),
    *((field, Condition(lambda c: c.megatron.get("rotary_percent") in (None, 1.0),
         "was not checked with megatron.rotary_percent below 1; remove one of them"))
      for field in ("apply_rope_fusion", "fused_single_qkv_rope")),
    *((field, Condition(lambda c: is_latent(c) or not uses_yarn(c),
         "does not go with megatron.rope_type=yarn: it would be ignored, or was not checked; remove it"))
      for field in ("apply_rope_fusion", "fused_single_qkv_rope", "rotary_interleaved", "rotary_percent")),
    *((field, Condition(lambda c: not is_latent(c),
         "does not go with megatron.multi_latent_attention=true: it would be ignored, or was not checked; remove it"))
      for field in _NOT_LATENT),
    ("recompute_modules", Condition(
         lambda c: c.model.num_experts is not None
         or not {"moe", "moe_act", "shared_experts"} & {*map(str, _listed(c, "recompute_modules"))},
         "names modules that only experts have; remove them, or set model.num_experts")),
    ("window_attn_skip_freq", Condition(_is_window_pattern,
         "must be K from 2 on, where every K-th layer has no window, or a list of 0 or 1 for each layer; change it")),
    ("window_size", Condition(_is_window,
         "must be the number of tokens before and 0, as tokens after never count; change it")),
)
"""Further conditions of single fields."""
# fmt: on


def _condition(need: str) -> Condition:
    """The condition of a need in the table. ValueError: it is none."""
    if need == "experts":
        text = "has no effect without experts; remove it, or set model.num_experts"
        return Condition(lambda config: config.model.num_experts is not None, text)
    if need == "reduce.mode other than reproducible":
        return _reproducible("Megatron does not count it among its deterministic kernels")
    is_met = _SHARED_NEEDS.get(need) or _is_set(need.removeprefix("megatron."))
    return Condition(is_met, f"has no effect without {need}; remove it, or set that")


def _is_set(need: str) -> Callable[[RunConfig], object]:
    """Whether another field has a value, `FIELD=VALUE`, or any but its default, `FIELD`."""
    name, is_given, wanted = need.partition("=")
    if name not in _TABLE["honoured"]:
        raise ValueError(f"megatron_fields.toml: no field and no setting is known as the need {need}")
    return lambda c: _value(c, name) == wanted if is_given else not is_off(name, _value(c, name))


_KINDS: Mapping[str, type] = {"bool": bool, "int": int, "str": str}
_LIMITS: Mapping[str, Limit] = {
    name: get_args(kind)[1]
    for name, kind in (("above 0", PositiveFloat), ("from 0", NonNegativeFloat), ("from 1", PositiveInt))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Honoured:
    """A field that changes the model, the step, or its schedule and memory; the table says what its columns mean."""

    where: str
    kind: type | None
    limit: Limit | None
    conditions: tuple[Condition, ...]


def honoured_row(name: str, where: str = "", kind: str = "", limit: str = "", needs: Iterable[str] = ()) -> Honoured:
    """A row of the table. ValueError, KeyError, TypeError: it has a need, a value or a column that means nothing."""
    if where not in ("", "gpu", "norms", "te"):
        raise ValueError(f"megatron_fields.toml: {name} is said to be had in {where}, which is no such place")
    return Honoured(
        where=where,
        kind=_KINDS[kind] if kind else None,
        limit=_LIMITS[limit] if limit else None,
        conditions=(*map(_condition, needs), *(condition for field, condition in _FIELD_CONDITIONS if field == name)),
    )


HONOURED: Mapping[str, Honoured] = {name: honoured_row(name, **row) for name, row in _TABLE["honoured"].items()}
"""Fields of `[megatron]` that may be set, and what each needs to have an effect."""

OF_LATENT_ATTENTION = (
    *(name for name, row in _TABLE["honoured"].items() if "megatron.multi_latent_attention" in row.get("needs", ())),
    *("rope_type", *YARN),
)
"""Fields of Megatron's configuration of latent attention, which other configurations lack."""

COUNTED_WITH = {name: row.kind for name, row in HONOURED.items() if row.kind is not None}
"""Types of the fields that sizes and memory are computed from without Megatron loaded; the loader checks them."""

OF_TRANSFORMER_ENGINE = tuple(name for name, row in HONOURED.items() if row.where == "te")
"""Fields that only layers of transformer-engine use; other layers silently ignore most of them."""

NOT_OF_TORCH_NORMS = tuple(name for name, row in HONOURED.items() if row.where == "norms")
"""Fields that need the norms of transformer-engine or apex; a norm of torch refuses them without a reason."""

ON_GPUS_ALONE = tuple(name for name, row in HONOURED.items() if row.where)
"""Fields with which ranks on CPUs cannot be built, cannot compute, or ignore them."""


# ------------------------------------------------------------------------------------------------------- the check


def field_problems(config: RunConfig) -> Iterator[str]:
    """Why fields of `[megatron]` cannot be had, or would have no effect."""
    for name, value in config.megatron.items():
        yield from _problems_of(config, name, value)
    yield from _recipe_problems(config)


def _problems_of(config: RunConfig, name: str, value: Any) -> Iterator[str]:
    if name in OURS_IN_MEGATRON_WORDS:
        yield f"megatron.{name} follows from {OURS_IN_MEGATRON_WORDS[name]}; set that instead"
    elif name in FIXED_IN_MEGATRON:
        yield f"megatron.{name} cannot be set: {FIXED_IN_MEGATRON[name]}; remove it"
    elif name in REFUSED:
        if not is_off(name, value):
            yield f"megatron.{name}={value} cannot be had: {REFUSED[name]}; remove it"
    elif name in HONOURED:
        yield from _misfits(config, name, value)
    elif name not in IGNORED:
        near = nearest(name, HONOURED)
        hint = f"; did you mean {near}?" if near else ", and none is near; remove it"
        yield f"megatron.{name} is not a field of megatron-core's TransformerConfig that is known here{hint}"


def _misfits(config: RunConfig, name: str, value: Any) -> Iterator[str]:
    row = HONOURED[name]
    numbers: list[Any] = value if isinstance(value, list) else [value]
    for number in numbers:
        if type(number) not in (int, float):
            continue
        if not math.isfinite(number):
            yield f"megatron.{name}={value} must be finite; choose a number"
        elif row.limit is not None and not row.limit.is_met(number):
            yield f"megatron.{name}={value} {row.limit.text}"
    is_usual = is_off(name, value) and (name != "rope_type" or is_latent(config))  # yarn is usual there alone
    if not is_usual:
        yield from (f"megatron.{name}={_written(value)} {one.text}" for one in row.conditions if not one.is_met(config))


_STATELESS_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Values of Megatron's `fp8_recipe` that scale a tensor by its own values."""


def _recipe_problems(config: RunConfig) -> Iterator[str]:
    megatron = config.megatron
    recipe = megatron.get("fp8_recipe", DEFAULTS["fp8_recipe"])
    if not megatron.get("fp8") or recipe in _STATELESS_RECIPES:
        return
    what = f"megatron.fp8_recipe={recipe}{'' if 'fp8_recipe' in megatron else ', the default,'}"
    remedy = "set megatron.fp8_recipe to tensorwise, blockwise or mxfp8"
    if recipe == "delayed":
        # It would also take maxima over all pipeline stages of a group, which come to them at different times.
        yield f"{what} scales by values of earlier microbatches, which no other group and no checkpoint has; {remedy}"
    else:
        yield f"{what} may keep values of earlier microbatches; {remedy}"


def field_warnings(config: RunConfig) -> Iterator[str]:
    """Fields that Megatron ignores by rules of its own."""
    for name, value in config.megatron.items():
        if name in IGNORED and not is_off(name, value):
            yield f"megatron.{name}={_written(value)} has no effect: {IGNORED[name]}; remove it"
