"""Durations, sizes, counts and ranges as people read and write them."""

import math
import re
from collections.abc import Sequence

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_BINARY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_DURATIONS = ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))
_YEAR_S = 365.25 * 86400.0
_SECONDS_OF = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": _YEAR_S}
_BYTES_OF = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES_OF |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PART = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")


def format_duration(seconds: float) -> str:
    """Formats a duration in its two largest units, or with three digits below a minute.

    >>> [format_duration(s) for s in (0.25, 0.9997, 21.34, 64.0, 1651.0, 3600.0, 6720.0, 100000.0)]
    ['250 ms', '1 s', '21.3 s', '1 min 4 s', '27 min 31 s', '1 h', '1 h 52 min', '1 d 4 h']
    >>> format_duration(1e10), format_duration(-6720.0)
    ('317 years', '-1 h 52 min')
    """
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s" if seconds < 9.995 else f"{seconds:.1f}".removesuffix(".0") + " s"
    if seconds > 2 * _YEAR_S:
        years = seconds / _YEAR_S
        return f"{years:.0f} years" if years < 1e5 else f"{years:.0e} years"
    for large, small, name, small_name in _DURATIONS:
        whole, rest = divmod(round(seconds / small), large // small)
        if whole:
            return f"{whole} {name} {rest} {small_name}" if rest else f"{whole} {name}"
    raise AssertionError("a minute or more has a unit")


def format_bytes(size: float) -> str:
    """Formats a size with three digits.

    >>> format_bytes(9 * 64 * 2**20), format_bytes(999_999)
    ('604 MB', '1 MB')
    """
    return _scaled(size, _BYTES, " ")


def format_binary_bytes(size: float) -> str:
    """Formats a size with three digits, in units of powers of two.

    >>> [format_binary_bytes(size) for size in (100, 5e5, 2**20 - 1, 3 * 2**30)]
    ['100 B', '488 KiB', '1 MiB', '3 GiB']
    """
    return _scaled(size, _BINARY, " ")


def format_large(count: float) -> str:
    """Formats a count with three digits, as for the size of a model.

    >>> [format_large(count) for count in (999, 124439808, 999999999, 1313722368, 3e12)]
    ['999', '124M', '1B', '1.31B', '3T']
    """
    return _scaled(count, _COUNTS, "")


def format_steps(count: int) -> str:
    """Formats a number of steps, as in 'after 1 step' and '0 steps'."""
    return f"{count} step{'' if count == 1 else 's'}"


def format_count(count: float) -> str:
    """Formats an estimated count with few digits.

    >>> format_count(280.747), format_count(3.2e12), format_count(2.44)
    ('281', '3.2e+12', '2.4')
    """
    return f"{count:.1f}" if count < 10 else f"{count:.0f}" if count < 1e6 else f"{count:.1e}"


def _scaled(value: float, units: Sequence[tuple[float, str]], gap: str) -> str:
    """Three digits, in the largest unit in which the rounded value is at least 1."""
    scale, unit = next((pair for pair in units if value >= 0.9995 * pair[0]), units[-1])
    scaled = value / scale
    return f"{scaled:.3g}{gap}{unit}" if scaled < 999.5 else f"{scaled:.0f}{gap}{unit}"


def parse_duration_s(option: str, text: str, *, is_zero_fine: bool = False) -> float:
    """Seconds of a duration like 300s, 5m, 2h, 1h30m, 2y or 250ms; `option` names it in messages. A year has 365.25
    days. ValueError: the text is not a duration, or the duration is out of range.

    >>> parse_duration_s("--restart", "1h30m"), parse_duration_s("--node-mtbf", "2w")
    (5400.0, 1209600.0)
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
            problem = f"unknown unit {unit!r}" if unit else "no unit"
            raise ValueError(f"{option} {text}: {problem}; known units are {', '.join(units)}")
        total += float(number) * units[unit]
        position = found.end()
    if position == 0 or rest[position:].strip():
        raise ValueError(f"{option} {text}: not {example}")
    return -total if is_negative else total
