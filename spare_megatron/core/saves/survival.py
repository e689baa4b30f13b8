"""How long a run lasts: the mean time to a wipe-out that ends in a restart, the optimal interval between saves that
follows from it, and closed forms for the losses that a placement endures before a wipe-out, with groups that do
not come back.

A group that is up is lost at rate 1 / F; one that is down is back after a mean time R, or never. Training pauses for a
shard without a host: it restarts only if none of its r hosts is back within W. Shards are taken as independent, which
makes the mean a little low: by 6% at N = 60, r = 3 and by 1% at N = 600, r = 8 without returns.

Symbols of the closed forms: N = num_groups, r = redundancy (1 to N, else ValueError), k groups lost, L the loss that
wipes out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, expm1, sqrt

import numpy as np
import numpy.typing as npt
from scipy.linalg import expm
from scipy.optimize import brentq

from spare_megatron.stacking.golomb import check_redundancy

FloatArray = npt.NDArray[np.float64]

_STEPS_PER_DOUBLING = 8
_MAX_DOUBLINGS = 60
LONGEST_S = 1e18
"""Cap on the time to a wipe-out: longer times mean nothing and would overflow."""

_FEW = 1e-6
"""T_s / T_f below which the series is used: exact there, while the equation would suffer cancellation."""


def restart_share(num_hosts: int, absence_s: float | None, wait_s: float | None) -> float:
    """P(none of these hosts of a shard, all of them down, is back within W = `wait_s`): exp(-num_hosts W / R).

    The others are pauses. 1 without returns (R = `absence_s` is None) or where training does not wait (W is None).

    >>> restart_share(3, 600.0, None), round(restart_share(3, 600.0, 200.0), 3)
    (1.0, 0.368)
    """
    return 1.0 if absence_s is None or wait_s is None else exp(-num_hosts * wait_s / absence_s)


def host_chain(
    redundancy: int, group_interval_s: float, absence_s: float | None, wait_s: float | None = None
) -> FloatArray:
    """Generator of the birth-death chain over i, the hosts of a shard that are down; a restart is left out.

    Up at rate (r - i) / F, down at i / R, with F = group_interval_s > 0, R = absence_s > 0 (None: no returns). The loss
    of the last host is a restart with probability `restart_share`; else one host is back after the pause, so that
    i = r - 1 stays.
    """
    i = np.arange(redundancy)
    back_per_s = 0.0 if absence_s is None else 1 / absence_s
    generator = np.zeros((redundancy, redundancy))
    generator[i, i] = -(redundancy - i) / group_interval_s - i * back_per_s
    generator[i[:-1], i[1:]] = (redundancy - i[:-1]) / group_interval_s
    generator[i[1:], i[:-1]] = i[1:] * back_per_s
    generator[-1, -1] += (1 - restart_share(redundancy, absence_s, wait_s)) / group_interval_s
    return generator


def shard_survival(generator: FloatArray, first_s: float) -> tuple[FloatArray, FloatArray]:
    """P(no restart for a shard by t), for each number of its hosts that are down at first.

    Returns times from `first_s`, evenly spaced in their logarithm, and probabilities of shape (times, r).
    """
    starts = first_s * 2 ** (np.arange(_STEPS_PER_DOUBLING) / _STEPS_PER_DOUBLING)
    kernels = expm(generator * starts[:, None, None])
    times_s, shares = [], []
    for doubling in range(_MAX_DOUBLINGS):
        times_s.append(starts * 2.0**doubling)
        shares.append(kernels.sum(axis=2))
        if shares[-1][-1].max() < 1e-9:
            break
        kernels = kernels @ kernels
    return np.concatenate(times_s), np.concatenate(shares)


def time_to_wipe_out_s(
    num_shards: Mapping[int, int],
    redundancy: int,
    group_interval_s: float,
    absence_s: float | None,
    wait_s: float | None = None,
) -> float:
    """Mean seconds of training until a restart for a shard without a host: the integral over t of the product over
    shards of P(none for it by t).

    `num_shards` maps hosts that are up, from 1 to r, to the number of such shards; F = group_interval_s; R = absence_s,
    None without returns; W = wait_s, None without pauses. Cost: milliseconds for r up to 20.

    >>> round(time_to_wipe_out_s({1: 1}, 1, 50.0, None), 3)
    50.0
    >>> [round(time_to_wipe_out_s({2: 1}, 2, 50.0, 5.0, wait_s), 1) for wait_s in (None, 0.0, 2.5)]
    [325.0, 325.0, 840.5]
    """
    first_s = 1e-5 * group_interval_s / (redundancy * sum(num_shards.values()))
    if absence_s is not None:
        first_s = min(first_s, 1e-3 * absence_s)
    times_s, shares = shard_survival(host_chain(redundancy, group_interval_s, absence_s, wait_s), first_s)
    with np.errstate(divide="ignore"):
        log_shares = np.log(np.clip(shares, 0.0, 1.0))
    hazard = np.zeros(len(times_s))
    for alive, num in num_shards.items():
        hazard -= num * log_shares[:, redundancy - alive]
    return min(float(spent_s(times_s, hazard).sum()), LONGEST_S)


def spent_s(times_s: FloatArray, hazard: FloatArray) -> FloatArray:
    """Mean seconds without an event between each time and the one before; `hazard` is minus the log of the survival.

    Linear in between: the integral of exp(-x) over a rise is (1 - exp(-rise)) / rise.
    """
    hazard = np.maximum.accumulate(hazard)  # monotone but for rounding
    rise = np.diff(hazard, prepend=0.0)
    before = np.exp(-np.concatenate(([0.0], hazard[:-1])))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(rise > 1e-9, -np.expm1(-rise) / rise, 1 - rise / 2)
    mean = np.where(np.isfinite(rise), mean, 0.0)
    spent: FloatArray = np.diff(times_s, prepend=0.0) * before * mean
    return spent


def optimal_cadence_s(save_s: float, mean_time_to_failure_s: float) -> float:
    """Seconds from the start of one save to the start of the next that leave the most time for training.

    T_c* = t T_f with the one positive t for which t + exp(-t) = 1 + e, e = T_s / T_f: the maximum over T_c of the
    availability (T_c - T_s) / ((T_f + T_r) (exp(T_c / T_f) - 1)), whatever the restart time T_r is (J. T. Daly,
    Future Generation Computer Systems 22, 2006). For rare failures it is near sqrt(2 T_s T_f) (Young, 1974). With
    s = sqrt(2 e) the root is s + s^2/6 + s^3/36 + s^4/270 + O(s^5): exact to 1e-14 where it is used.

    T_s = `save_s` is the stall of a save and T_f = `mean_time_to_failure_s` the mean time to a wipe-out (not a mere
    lost group); ValueError unless both are above 0.

    >>> round(optimal_cadence_s(60.0, 300.0 * 300), 1)
    3306.5
    """
    if not save_s > 0:
        raise ValueError(f"save_s={save_s} has to be above 0: with free saves there is no best interval")
    if not mean_time_to_failure_s > 0:
        raise ValueError(f"mean_time_to_failure_s={mean_time_to_failure_s} has to be above 0")
    share = save_s / mean_time_to_failure_s
    if share < _FEW:
        s = sqrt(2 * share)
        return mean_time_to_failure_s * (s + s**2 / 6 + s**3 / 36 + s**4 / 270)
    found = brentq(lambda t: t + expm1(-t) - share, share, share + 2, xtol=1e-15, rtol=1e-12)
    return mean_time_to_failure_s * float(found)


_SINGLE = 2000
"""Lost counts up to this are separate ranges; above it a range is as wide as its count divided by this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LostCounts:
    """The lost counts 0 to N - 1 in ranges, so that sums over them stay fast for millions of groups."""

    first: FloatArray
    """The first count of each range, then N."""

    @property
    def width(self) -> FloatArray:
        return np.diff(self.first)

    @property
    def middle(self) -> FloatArray:
        """The mean count of each range, which represents the whole range."""
        return (self.first[:-1] + self.first[1:] - 1) / 2

    def sums(self, values: FloatArray) -> FloatArray:
        """Sums values given per count (0 to N - 1 along the last axis) over each range."""
        found: FloatArray = np.add.reduceat(values, self.first[:-1].astype(np.int64), axis=-1)
        return found


