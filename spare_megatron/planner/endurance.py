"""Counts of lost groups in ranges, so that a sum over all of them takes no longer for millions of groups."""

from dataclasses import dataclass
from math import gamma

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.golomb import check_redundancy

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


def asymptotic_endured_losses(num_groups: int, redundancy: int) -> float:
    """Expected losses before a wipe-out, as SPARe has it: mu(N, r) = Gamma(1/r) / r * N^(1 - 1/r).

    Args:
        num_groups: N.
        redundancy: r, from 1 to N.

    Raises:
        ValueError: The redundancy does not fit.

    Notes:
        arXiv 2603.00357. It is the integral of exp(-N (k/N)^r) over k >= 0: shards as if independent, groups as if
        drawn with replacement. Against Monte Carlo of Golomb placements, N in {200, 600, 1000}, r from 2 to 20, it is
        0.68% off on average (the paper states 1.13%) and 4.5% at most, at N = 200, r = 2; `endured_losses` is 0.17%
        off and 0.5% at most (benchmarks/planner_formulas.py, 8000 orders of losses and more).

    >>> round(asymptotic_endured_losses(600, 20))
    424
    """
    check_redundancy(num_groups, redundancy)
    return float(gamma(1 / redundancy) / redundancy * num_groups ** (1 - 1 / redundancy))


def endured_losses(num_groups: int, redundancy: int) -> float:
    """Expected losses before a wipe-out: E[L] - 1 = sum of P(L > k) over k >= 1.

    Args:
        num_groups: N.
        redundancy: r, from 1 to N.

    Raises:
        ValueError: The redundancy does not fit.

    Notes:
        From `coverage_probabilities`. Against exact enumeration within 6% for N from 5 to 20. Cost: O(r log N).

    >>> endured_losses(4, 4)
    3.0
    >>> round(endured_losses(600, 20), 1)
    426.4
    """
    counts = lost_counts(num_groups)
    return float(coverage_probabilities(num_groups, redundancy, counts.middle) @ counts.width) - 1


def coverage_probabilities(num_groups: int, redundancy: int, num_lost: FloatArray | None = None) -> FloatArray:
    """P(L > k), the probability that k losses are no wipe-out, for k from 0 to N.

    A shard has lost all hosts with p_k = C(N - r, k - r) / C(N, k) = product over i < r of (k - i) / (N - i), exactly.
    Were shards independent, P(L > k) would be (1 - p_k)^N. But every group is in r of them: where no shard is wiped
    out, losses lie further apart than at random. So with x = k / N

        P(L > k) = [(1 - p_k) exp(b(x) p_k / x^r)]^N,
        b(x) = log(1 - q^r) + r (x log(x / q) + (1 - x) log((1 - x) / (1 - q))) - log(1 - x^r),

    where q solves q (1 - q^(r-1)) / (1 - q^r) = x, and P = 0 where there is no such q, from x > 1 - 1/r on.

    Args:
        num_groups: N.
        redundancy: r, from 1 to N.
        num_lost: Other k, rising.

    Raises:
        ValueError: The redundancy does not fit.

    Notes:
        Derived: exp(N b) is the Bethe approximation (Yedidia, Freeman, Weiss 2005) of the number of sets of k groups
        without a wiped-out shard, over what independence makes it: the hosts of a shard are lost independently with
        q, given that not all are, and q is such that k are lost on average. It needs shards that share few hosts, as
        those of Golomb placements do. p_k / x^r is the finite-size share of it. Exact for r = 1 and r = N.

    >>> coverage_probabilities(3, 1).round(6).tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    check_redundancy(num_groups, redundancy)
    k = np.arange(num_groups + 1, dtype=np.float64) if num_lost is None else num_lost
    if redundancy in (1, num_groups):  # one host: any loss; all groups: nothing but the loss of all
        return (k < redundancy).astype(np.float64)
    share = k / num_groups
    wiped = wiped_probabilities(num_groups, redundancy, k)
    is_possible = (wiped > 0) & (share <= 1 - 1 / redundancy)
    x, p = share[is_possible], wiped[is_possible]
    per_shard = np.log1p(-p) + _repulsion(x, redundancy) * p / x**redundancy
    covered = np.where(wiped > 0, 0.0, 1.0)
    covered[is_possible] = np.exp(num_groups * per_shard)
    return np.minimum.accumulate(np.minimum(covered, 1.0))


def _repulsion(x: FloatArray, r: int) -> FloatArray:
    """The b(x) of `coverage_probabilities`, for 0 < x <= 1 - 1/r; the left side of its equation rises with q."""
    low, high = np.zeros_like(x), np.full_like(x, 1 - 1e-9)
    for _ in range(50):
        q = (low + high) / 2
        is_low = q * (1 - q ** (r - 1)) < x * (1 - q**r)
        low, high = np.where(is_low, q, low), np.where(is_low, high, q)
    divergence = x * np.log(x / low) + (1 - x) * np.log((1 - x) / (1 - low))
    return np.log1p(-(low**r)) + r * divergence - np.log1p(-(x**r))


def wiped_probabilities(num_items: int, num_needed: int, num_lost: FloatArray | None = None) -> FloatArray:
    """P(given `num_needed` of `num_items` are all among k random lost ones), for k from 0 to `num_items`.

    product over i < num_needed of (k - i) / (num_items - i); for the k of `num_lost` where it is given.

    >>> wiped_probabilities(4, 2).round(4).tolist()
    [0.0, 0.0, 0.1667, 0.5, 1.0]
    """
    k = np.arange(num_items + 1, dtype=np.float64) if num_lost is None else num_lost
    probability = np.ones_like(k)
    for i in range(num_needed):
        probability *= np.maximum(k - i, 0.0) / (num_items - i)
    return probability
