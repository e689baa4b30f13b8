"""Writes a resolved configuration: as TOML, by dotted key, and without the secrets that `slurm.setup` exports."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import tomli_w

from spare_megatron.config.model_fields import replaced_settings
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.whole_files import parsed_toml

_EXPORT = re.compile(r"(\bexport\s+[^\s=]+=).*", re.DOTALL)


def write_with_exports(file: Path, text: str, config: RunConfig) -> None:
    """Writes `text`, for its owner alone if `slurm.setup` exports variables, which may be keys to services."""
    is_private = any(_EXPORT.search(line) for line in config.slurm.setup)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if is_private else 0o666)
    with os.fdopen(fd, "w", encoding="utf-8") as stream:
        if is_private:
            os.fchmod(fd, 0o600)  # an existing file keeps its mode otherwise
        stream.write(text)


def without_exports(text: str) -> str:
    """Blanks the exported values in a configuration as TOML.

    >>> without_exports('slurm.setup = ["export KEY=abc"]').split()
    ['[slurm]', 'setup', '=', '[', '"export', 'KEY=...",', ']']
    """
    table = parsed_toml(text)
    lines = table.get("slurm", {}).get("setup", [])
    if not any(_EXPORT.search(line) for line in lines):
        return text
    table["slurm"]["setup"] = [_EXPORT.sub(r"\1...", line) for line in lines]
    return tomli_w.dumps(table)


def dump_run_config(config: RunConfig) -> str:
    """The configuration as TOML with every setting that counts spelled out; loads back to an equal one."""
    table = _plain(config)
    for name in replaced_settings(config):
        table["model"].pop(name, None)  # beside the field in its place it would be a contradiction
    return tomli_w.dumps(table)


def settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every setting by dotted key; of `[megatron]` only the keys that are set."""
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
