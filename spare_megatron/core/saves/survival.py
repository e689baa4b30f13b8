"""The optimal interval between saves, and what it follows from: the mean time to a wipe-out that ends in a restart.

A group that is up is lost at rate 1 / F; one that is down is back after a mean time R, or never. Training pauses for a
shard without a host: it restarts only if none of its r hosts is back within W. Shards are taken as independent, which
makes the mean a little low: by 6% at N = 60, r = 3 and by 1% at N = 600, r = 8 without returns.
"""

from collections.abc import Mapping
from math import exp, expm1, sqrt

import numpy as np
import numpy.typing as npt
from scipy.linalg import expm
from scipy.optimize import brentq

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
