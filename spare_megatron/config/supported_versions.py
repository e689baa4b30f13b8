"""Supported versions of Python and of other packages, with the reasons; docs/gpu.md has them as a table.

The package pins some of them too, but cluster images may not follow the pins.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import NamedTuple


class Range(NamedTuple):
    """Versions from `first` to before `before`, without those from the first of `except_for` to before its second."""

    first: str
    before: str
    reasons: str
    """Why it begins, ends and is interrupted there."""
    except_for: tuple[str, str] | None = None

    def __str__(self) -> str:
        gap = f" except >={self.except_for[0]},<{self.except_for[1]}" if self.except_for else ""
        return f">={self.first},<{self.before}{gap}"

    def has(self, installed: str) -> bool:
        found = release(installed)
        is_in_gap = self.except_for is not None and _between(found, *self.except_for)
        return _between(found, self.first, self.before) and not is_in_gap


SUPPORTED: Mapping[str, Range] = {
    "Python": Range("3.11", "3.14", "the oldest and newest that tests run; megatron-core from 0.17 on needs 3.12"),
    "torch": Range(
        "2.11",
        "2.16",
        "2.11 ran the checks on a GPU, tests run 2.13 and 2.14, nothing runs 2.12, and 2.15 ran the demo in a trial "
        "alone; communicators between groups lean on details of torch, so a later version is tried first",
    ),
    "megatron-core": Range(
        "0.16.1",
        "0.20",
        "tests run 0.16.1 and 0.19; what differs is probed, and 0.17 and 0.18 were read and not run; each later "
        "version brings fields and defaults to decide on",
    ),
    "transformer-engine": Range(
        "2.9",
        "2.21",
        "megatron-core from 0.17 on names none; from 2.9 to 2.20 weights are marked alike, which was read in its "
        "sources: none of them has run here",
    ),
    "NCCL": Range(
        "2.26",
        "3",
        "before 2.26 aborting a communicator may hang (reported by torchft); in-process restarts with 2.28.3 to before "
        "2.28.9 end in a segmentation fault (release notes of NVIDIA's nvidia-resiliency-ext)",
        except_for=("2.28.3", "2.28.9"),
    ),
}
_TRANSFORMER_ENGINE_WITH_0_16 = Range("2.9", "2.12", "megatron-core 0.16 names these in its extra; none has run here")
"""Until 0.17 is the oldest megatron-core."""

_REMEDIES = {
    "NCCL": "it comes with torch; take away what stands in its place (LD_LIBRARY_PATH, LD_PRELOAD), or install it anew",
    "Python": "make the environment with another python",
}
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


def version_rows() -> Iterator[str]:
    """The table of docs/gpu.md."""
    yield "| | supported | because |"
    yield "| --- | --- | --- |"
    for package, wanted in SUPPORTED.items():
        if package == "transformer-engine":
            yield _row(f"{package}, with megatron-core 0.16", _TRANSFORMER_ENGINE_WITH_0_16)
            package = f"{package}, with later ones"
        yield _row(package, wanted)


def _row(package: str, wanted: Range) -> str:
    gap = f", except {wanted.except_for[0]} to before {wanted.except_for[1]}" if wanted.except_for else ""
    return f"| {package} | {wanted.first} to before {wanted.before}{gap} | {wanted.reasons} |"


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
