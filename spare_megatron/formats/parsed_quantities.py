"""Parses durations, sizes and ranges as users write them."""

import math
import re

_SECONDS_OF = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES_OF = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES_OF |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PART = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")


def parse_duration_s(option: str, text: str, *, is_zero_fine: bool = False) -> float:
    """Seconds of a duration like 300s, 5m, 2h, 1h30m or 250ms; `option` names it in messages. ValueError: the text is
    not a duration, or the duration is out of range.

    >>> parse_duration_s("--restart", "1h30m")
    5400.0
    """
    seconds = _sum_of_parts(option, text, _SECONDS_OF, "a duration, as in 300s, 5m, 2h or 1h30m")
    if seconds < 0 or not math.isfinite(seconds) or (seconds == 0 and not is_zero_fine):
        limit = "0 or more" if is_zero_fine else "above 0"
        raise ValueError(f"{option} {text}: a duration here has to be {limit}, as in 300s, 5m or 2h")
    return seconds


def parse_bytes(option: str, text: str) -> int:
    """Bytes of a size like 64MiB or 1.5GB; a rate may end in "/s", which is dropped. ValueError: the text is not a
    size, or the size is less than a byte.

    >>> parse_bytes("--shard-size", "64MiB")
    67108864
    """
    size = _sum_of_parts(option, text.removesuffix("/s"), _BYTES_OF, "a size, as in 512kB, 64MiB or 1.5GB")
    if not 1 <= size < 1e30:
        raise ValueError(f"{option} {text}: a size has to be 1B or more, as in 512kB, 64MiB or 1.5GB")
    return round(size)


def parse_redundancies(text: str, most: int) -> tuple[int, ...]:
    """Ascending redundancies of a text like 2..20 or 3,4,8..10; `most` is the number of groups. ValueError: the text is
    malformed, or a redundancy is out of range.

    >>> parse_redundancies("3,5..7", most=7)
    (3, 5, 6, 7)
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            ends = int(first), int(last if dots else first)
        except ValueError:
            raise ValueError(f"--sweep-redundancy {text}: not redundancies, as in 2..20 or 3,4,8..10") from None
        if not 1 <= ends[0] <= ends[1]:
            raise ValueError(f"--sweep-redundancy {text}: redundancies have to be 1 or more, the lower one first")
        if ends[1] > most:
            raise ValueError(
                f"--sweep-redundancy {text}: {ends[1]} exceeds num_groups={most}; lower it or take more groups"
            )
        found.update(range(ends[0], ends[1] + 1))
    return tuple(sorted(found))


def _sum_of_parts(option: str, text: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    """Sums all numbers with units in the text; a leading minus makes the sum negative."""
    body = text.strip()
    is_negative = body.startswith("-")
    rest = body.lstrip("-") if is_negative else body
    total, position = 0.0, 0
    while found := _PART.match(rest, position):
        number, unit = found.groups()
        if unit not in units:
            said = f"unknown unit {unit!r}" if unit else "no unit"
            raise ValueError(f"{option} {text}: {said}; known units are {', '.join(units)}")
        total += float(number) * units[unit]
        position = found.end()
    if position == 0 or rest[position:].strip():
        raise ValueError(f"{option} {text}: not {example}")
    return -total if is_negative else total
