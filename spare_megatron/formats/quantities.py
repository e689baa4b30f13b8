"""Durations, sizes and counts in readable form."""

from collections.abc import Sequence

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_DURATIONS = ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))
_YEAR_S = 365.25 * 86400.0


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
