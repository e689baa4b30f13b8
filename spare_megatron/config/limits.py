"""Limits of single settings, declared in the types of the schema's fields, and the settings that violate them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints


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
ShareBelowOne = Annotated[
    float, Limit(lambda value: 0 <= value < 1, "lies outside [0, 1); choose a value from 0 to below 1")
]


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
