"""Reads a model's description that another program wrote: each field by its type, in every format of weights.

A wrong value is a ValueError of one line that names the file, the field and the value. Loads without torch.
"""

import math
import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from spare_megatron.config.building import describe_kind
from spare_megatron.config.limits import Limit

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Schema = TypeVar("_Schema", bound="DataclassInstance")

NumberFromOne = Annotated[
    int | float, Limit(lambda value: 1 <= value <= sys.float_info.max, "must be a finite number from 1")
]

_NAMES: Mapping[Any, str] = {NoneType: "null", dict: "an object", list: "a list", tuple: "a tuple"}


def read_fields(schema: type[_Schema], values: Mapping[str, Any], where: str) -> _Schema:
    """The fields of a dataclass; those that `values` lacks have their defaults, and others of `values` are left alone.

    Types are plain ones, Literals, lists, and unions of these; `Annotated` adds a `Limit`. No value is converted.
    """
    kinds = get_type_hints(schema, include_extras=True)
    required = {field.name: None for field in fields(schema) if field.default is MISSING}
    require_kinds(kinds, {**required, **values}, where)
    return schema(**{name: values[name] for name in kinds if name in values})


def require_kinds(kinds: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    for name, kind in kinds.items():
        if name in values and (problem := _problem(values[name], kind)):
            raise ValueError(f"{where}{name}={shown(values[name])} {problem}")


def require_values(allowed: Mapping[str, Collection[Any]], values: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a field with a value that no model here has; a field may always be absent."""
    for name, equals in allowed.items():
        if name in values and values[name] not in equals:
            raise ValueError(f"{where}{name}={shown(values[name])} {_without_equal(equals)}")


def shown(value: object) -> str:
    """A value in a line of a message, cut where it is long or deep."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxlong, short.maxother = 3, 60, 40, 60
    return short.repr(value)


def _problem(value: Any, kind: Any) -> str:
    """What is wrong with a value, as a message says it after the value; empty if nothing is."""
    for member in _members(kind):
        base, *limits = get_args(member) if get_origin(member) is Annotated else (member,)
        if _is_of(value, base):
            return next((limit.text for limit in limits if not limit.is_met(value)), "")
    if get_origin(kind) is Literal:
        return _without_equal(get_args(kind))
    return f"must be {_described(kind)}"


def _is_of(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin in (Union, UnionType):
        return any(_is_of(value, member) for member in args)
    if origin in (list, tuple, dict):
        items = value.values() if type(value) is dict else value
        return type(value) is origin and all(_is_of(item, args[0 if origin is tuple else -1]) for item in items)
    return kind is Any or (type(value) is kind and (kind is not float or math.isfinite(value)))


def _described(kind: Any) -> str:
    bases = [get_args(member)[0] if get_origin(member) is Annotated else member for member in _members(kind)]
    if len(bases) > 1:
        return " or ".join(_described(base) for base in bases if base is not int or float not in bases)
    origin, args = get_origin(bases[0]), get_args(bases[0])
    if origin in (Union, UnionType):
        return _described(bases[0])
    if args and origin in (list, dict) and args[-1] is not Any:
        return f"{_NAMES[origin]}, each {_described(args[-1])}"
    return _NAMES.get(origin or bases[0]) or describe_kind(bases[0])


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _without_equal(choices: Collection[Any]) -> str:
    named = ("null" if choice is None else shown(choice) for choice in choices)
    return f"is not supported here; only {', '.join(named)} can be imported"
