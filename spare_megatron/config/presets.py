"""The presets that ship with the package: their names, and the files behind them."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
KINDS = ("run", "model", "cluster")
"""Its folders. No two presets have the same name, whatever their kind."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_LEAST_LIKENESS = 0.6
_MOST_SUGGESTED = 4


def shipped_presets() -> Mapping[str, Path]:
    """Every shipped preset by name, those of runs first."""
    return {file.stem: file for kind in KINDS for file in sorted((FOLDER / kind).glob("*.toml"))}


def preset_file(given: str | Path, folder: Path = Path()) -> Path:
    """The file of a preset that is given as a path relative to `folder`, or as the name of a shipped one.

    An existing file wins over a name. Raises ValueError if a name is none of those that ship.
    """
    path = folder / given
    if not _NAME.fullmatch(str(given)) or (path.exists() and not path.is_dir()):
        return path
    presets = shipped_presets()
    if str(given) not in presets:
        raise ValueError(f"{path} is no file, and no preset is named {given}; {suggestion(str(given))}")
    return presets[str(given)]


def suggestion(name: str) -> str:
    """Names of shipped presets that resemble this one, or where they are listed.

    >>> suggestion("Wipe-Outs")
    'did you mean wipeout_cpu? `spare config list` lists all presets'
    >>> suggestion("mine")
    '`spare config list` lists the presets that ship'
    """
    near = get_close_matches(name.lower().replace("-", "_"), list(shipped_presets()), _MOST_SUGGESTED, _LEAST_LIKENESS)
    if not near:
        return "`spare config list` lists the presets that ship"
    return f"did you mean {', '.join(near)}? `spare config list` lists all presets"


def description(file: Path) -> str:
    """What a preset is: the comment at the top of its file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end])
