"""The resolved configuration as text, to be saved with a run."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import tomli_w

from spare_megatron.config.schema import RunConfig


def dump_run_config(config: RunConfig) -> str:
    """The configuration as TOML that loads back to an equal one, every setting spelled out."""
    return tomli_w.dumps(_plain(config))


def settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key, in the order of the schema; of `[megatron]` those that are set."""
    for section in fields(config):
        value = getattr(config, section.name)
        if is_dataclass(value):
            yield from ((f"{section.name}.{item.name}", _plain(getattr(value, item.name))) for item in fields(value))
        elif isinstance(value, Mapping):
            yield from ((f"{section.name}.{key}", _plain(item)) for key, item in value.items())
        else:
            yield section.name, value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        named = {item.name: getattr(value, item.name) for item in fields(value)}
        return {name: _plain(item) for name, item in named.items() if item is not None}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
