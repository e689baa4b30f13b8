"""Lines of `slurm.setup` that export variables, as keys to services: who may read them, and where they go."""

import os
import re
import tomllib
from pathlib import Path

import tomli_w

from spare_megatron.config.schema import RunConfig

_EXPORT = re.compile(r"(\bexport\s+[^\s=]+=).*", re.DOTALL)


def write_with_exports(file: Path, text: str, config: RunConfig) -> None:
    """Writes what has the configuration's lines; for its owner alone if one of them exports something.

    Others of a project may read all else.
    """
    is_private = any(_EXPORT.search(line) for line in config.slurm.setup)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if is_private else 0o666)
    with os.fdopen(fd, "w") as stream:
        if is_private:
            os.fchmod(fd, 0o600)  # it may have been there
        stream.write(text)


def without_exports(text: str) -> str:
    """A configuration as TOML, without the values that are exported.

    >>> without_exports('slurm.setup = ["export KEY=abc"]').split()
    ['[slurm]', 'setup', '=', '[', '"export', 'KEY=...",', ']']
    """
    table = tomllib.loads(text)
    lines = table.get("slurm", {}).get("setup", [])
    if not any(_EXPORT.search(line) for line in lines):
        return text
    table["slurm"]["setup"] = [_EXPORT.sub(r"\1...", line) for line in lines]
    return tomli_w.dumps(table)
