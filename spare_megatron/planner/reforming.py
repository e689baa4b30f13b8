"""Closed forms for groups that are re-formed from the machines of broken ones.

Symbols: N groups of M machines, r hosts of each shard; F mean time between losses of a group that is up; A seconds
until a group that lost a machine is back with another; j groups that are missing, since machines are: with q machines
away and n spares, ceil((q - n)+ / M). Machines come back after a mean time R, or never.
"""

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.stats import hypergeom, poisson

from spare_megatron.core.survival import LONGEST_S, spent_s
from spare_megatron.planner.endurance import FloatArray
from spare_megatron.planner.repair import RepairTimes, Survival, shard_time_to_wipe_out_s

_NUM_TIMES = 400
_LEAST_HAZARD = 1e-12
"""Wipe-outs rarer than this in a whole run are taken as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformTimes:
    """How broken groups are re-formed. ValueError if a value is out of its range.

    Attributes:
        machines_per_group: M.
        reform_s: Seconds from the loss or repair of a machine until the group that it leaves whole runs.
        run_s: Length of the training, in which ever more groups are missing where machines never come back.
        repair_s: R; None if lost machines never come back.
        transfer_s: Seconds to fetch the state after that, during which the others train on.
        join_s: Seconds that all groups wait when groups are admitted.
        num_spares: n, idle machines.
    """

    machines_per_group: int
    reform_s: float
    run_s: float
    repair_s: float | None = None
    transfer_s: float = 0.0
    join_s: float = 0.0
    num_spares: int = 0

    def __post_init__(self) -> None:
        if not (self.machines_per_group >= 1 and self.run_s > 0 and self.num_spares >= 0):
            raise ValueError(
                f"machines_per_group={self.machines_per_group} has to be 1 or more, run_s={self.run_s} above 0, "
                f"num_spares={self.num_spares} 0 or more"
            )
        if not (min(self.reform_s, self.transfer_s, self.join_s) >= 0 and (self.repair_s is None or self.repair_s > 0)):
            raise ValueError(
                f"reform_s={self.reform_s}, transfer_s={self.transfer_s} and join_s={self.join_s} have to be 0 or "
                f"more, repair_s={self.repair_s} above 0"
            )

    @property
    def absence_s(self) -> float:
        """A."""
        return self.reform_s + self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissingGroups:
    """How many groups are missing over a run: P(j groups) at each time; shape (times, most + 1)."""

    times_s: FloatArray
    shares: FloatArray

    @property
    def mean(self) -> FloatArray:
        """Their mean at each time."""
        found: FloatArray = self.shares @ np.arange(self.shares.shape[1])
        return found


def missing_groups(num_groups: int, group_interval_s: float, reform: ReformTimes) -> MissingGroups:
    """P(ceil((q - n)+ / M) = j), q the machines that are away: Poisson in both cases.

    Machines are lost at the rate N / F while all groups are up. With repair the mean of q rises to R N / F (Palm's
    theorem), by R N / F (1 - exp(-t / R)). Without, each of the N M machines is lost at the rate 1 / (M F): the mean at
    t is N M (1 - exp(-t / (M F))).
    """
    n, size = num_groups, reform.machines_per_group
    times_s = np.linspace(0.0, reform.run_s, _NUM_TIMES)
    if reform.repair_s is None:
        away = n * size * -np.expm1(-times_s / (size * group_interval_s))
    else:
        away = n / group_interval_s * reform.repair_s * -np.expm1(-times_s / reform.repair_s)
    likely = (away.max() + 10 * sqrt(away.max()) + 20) / size
    edges = reform.num_spares + size * np.arange(min(n, int(likely) + 1))  # j groups are missing up to q = n + M j
    covered = np.concatenate((poisson.cdf(edges, away[:, None]), np.ones((_NUM_TIMES, 1))), axis=1)
    return MissingGroups(times_s=times_s, shares=np.diff(covered, prepend=0.0, axis=1))


def survival(num_groups: int, redundancy: int, group_interval_s: float, reform: ReformTimes) -> tuple[float, Survival]:
    """T_f, mean seconds between wipe-outs, and the mean time spent up to each time of a run without one.

    With j groups missing, i hosts of a shard are with the hypergeometric probability H(i; N, j, r), and its other
    q = r - i hosts are all away for A at the rate 1 / e(q), e from `planner.repair.shard_time_to_wipe_out_s`. The rate
    of wipe-outs is N times the sum over i < r of the product, over the distribution of j. T_f is the mean time without
    a wipe-out over the probability of one, within the run.
    Derived: missing groups are taken as spread over the shards at random, and shards as independent. 9% high to 18% low
    against counted events, N = 60, M = 10, r = 2 and 3 (tests/unit/test_planner_reforming.py).
    """
    missing = missing_groups(num_groups, group_interval_s, reform)
    away = RepairTimes(group_interval_s=group_interval_s, repair_s=max(reform.absence_s, 1e-3))
    together_s = np.array([shard_time_to_wipe_out_s(redundancy - i, away) for i in range(redundancy)])
    j = np.arange(missing.shares.shape[1])
    num_shards = num_groups * hypergeom.pmf(np.arange(redundancy), num_groups, j[:, None], redundancy)
    per_s = missing.shares @ (num_shards / together_s).sum(axis=1)
    steps = np.diff(missing.times_s) * (per_s[1:] + per_s[:-1]) / 2
    hazard = np.concatenate(([0.0], np.cumsum(steps)))
    lived = Survival(times_s=missing.times_s, shares_s=spent_s(missing.times_s, hazard))
    expected = -np.expm1(-hazard[-1])
    return (min(lived.mean_s / expected, LONGEST_S) if expected > _LEAST_HAZARD else LONGEST_S), lived


def time_without_machines_s(num_groups: int, group_interval_s: float, reform: ReformTimes) -> float:
    """Mean seconds until no group can be whole, the only wipe-out where any group can read all data: M losses for each
    group, at a rate that falls with the groups that are left; infinite with repair.
    """
    if reform.repair_s is not None:
        return inf
    return reform.machines_per_group * group_interval_s * float((1 / np.arange(1, num_groups + 1)).sum())
