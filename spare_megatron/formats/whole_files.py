"""JSON and TOML of files that are read whole. Errors in their text are ValueErrors, at any depth of nesting."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
