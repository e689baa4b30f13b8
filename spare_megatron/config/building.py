"""Builds a `RunConfig` from plain values, and suggests the nearest valid name for a mistyped one."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spare_megatron.config.batch_size import in_microbatches
from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.kinds import KINDS
from spare_megatron.faults.points import FaultKind
from spare_megatron.formats.codec import parsed_toml

_LEAST_LIKENESS = 0.65
"""Least difflib ratio between a mistyped name and a suggestion: a letter or a word off, not another name."""


def nearest(name: str, valid: Collection[str]) -> str | None:
    """The valid name closest to this one; a dotted name is matched by table first, then by key within that table.

    >>> valid = ["name", "spare.redundancy", "train.steps"]
    >>> [nearest(key, valid) for key in ("spare.redundency", "trian.steps", "spare.name")]
    ['spare.redundancy', 'train.steps', None]
    """
    table, _, last = name.rpartition(".")
    split = [key.rpartition(".") for key in valid]
    table = _near(table, {other for other, _, _ in split}) or table
    found = _near(last, [key for other, _, key in split if other == table])
    return f"{table}.{found}" if table and found else found


def advice(name: str, valid: Collection[str]) -> str:
    """How to fix an invalid name: the nearest valid one, the tables that have the key, or the valid names.

    >>> valid = ["name", "optimizer.redundancy", "optimizer.eps", "spare.redundancy"]
    >>> [advice(key, valid) for key in ("optimizer.name", "redundancy")]
    ['[optimizer] has redundancy, eps', 'its table is missing: optimizer.redundancy or spare.redundancy']
    """
    if found := nearest(name, valid):
        return f"the nearest valid one is {found}"
    table = name.rpartition(".")[0]
    if not table and (same := [key for key in valid if key.endswith(f".{name}")]):
        return f"its table is missing: {' or '.join(same)}"
    if table and (names := [key.rpartition(".")[2] for key in valid if key.rpartition(".")[0] == table]):
        return f"[{table}] has {', '.join(names)}"
    return f"there are {', '.join(dict.fromkeys(key.partition('.')[0] for key in valid))}"


def _near(name: str, valid: Collection[str]) -> str | None:
    return next(iter(get_close_matches(name, sorted(valid), 1, _LEAST_LIKENESS)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeProblem:
    key: str
    text: str


class Misfit(ValueError):
    """A value does not have the type of its field."""


def valid_keys() -> tuple[str, ...]:
    """Every dotted key in the order of the schema; `[megatron]` is open and contributes none."""
    return tuple(key for key, kind in leaf_kinds(RunConfig, "").items() if get_origin(kind) is not Mapping)


def build_run_config(
    values: Mapping[str, Any], megatron_kinds: Mapping[str, type] = MappingProxyType({})
) -> tuple[RunConfig, list[TypeProblem]]:
    """Builds the configuration from valid dotted keys; lists values of the wrong type, which keep their defaults, and
    of batches that cannot be had. `megatron_kinds` has types of fields of `[megatron]`.
    """
    problems: list[TypeProblem] = []
    table: dict[str, Any] = {}
    kinds = {**leaf_kinds(RunConfig, ""), **{f"megatron.{name}": kind for name, kind in megatron_kinds.items()}}
    for key, value in values.items():
        try:
            converted = convert(value, kinds[key], key) if key in kinds else value
        except Misfit as misfit:
            problems.append(TypeProblem(key=key, text=str(misfit)))
            continue
        section, _, name = key.partition(".")
        if name:
            table.setdefault(section, {})[name] = converted
        else:
            table[section] = converted
    config, impossible = in_microbatches(_build_sections(table), values.keys() - {problem.key for problem in problems})
    return config, [*problems, *(TypeProblem(key=key, text=text) for key, text in impossible.items())]


@cache
def leaf_kinds(schema: type[Any], prefix: str) -> Mapping[str, Any]:
    """Maps each dotted key to its type; cached because a campaign builds many configurations."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            kinds.update(leaf_kinds(kind, f"{prefix}{name}."))
        else:
            kinds[f"{prefix}{name}"] = kind
    return kinds


def _build_sections(table: Mapping[str, Any]) -> RunConfig:
    hints = get_type_hints(RunConfig)
    sections = {name: hints[name](**value) if is_dataclass(hints[name]) else value for name, value in table.items()}
    return RunConfig(**sections)


# --------------------------------------------------------------------------------------------------- one value


def convert(value: Any, kind: Any, key: str) -> Any:
    """Converts a value to the type of its field; a whole number is accepted for a float. Raises Misfit."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        inner = [choice for choice in get_args(kind) if choice is not type(None)]
        return convert(value, inner[0], key)
    if origin is tuple:
        return _convert_list(value, get_args(kind)[0], key)
    if is_dataclass(kind) and isinstance(kind, type):
        return _convert_table(value, kind, key)
    if choices := _choices(kind):
        if type(value) in (str, int) and value in choices:
            return kind(value) if isinstance(kind, type) else value
    elif kind is float and type(value) in (int, float):
        with contextlib.suppress(OverflowError):  # a whole number too large for a float
            return float(value)
    elif type(value) is kind:
        return value
    raise Misfit(f"{key}={value!r} must be {describe_kind(kind)}")


def _choices(kind: Any) -> Collection[str | int]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return KINDS if kind is FaultKind else get_args(kind) if get_origin(kind) is Literal else ()


def _convert_list(value: Any, kind: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise Misfit(f"{key}={value!r} must be a list")
    return tuple(convert(item, kind, f"{key}[{index}]") for index, item in enumerate(value))


def _convert_table(value: Any, kind: type[Any], key: str) -> Any:
    if not isinstance(value, dict):
        raise Misfit(f"{key}={value!r} must be a table")
    hints = get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise Misfit(f"unknown setting {key}.{name}; {advice(name, list(hints))}")
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in value:
            raise Misfit(f"{key}={value!r} needs {key}.{item.name}, {describe_kind(hints[item.name])}")
    return kind(**{name: convert(item, hints[name], f"{key}.{name}") for name, item in value.items()})


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a table directly below `[megatron]` is a value."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not key.startswith("megatron."):
            yield from flattened(value, f"{key}.")
        else:
            yield key, value


def parsed_value(text: str) -> Any:
    """The value of an override; what is not TOML is a string."""
    try:
        parsed = parsed_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def describe_kind(kind: Any) -> str:
    """Names the expected type in words.

    >>> describe_kind(int), describe_kind(Literal["fast", "slow"])
    ('a whole number', 'one of fast, slow')
    """
    if choices := _choices(kind):
        return f"one of {', '.join(map(str, choices))}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(kind, str(kind))
