"""Builds Megatron's TransformerConfig for a run and validates the `[megatron]` fields, which Megatron rarely does."""

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from spare_megatron.config.building import nearest
from spare_megatron.config.checks.requirements import EXPERTS, broken
from spare_megatron.config.megatron_fields import field_problems
from spare_megatron.config.model_fields import YARN, is_latent, model_fields, num_future_tokens, uses_yarn
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.supported_versions import installed_version
from spare_megatron.mcore.model.compatibility import frees_what_is_sent


@dataclasses.dataclass
class _OfYarn:
    """What Megatron's encoding with YaRN takes, and no configuration of it declares."""

    correction_range_round_to_int: bool = True


FIELDS = {
    field.name: field
    for built in (MLATransformerConfig, TransformerConfig, _OfYarn)  # the second is stricter than the first
    for field in dataclasses.fields(built)
    if field.init
}
"""Of all models that can be built."""

_OF_GPT = ("rope_type", "rotary_percent")
"""Fields of models with latent attention alone; of others they are arguments of `GPTModel`."""

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has a declared type. Unknown kinds of type accept every value.

    >>> from typing import Optional
    >>> fits(1, Optional[float]), fits(True, int), fits([1, "a"], list[int]), fits("x", Literal["x", "y"])
    (True, False, False, True)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if list in (origin, kind):
        return isinstance(value, list) and all(fits(item, one) for item in value for one in inner)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is Callable or kind is Callable:
        return callable(value)
    if kind in (int, bool, str):
        return type(value) is kind
    if kind is float:
        return type(value) in (int, float)
    return not isinstance(kind, type) or isinstance(value, kind)


def in_words(kind: Any) -> str:
    """Describes a declared type in an error message.

    >>> from typing import Optional, Union
    >>> in_words(Optional[Union[int, list[int]]])
    'a whole number or a list (each a whole number)'
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in inner if one is not NoneType))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if list in (origin, kind):
        return f"a list (each {in_words(inner[0])})" if inner else "a list"
    if origin is tuple:
        return f"a list of {len(inner)} ({', '.join(map(in_words, inner))})"
    if origin is Callable or kind is Callable:
        return "a function"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def transformer_config(config: RunConfig, device: torch.device) -> TransformerConfig:
    """Megatron's configuration of a run's model and schedule. ValueError: a `[megatron]` field cannot be used."""
    _refuse(config)
    fields = _fields(config, device)
    others = [field.name for field in dataclasses.fields(_OfYarn)] if is_latent(config) else (*_OF_GPT, *YARN)
    apart = {name: fields.pop(name) for name in others if name in fields}
    with warnings.catch_warnings(action="ignore"):  # Megatron's own
        try:
            built = (MLATransformerConfig if is_latent(config) else TransformerConfig)(**fields)
        except Exception as error:  # its checks raise many types
            raise ValueError(_refused_by_megatron(config, error)) from error
    if uses_yarn(config) and not is_latent(config):  # Megatron reads what its class does not declare
        for name in YARN:
            setattr(built, f"yarn_{name}", apart.get(name, FIELDS[name].default))
    return built


def _refused_by_megatron(config: RunConfig, error: Exception) -> str:
    """The error message: the values set and Megatron's error, or the source line of an assertion without text."""
    message = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
    chosen = ", ".join(f"megatron.{key}={value!r}" for key, value in config.megatron.items()) or "this model and layout"
    return f"megatron-core refuses {chosen}: {message}; change it"


