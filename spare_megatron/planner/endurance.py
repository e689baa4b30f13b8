"""How many losses a placement endures before some shard has no surviving host.

Symbols: N groups and as many shards; r hosts of each shard; k groups lost, every set of k equally likely; L the number
of losses up to and including the one that wipes out. Losses endured are L - 1, the last one is not.
"""

from math import gamma

import numpy as np
import numpy.typing as npt

from spare_megatron.core.golomb import check_redundancy

FloatArray = npt.NDArray[np.float64]


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
        0.57% off on average and 1.4% at most (the paper states 1.13%); `endured_losses` 0.1% and 0.4%
        (benchmarks/planner_formulas.py).

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
        Takes shards as independent (see `coverage_probabilities`), otherwise exact. Cost: O(N r).

    >>> endured_losses(4, 4)
    3.0
    >>> round(endured_losses(600, 20), 1)
    426.5
    """
    return float(coverage_probabilities(num_groups, redundancy)[1:].sum())


def coverage_probabilities(num_groups: int, redundancy: int) -> FloatArray:
    """P(L > k), the probability that k losses are no wipe-out, for k from 0 to N.

    A shard has lost all hosts with p_k = C(N - r, k - r) / C(N, k) = product over i < r of (k - i) / (N - i), exactly.
    With the shards taken as independent P(L > k) = (1 - p_k)^N.

    Args:
        num_groups: N.
        redundancy: r, from 1 to N.

    Raises:
        ValueError: The redundancy does not fit.

    Notes:
        Exact for r = 1 and r = N. In between shards are the nearer to independent the fewer hosts they share, which is
        what Golomb placements are for: at most one host.

    >>> coverage_probabilities(3, 1).round(6).tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    check_redundancy(num_groups, redundancy)
    if redundancy in (1, num_groups):  # one host: any loss; all groups: nothing but the loss of all
        return (np.arange(num_groups + 1) < redundancy).astype(np.float64)
    lost = wiped_probabilities(num_groups, redundancy)
    with np.errstate(divide="ignore"):  # log(0) where the shard is certainly lost
        covered: FloatArray = np.exp(num_groups * np.log1p(-lost))
    return covered


def wiped_probabilities(num_items: int, num_needed: int) -> FloatArray:
    """P(given `num_needed` of `num_items` are all among k random lost ones), for k from 0 to `num_items`.

    product over i < num_needed of (k - i) / (num_items - i).

    >>> wiped_probabilities(4, 2).round(4).tolist()
    [0.0, 0.0, 0.1667, 0.5, 1.0]
    """
    k = np.arange(num_items + 1, dtype=np.float64)
    probability = np.ones(num_items + 1)
    for i in range(num_needed):
        probability *= np.maximum(k - i, 0.0) / (num_items - i)
    return probability
