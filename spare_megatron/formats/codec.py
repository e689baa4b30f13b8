"""JSON of entries of the log, votes, lines of the journal and values in the control store; JSON and TOML of files.

Errors in a text are ValueErrors, at any depth of nesting.
"""

import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_ENCODER = msgspec.json.Encoder()


def encode(value: object) -> str:
    """One line of ASCII, equal for equal values. Dataclasses become objects with all fields, tuples become arrays."""
    try:
        text = _ENCODER.encode(value)
        if text.isascii() and b"null" not in text:  # msgspec writes NaN as null, too; the json module escapes text
            return text.decode()
    except (TypeError, UnicodeEncodeError):  # a subclass, such as NumPy's float64; names of files that are not Unicode
        pass
    return json.dumps(value, separators=(",", ":"), default=asdict)


def set_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    return {name: found for name, default in _defaults(value.__class__) if (found := getattr(value, name)) != default}


def decode(text: str | bytes, kind: type[T], beside: tuple[str, ...] = ()) -> T:
    """The inverse of `encode`; `beside` are fields beside those of a dataclass. ValueError, one line: no such text."""
    try:
        for decoder in _decoders(kind, beside):
            found: T = decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        values = parsed_json(text)
        further = values.keys() - {*beside, *_names(kind)} if is_dataclass(kind) and isinstance(values, dict) else ()
        if further:
            raise ValueError(f"unknown fields: {', '.join(sorted(further))}") from None
        return convert(values, kind)
    return found


def decode_head(text: str | bytes, kind: type[T]) -> T:
    """Decodes a dataclass from text with further fields, as `decode` does otherwise."""
    try:
        found: T = _decoders(kind, ())[-1].decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return convert(parsed_json(text), kind)
    return found


def convert(values: Any, kind: type[T]) -> T:
    """The value of a kind from what JSON has of it; fields that a dataclass does not know are ignored. ValueError."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


@cache
def _defaults(kind: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(kind)]


def _new_decoders(kind: Any, beside: tuple[str, ...]) -> list[msgspec.json.Decoder[Any]]:
    # The last one decodes, and ignores unknown fields of a dataclass, which the one before it refuses.
    if not is_dataclass(kind):
        return [msgspec.json.Decoder(kind)]
    raw = [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in (*beside, *_names(kind))]
    names = msgspec.defstruct("Names", raw, forbid_unknown_fields=True, gc=False)
    return [msgspec.json.Decoder(names), msgspec.json.Decoder(kind)]


_decoders: Callable[[Any, tuple[str, ...]], list[msgspec.json.Decoder[Any]]] = cache(_new_decoders)


_MOST_LEVELS = 200
"""Far below what any function that recurses over the values can take."""


def parsed_json(text: str | bytes) -> Any:
    return _parsed(json.loads, text)


def parsed_toml(text: str) -> dict[str, Any]:
    return _parsed(tomllib.loads, text)  # type: ignore[no-any-return]


def json_object(file: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError, which names the file, if it holds none, and OSError."""
    try:
        found = parsed_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return found


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        found = parse(text)
        level = [found]
        for _ in range(_MOST_LEVELS):
            below = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
            level = [value for values in below for value in values]
            if not level:
                return found
    except RecursionError:
        pass
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