def _fields(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """All Megatron fields to set. Raises ValueError if a `[megatron]` value has the wrong type."""
    model, layout = config.model, config.layout
    dtype = torch.bfloat16 if model.precision == "bf16" else torch.float32
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "bf16": model.precision == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": layout.tensor_parallel,
        "context_parallel_size": layout.context_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        # Gradients stay sums over tokens: groups may compute different numbers of microbatches.
        "calculate_per_token_loss": True,
        # The default synchronizes the GPU at every transfer, to work around an old torch bug.
        "batch_p2p_sync": False,
    }
    if model.num_experts is not None:
        fields["expert_model_parallel_size"] = config.row_size
        fields["moe_token_dispatcher_type"] = "allgather" if device.type == "cpu" else "alltoall"
    if layout.virtual_pipeline > 1:
        fields["virtual_pipeline_model_parallel_size"] = layout.virtual_pipeline
        fields["batch_p2p_comm"] = False
    if config.reduce.mode == "reproducible" and device.type != "cpu":
        fields["deterministic_mode"] = True
    if device.type == "cpu":
        fields["use_cpu_initialization"] = True
    if is_latent(config):
        fields["rotary_base"] = model.rope_base
    fields |= {key: _megatron_value(key, value) for key, value in model_fields(config).items()}
    if num_future_tokens(config):
        fields["mtp_loss_scaling_factor"] = 0.0  # these losses are terms here (`future_tokens`)
    if fields["window_size"] is not None:
        fields["window_size"] = tuple(fields["window_size"])  # transformer-engine compares it with tuples
    return fields


def _refuse(config: RunConfig) -> None:
    """Raises ValueError with the field and the reason if `[megatron]` or the schedule is not supported."""
    for problem in (*field_problems(config), *broken(EXPERTS, config)):
        raise ValueError(problem)
    for key in config.megatron:
        if key not in FIELDS:
            raise ValueError(
                f"megatron.{key} is not a field of megatron-core {installed_version('megatron-core')}, and of other "
                f"supported versions alone; remove it"
            )
    layout = config.layout
    if layout.virtual_pipeline > 1 and config.megatron.get("deallocate_pipeline_outputs") and frees_what_is_sent():
        raise ValueError(
            f"megatron.deallocate_pipeline_outputs=true frees outputs before the interleaved schedule of megatron-core "
            f"{installed_version('megatron-core')} has sent them; remove it, set layout.virtual_pipeline=1, or install "
            f"megatron-core 0.18 or later"
        )
    if layout.virtual_pipeline > 1 and layout.pipeline_parallel == 1:
        raise ValueError(
            f"layout.virtual_pipeline={layout.virtual_pipeline} needs layout.pipeline_parallel > 1; set it to 1"
        )
    if layout.virtual_pipeline > 1 and config.megatron.get("batch_p2p_comm"):
        # With two stages both transfers of a batch go to the same rank, and the receiver mixes them up.
        raise ValueError(
            "megatron.batch_p2p_comm=true corrupts gradients silently in the interleaved schedule; remove it, "
            "or set layout.virtual_pipeline=1"
        )


def _megatron_value(key: str, value: Any) -> Any:
    """Converts a value to the type of Megatron's field. Raises ValueError if it does not fit."""
    field = FIELDS[key]
    meant = _named(key, value, field.default) if isinstance(value, str) else value
    if not fits(meant, field.type):
        raise ValueError(f"megatron.{key}={value!r} must be {in_words(field.type)}; change it")
    return meant


def _is_activation(function: Any) -> bool:
    """Whether a function is elementwise and deterministic."""
    given = torch.linspace(-3.0, 3.0, 64).view(8, 8)
    try:
        result, part = function(given.clone()), function(given[:, :4].clone())
        return bool(result.shape == given.shape) and torch.allclose(result[:, :4], part)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


def _squared_relu(values: torch.Tensor) -> torch.Tensor:
    return F.relu(values).square()  # Megatron's own compiles itself at its first call


def _quick_gelu(values: torch.Tensor) -> torch.Tensor:
    return values * torch.sigmoid(1.702 * values)  # likewise


_OUR_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
}
"""Activation functions that torch has under no name of its own."""


def _named(key: str, value: str, default: Any) -> Any:
    """Resolves a name to a function or enum member where Megatron expects one; otherwise returns the text."""
    if key == "activation_func":
        function = _OUR_FUNCTIONS.get(value) or getattr(F, value, None)
        if not _is_activation(function):
            raise ValueError(
                f"megatron.activation_func={value} is not an elementwise function of torch.nn.functional; try "
                f"gelu or silu"
            )
        return function
    if isinstance(default, Enum):
        names = [member.name for member in type(default)]
        if value not in names:
            raise ValueError(
                f"megatron.{key}={value} is none of {', '.join(names)}"
                + (f"; did you mean {near}?" if (near := nearest(value, names)) else "; set one of them")
            )
        return type(default)[value]
    return value
