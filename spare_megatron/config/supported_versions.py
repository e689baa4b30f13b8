"""Supported versions of Python and of other packages, with the reasons; docs/gpu.md has them as a table.

The package pins some of them too, but cluster images may not follow the pins.
"""

import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple


class Range(NamedTuple):
    """A row of supported_versions.toml."""

    first: str
    before: str
    reasons: str
    except_for: tuple[str, str] | None = None

    def __str__(self) -> str:
        gap = f" except >={self.except_for[0]},<{self.except_for[1]}" if self.except_for else ""
        return f">={self.first},<{self.before}{gap}"

    def has(self, installed: str) -> bool:
        found = release(installed)
        is_in_gap = self.except_for is not None and _between(found, *self.except_for)
        return _between(found, self.first, self.before) and not is_in_gap


_TOML = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TRANSFORMER_ENGINE_WITH_0_16 = Range(**_TOML.pop("transformer-engine with megatron-core 0.16"))
"""Until 0.17 is the oldest megatron-core."""
SUPPORTED: Mapping[str, Range] = {package: Range(**row) for package, row in _TOML.items()}

_OF_TORCH = "it comes with torch; take away what stands in its place (LD_LIBRARY_PATH, LD_PRELOAD), or install it anew"
_REMEDIES = {"NCCL": _OF_TORCH, "RCCL": _OF_TORCH, "Python": "make the environment with another python"}
"""For what is not a package itself, or has several names."""


def supported(package: str, megatron_core: str | None = None) -> Range:
    """The supported versions of a package beside a version of megatron-core, by default the installed one."""
    beside = megatron_core or installed_version("megatron-core")
    if package == "transformer-engine" and beside is not None and release(beside) < (0, 17):
        return _TRANSFORMER_ENGINE_WITH_0_16
    return SUPPORTED[package]


def version_problem(package: str, installed: str | None, megatron_core: str | None = None) -> str:
    """Why `installed` (None if absent) is not supported and what to do; empty if it is."""
    wanted = supported(package, megatron_core)
    remedy = _REMEDIES.get(package, f"pip install '{package}{wanted}'")
    if installed is None:
        return f"{package}{wanted} is not installed: {remedy}"
    if wanted.has(installed):
        return ""
    return f"{package} {installed} is installed, spare_megatron needs {wanted}: {remedy}"


def check_version(package: str, installed: str | None) -> None:
    """Raises ImportError if `installed` (None if absent) is not a supported version of a package in `SUPPORTED`."""
    if problem := version_problem(package, installed):
        raise ImportError(problem)


def check_names(package: str, owner: object, *names: str) -> None:
    """Raises ImportError if `owner`, of the package, lacks one of these private names, needed during a fault."""
    for name in names:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            where = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
            raise ImportError(
                f"{package} {installed_version(package)} has no {where}, which spare_megatron uses: "
                f"pip install '{package}{SUPPORTED[package]}'"
            ) from None


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version.

    >>> release("2.13.0+cu128"), release("0.17.0rc1")
    ((2, 13, 0), (0, 17, 0))
    """
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise ImportError(f"{text} is no version")
    return tuple(map(int, found.group().split(".")))


def _between(found: tuple[int, ...], first: str, before: str) -> bool:
    return release(first) <= found < release(before)
