"""Counts of lost groups in ranges, so that a sum over all of them takes no longer for millions of groups."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SINGLE = 2000
"""Counts up to here are ranges of their own; above, a range is as wide as its count over this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LostCounts:
    """The counts from 0 to N - 1.

    Attributes:
        first: The first count of each range, and N.
    """

    first: FloatArray

    @property
    def width(self) -> FloatArray:
        """How many counts each range has."""
        return np.diff(self.first)

    @property
    def middle(self) -> FloatArray:
        """The mean count of each range, which stands for all of them."""
        return (self.first[:-1] + self.first[1:] - 1) / 2

    def sums(self, values: FloatArray) -> FloatArray:
        """Of the values of all counts, from 0 to N - 1 along the last axis, those of each range."""
        found: FloatArray = np.add.reduceat(values, self.first[:-1].astype(np.int64), axis=-1)
        return found


def lost_counts(num_groups: int) -> LostCounts:
    """All counts for up to 2000 groups; for more, some 2000 log(N / 2000) ranges beside them.

    Args:
        num_groups: N, 1 or more.

    Notes:
        What is summed changes little within 1/2000 of a count: plans are within 1e-3 of those with every count by
        itself (tests/unit/test_planner_lost_counts.py).

    >>> lost_counts(3).middle.tolist(), lost_counts(3).width.tolist()
    ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0])
    """
    first = np.arange(min(num_groups, _SINGLE), dtype=np.float64)
    num_ranges = max(1, int(_SINGLE * np.log(max(num_groups / _SINGLE, 1.0))))
    wide = np.unique(np.rint(np.geomspace(min(num_groups, _SINGLE), num_groups, num_ranges + 1)))
    return LostCounts(first=np.concatenate((first, wide)))