def lost_counts(num_groups: int) -> LostCounts:
    """One range per count up to 2000, then about 2000 log(N / 2000) wider ones.

    Summands change little within 1/2000 of a count: plans are within 1e-3 of those that sum over every count
    (tests/unit/test_planner_endurance.py).

    >>> lost_counts(3).middle.tolist(), lost_counts(3).width.tolist()
    ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0])
    """
    first = np.arange(min(num_groups, _SINGLE), dtype=np.float64)
    num_ranges = max(1, int(_SINGLE * np.log(max(num_groups / _SINGLE, 1.0))))
    wide = np.unique(np.rint(np.geomspace(min(num_groups, _SINGLE), num_groups, num_ranges + 1)))
    return LostCounts(first=np.concatenate((first, wide)))


def endured_losses(num_groups: int, redundancy: int) -> float:
    """Expected losses before a wipe-out: E[L] - 1 = sum of P(L > k) over k >= 1. Cost: O(r log N).

    From `coverage_probabilities`. Within 6% of exact enumeration for N from 5 to 20.

    >>> endured_losses(4, 4)
    3.0
    >>> round(endured_losses(600, 20), 1)
    426.4
    """
    counts = lost_counts(num_groups)
    return float(coverage_probabilities(num_groups, redundancy, counts.middle) @ counts.width) - 1


