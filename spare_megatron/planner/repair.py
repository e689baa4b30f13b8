"""Closed forms for lost groups that come back independently: how many are down, and the time to a wipe-out.

Symbols: N groups, r hosts of each shard. A group that is up is lost at rate 1 / F; one that is down is back after a
mean time R, with no queue for repairs (a finite source; M/G/infinity is the limit for large N). u = R / (F + R). A
wipe-out restarts with all groups up.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.stats import binom

from spare_megatron.core.survival import LONGEST_S, host_chain, shard_survival, spent_s
from spare_megatron.planner.endurance import FloatArray, LostCounts

_RARE = 1e3
"""Wipe-outs at least this many relaxation times apart find the groups in their steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTimes:
    """How often one group is lost and when it is back. ValueError unless both times are above 0.

    Attributes:
        group_interval_s: F, mean seconds from when a group is up until it is lost: N loss intervals of the system.
        repair_s: R, mean seconds from its loss until it takes part again.
    """

    group_interval_s: float
    repair_s: float

    def __post_init__(self) -> None:
        if not (self.group_interval_s > 0 and self.repair_s > 0):
            raise ValueError(
                f"group_interval_s={self.group_interval_s} and repair_s={self.repair_s} have to be above 0"
            )

    @property
    def down_share(self) -> float:
        """The share of time u = R / (F + R) that a group is down, for any distributions of both times."""
        return self.repair_s / (self.group_interval_s + self.repair_s)

    @property
    def relaxation_s(self) -> float:
        """1 / (1/F + 1/R), the time scale in which the share of groups down approaches u."""
        return self.group_interval_s * self.down_share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survival:
    """The distribution of the time until wipe-out, as a step function.

    Attributes:
        times_s: Seconds since all groups were up, ascending.
        shares_s: Mean seconds of training between each time and the one before; runs that have ended count 0.
    """

    times_s: FloatArray
    shares_s: FloatArray

    @property
    def mean_s(self) -> float:
        return float(self.shares_s.sum())


def num_down_in_ranges(num_groups: int, counts: LostCounts, down_share: FloatArray) -> FloatArray:
    """P(the number of groups down is in each range of `counts`), groups being independent; shape (..., ranges).

    `down_share` has shape (..., 1). The sum falls short of 1 by P(all are down).
    """
    below: FloatArray = binom.cdf(counts.first - 1, num_groups, down_share)
    return np.diff(below, axis=-1)


def shard_time_to_wipe_out_s(redundancy: int, repair: RepairTimes) -> float:
    """Mean seconds from all up until all r hosts of one shard are down together. Exact for exponential times.

    A birth-death chain over i, the hosts down: up at rate (r - i) / F, down at i / R. The mean time from i to i + 1 is
    e_i = F / (r - i) * (1 + i / R * e_(i-1)); the result is the sum of e_0 to e_(r-1).

    >>> shard_time_to_wipe_out_s(1, RepairTimes(group_interval_s=50.0, repair_s=5.0))
    50.0
    >>> shard_time_to_wipe_out_s(2, RepairTimes(group_interval_s=50.0, repair_s=5.0))
    325.0
    """
    total_s = step_s = 0.0
    for i in range(redundancy):
        step_s = repair.group_interval_s / (redundancy - i) * (1 + i / repair.repair_s * step_s)
        total_s += step_s
        if total_s == inf:
            break
    return total_s


def survival(num_groups: int, redundancy: int, repair: RepairTimes) -> Survival:
    """Time until some shard has all its hosts down, with the N shards taken as independent.

    P(no wipe-out by t) = S_1(t)^N, S_1(t) = 1 - P(all hosts of one shard were down together by t), from the matrix
    exponential of the chain of `shard_time_to_wipe_out_s` with r absorbing. Where wipe-outs are more than 1000
    relaxation times apart, S_1 is exponential and the mean is that of one shard over N.
    Derived. Where wipe-outs are rare only the mean of repair times matters (a shard reaches all-down at rate r u^(r-1)
    (1 - u) / F for any distribution); elsewhere they are taken as exponential. A lower bound, since shards that share
    hosts fail together more often: the mean is 0 to 9% low against simulated events, N in {13, 31, 60, 200}, r in {2,
    3, 4}, u from 0.01 to 0.3.
    """
    rare_s = min(shard_time_to_wipe_out_s(redundancy, repair) / num_groups, LONGEST_S)
    if rare_s > _RARE * repair.relaxation_s:
        return Survival(times_s=np.array([np.inf]), shares_s=np.array([rare_s]))
    generator = host_chain(redundancy, repair.group_interval_s, repair.repair_s)
    times_s, shares = shard_survival(generator, 1e-5 * repair.relaxation_s / redundancy)
    with np.errstate(divide="ignore"):
        hazard = -num_groups * np.log(np.clip(shares[:, 0], 0.0, 1.0))
    return Survival(times_s=times_s, shares_s=spent_s(times_s, hazard))
