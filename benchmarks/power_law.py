"""The law that a curve follows."""

from collections.abc import Sequence

import numpy as np


def fit(numbers: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Least squares of the logarithms: the figure is about `coefficient` N^`exponent`.

    >>> {key: round(value, 6) for key, value in fit([2, 4, 8], [6.0, 12.0, 24.0]).items()}
    {'coefficient': 3.0, 'exponent': 1.0, 'largest_error': 0.0}
    """
    exponent, constant = np.polyfit(np.log(numbers), np.log(values), 1)
    errors = np.exp(constant) * np.asarray(numbers, float) ** exponent / np.asarray(values) - 1
    return {
        "coefficient": float(np.exp(constant)),
        "exponent": float(exponent),
        "largest_error": float(np.abs(errors).max()),
    }


def fit_if_any(numbers: Sequence[float], values: Sequence[float]) -> dict[str, float] | None:
    """The same, or None where there is none: of a single point, or of figures that are not all above 0."""
    return fit(numbers, values) if len(numbers) > 1 and min(values) > 0 else None
