"""Supported versions of other packages. The package pins them too, but cluster images may not follow the pins."""

import re
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import NamedTuple


class Range(NamedTuple):
    first: str
    before: str

    def __str__(self) -> str:
        return f">={self.first},<{self.before}"


SUPPORTED = {
    "torch": Range("2.13", "2.16"),
    "megatron-core": Range("0.16.1", "0.20"),
    "transformer-engine": Range("2.9", "2.12"),
    # Aborting a communicator may hang in older versions (reported by torchft).
    "NCCL": Range("2.26", "3"),
}
_REMEDIES = {
    "NCCL": "it comes with torch; take away what stands in its place (LD_LIBRARY_PATH, LD_PRELOAD), or install it anew"
}
"""For what is not a package itself, or has several names."""


def check_version(package: str, installed: str | None) -> None:
    """Raises ImportError if `installed` (None if absent) is not a supported version of a package in `SUPPORTED`."""
    wanted = SUPPORTED[package]
    remedy = _REMEDIES.get(package, f"pip install '{package}{wanted}'")
    if installed is None:
        raise ImportError(f"{package}{wanted} is not installed: {remedy}")
    if not release(wanted.first) <= release(installed) < release(wanted.before):
        raise ImportError(f"{package} {installed} is installed, spare_megatron needs {wanted}: {remedy}")


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