def coverage_probabilities(num_groups: int, redundancy: int, num_lost: FloatArray | None = None) -> FloatArray:
    """P(L > k), the probability that k losses are no wipe-out, for k from 0 to N or for the rising k of `num_lost`.

    A shard has lost all hosts with p_k = C(N - r, k - r) / C(N, k) = product over i < r of (k - i) / (N - i), exactly.
    Independent shards would give (1 - p_k)^N; each group hosts r of them, so with x = k / N

        P(L > k) = [(1 - p_k) exp(b(x) p_k / x^r)]^N,
        b(x) = log(1 - q^r) + r (x log(x / q) + (1 - x) log((1 - x) / (1 - q))) - log(1 - x^r),

    where q solves q (1 - q^(r-1)) / (1 - q^r) = x; P = 0 for x > 1 - 1/r, where no q does.

    Derived: exp(N b) is the Bethe approximation (Yedidia, Freeman, Weiss 2005) of the number of covered sets of k lost
    groups, relative to independence; p_k / x^r corrects for finite N. Needs shards that share few hosts, as in Golomb
    placements. Exact for r = 1 and r = N.

    >>> coverage_probabilities(3, 1).round(6).tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    check_redundancy(num_groups, redundancy)
    k = np.arange(num_groups + 1, dtype=np.float64) if num_lost is None else num_lost
    if redundancy in (1, num_groups):  # fatal: any loss, or only the loss of all groups
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
    """The b(x) of `coverage_probabilities`, for 0 < x <= 1 - 1/r; bisects for q, as the left side rises with q."""
    low, high = np.zeros_like(x), np.full_like(x, 1 - 1e-9)
    for _ in range(50):
        q = (low + high) / 2
        is_low = q * (1 - q ** (r - 1)) < x * (1 - q**r)
        low, high = np.where(is_low, q, low), np.where(is_low, high, q)
    divergence = x * np.log(x / low) + (1 - x) * np.log((1 - x) / (1 - low))
    return np.log1p(-(low**r)) + r * divergence - np.log1p(-(x**r))


def wiped_probabilities(num_items: int, num_needed: int, num_lost: FloatArray | None = None) -> FloatArray:
    """P(`num_needed` given items are all among k random lost ones of `num_items`), k from 0 to `num_items`.

    product over i < num_needed of (k - i) / (num_items - i); `num_lost` gives other k.

    >>> wiped_probabilities(4, 2).round(4).tolist()
    [0.0, 0.0, 0.1667, 0.5, 1.0]
    """
    k = np.arange(num_items + 1, dtype=np.float64) if num_lost is None else num_lost
    probability = np.ones_like(k)
    for i in range(num_needed):
        probability *= np.maximum(k - i, 0.0) / (num_items - i)
    return probability
