"""Closed forms for groups that are re-formed from the machines of broken ones.

Symbols: N groups of M machines, at least L of them; r hosts of each shard; F mean time between losses of a group that
is up; A seconds until a group that lost a machine is back; j groups that are missing, since machines are: with q
machines away and n spares, ceil((q - n)+ / M), with L < M at most so many. Machines come back after a mean time R, or
never; with R, domains of D machines may be lost together.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, sqrt

import numpy as np
from scipy.stats import hypergeom, poisson

from spare_megatron.core.saves.survival import LONGEST_S, FloatArray, coverage_probabilities, restart_share, spent_s
from spare_megatron.tools.plan.repair import Pauses, RepairTimes, shard_time_to_wipe_out_s

_NUM_TIMES = 400
_LEAST_HAZARD = 1e-12
"""Wipe-outs rarer than this in a whole run are taken as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformTimes:
    """How broken groups are re-formed. ValueError if a value is out of its range."""

    machines_per_group: int
    """M."""
    least_machines: int | None = None
    """L, with which a group goes on; None: M."""
    reform_s: float
    """Seconds from the loss or repair of a machine until the group that it leaves whole runs."""
    run_s: float
    """Length of the training, in which ever more groups are missing where machines never come back."""
    repair_s: float | None = None
    """R; None if lost machines never come back."""
    transfer_s: float = 0.0
    """Seconds to fetch the state after that, during which the others train on."""
    join_s: float = 0.0
    """Seconds that all groups wait when groups are admitted."""
    num_spares: int = 0
    """n, idle machines."""
    domain_machines: int = 0
    """D."""
    domain_interval_s: float | None = None
    """Mean seconds between losses of any domain."""

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.machines_per_group and self.run_s > 0 and self.num_spares >= 0):
            raise ValueError(
                f"machines_per_group={self.machines_per_group} has to be 1 or more, least_machines={self.least} from 1 "
                f"to that, run_s={self.run_s} above 0, num_spares={self.num_spares} 0 or more"
            )
        if not (min(self.reform_s, self.transfer_s, self.join_s) >= 0 and (self.repair_s is None or self.repair_s > 0)):
            raise ValueError(
                f"reform_s={self.reform_s}, transfer_s={self.transfer_s} and join_s={self.join_s} have to be 0 or "
                f"more, repair_s={self.repair_s} above 0"
            )

    @property
    def least(self) -> int:
        """L."""
        return self.machines_per_group if self.least_machines is None else self.least_machines

    @property
    def absence_s(self) -> float:
        """A."""
        return self.reform_s + self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissingGroups:
    """How many groups are missing over a run: P(j groups) at each time; shape (times, most + 1)."""

    times_s: FloatArray
    away: FloatArray
    """Mean of q at each time."""
    shares: FloatArray
    on_edge: FloatArray
    """P(j groups, and the next lost machine makes it one more)."""
    at_edge: FloatArray
    """Machines that are away then, by j."""


def missing_groups(num_groups: int, group_interval_s: float, reform: ReformTimes) -> MissingGroups:
    """P(ceil((q - n)+ / M) = j), q the machines that are away: Poisson but for domains, of which D are at once.

    Machines are lost at the rate N / F while all groups are up. With repair the mean of q rises to R N / F (Palm's
    theorem), by R N / F (1 - exp(-t / R)). Without, each of the N M machines is lost at the rate 1 / (M F): the mean at
    t is N M (1 - exp(-t / (M F))).
    """
    # A plan asks for many redundancies, on which nothing of this depends, nor on how long groups take to come back.
    return _missing_groups(num_groups, group_interval_s, replace(reform, reform_s=0.0, transfer_s=0.0, join_s=0.0))


@lru_cache(maxsize=2)
def _missing_groups(num_groups: int, group_interval_s: float, reform: ReformTimes) -> MissingGroups:
    n, size = num_groups, reform.machines_per_group
    times_s = np.linspace(0.0, reform.run_s, _NUM_TIMES)
    if reform.repair_s is None:
        away = n * size * -np.expm1(-times_s / (size * group_interval_s))
    else:
        away = n / group_interval_s * reform.repair_s * -np.expm1(-times_s / reform.repair_s)
    shares = _shares_away(times_s, away, reform)
    edges = reform.num_spares + size * np.arange(min(n, shares.shape[1] // size + 1))  # so many are missing up to these
    shares = np.pad(shares, ((0, 0), (0, max(edges[-1] + 1 - shares.shape[1], 0))))
    covered = np.concatenate((shares.cumsum(axis=1)[:, edges], np.ones((_NUM_TIMES, 1))), axis=1)
    on_edge = np.concatenate((shares[:, edges], np.zeros((_NUM_TIMES, 1))), axis=1)
    return MissingGroups(
        times_s=times_s,
        away=away,
        shares=np.diff(covered, prepend=0.0, axis=1),
        on_edge=on_edge,
        at_edge=np.append(edges, np.inf) + 1,
    )


def _shares_away(times_s: FloatArray, away: FloatArray, reform: ReformTimes) -> FloatArray:
    """P(q) at each time; `away`: the mean number of machines that are away by themselves."""

    def shares_of(mean: FloatArray) -> FloatArray:
        shares: FloatArray = poisson.pmf(np.arange(int(mean.max() + 10 * sqrt(mean.max()) + 20)), mean[:, None])
        return shares

    alone = shares_of(away)
    if reform.repair_s is None or reform.domain_interval_s is None:
        return alone
    domains = shares_of(reform.repair_s / reform.domain_interval_s * -np.expm1(-times_s / reform.repair_s))
    found = np.zeros((len(times_s), alone.shape[1] + reform.domain_machines * (domains.shape[1] - 1)))
    for number, share in enumerate(domains.T):
        first = number * reform.domain_machines
        found[:, first : first + alone.shape[1]] += share[:, None] * alone
    return found


def missing_machines(missing: MissingGroups, reform: ReformTimes) -> FloatArray:
    """P((q - n)+ = i) at each time, by i."""
    shares = _shares_away(missing.times_s, missing.away, reform)
    shares = np.pad(shares, ((0, 0), (0, reform.num_spares + 1)))
    covered, beyond = np.split(shares, [reform.num_spares + 1], axis=1)
    return np.concatenate((covered.sum(axis=1, keepdims=True), beyond), axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReformedRun:
    """What to expect of shards in a run."""

    lived_s: float
    """T_f, mean seconds between restarts."""
    spent_s: FloatArray
    """Mean seconds without a restart between each time of `missing_groups` and the one before."""
    pauses: Pauses


def survival(
    num_groups: int,
    redundancy: int,
    group_interval_s: float,
    reform: ReformTimes,
    wait_s: float | None = None,
    late_s: float = 0.0,
) -> ReformedRun:
    """T_f and the pauses, where a shard without a host is waited for up to W = `wait_s` (None: restarts at once).

    With j groups missing, i hosts of a shard are with the hypergeometric probability H(i; N, j, r), and its other
    q = r - i hosts are all away for A at the rate 1 / e(q), e from `tools.plan.repair.shard_time_to_wipe_out_s`. The
    rate of wipe-outs is N times the sum over i < r of the product, over the distribution of j. Of these, the share
    exp(-q W / A) is restarts, and of the losses that make one more group missing those that make all r hosts of a shard
    missing, unless one of the machines away is repaired within W. T_f is the mean time without a restart over the
    probability of one, within the run. Pauses: all q are away for the share (A / (F + A))^q, for A less 2 `late_s`; all
    r are missing until a machine is repaired. Derived: missing groups are taken as spread over the shards at random,
    and shards as independent.
    """
    n, r = num_groups, redundancy
    missing = missing_groups(n, group_interval_s, reform)
    away = RepairTimes(group_interval_s=group_interval_s, repair_s=max(reform.absence_s, 1e-3))
    left = r - np.arange(r)
    per_s = np.array([1 / shard_time_to_wipe_out_s(int(q), away) for q in left])
    restarts = np.array([restart_share(int(q), away.repair_s, wait_s) for q in left])
    j = np.arange(missing.shares.shape[1])
    num_shards = n * hypergeom.pmf(np.arange(r), n, j[:, None], r)
    wiped_per_s = missing.shares @ (num_shards * per_s * restarts).sum(axis=1)
    num_gone = n * hypergeom.pmf(r, n, np.minimum(np.arange(len(j) + 1), n), r)
    gone_per_s = np.diff(num_gone) * (1 - restarts[-1]) * n / group_interval_s
    never = np.ones(len(j))  # none of the machines that are away is repaired in time
    if wait_s is not None and reform.repair_s is not None:
        never = np.exp(-missing.at_edge * wait_s / reform.repair_s)
    wiped_per_s += missing.on_edge @ (gone_per_s * never)
    steps = np.diff(missing.times_s) * (wiped_per_s[1:] + wiped_per_s[:-1]) / 2
    hazard = np.concatenate(([0.0], np.cumsum(steps)))
    spent = spent_s(missing.times_s, hazard)
    expected = -np.expm1(-hazard[-1])
    lived_s = min(float(spent.sum()) / expected, LONGEST_S) if expected > _LEAST_HAZARD else LONGEST_S
    if wait_s is None:
        return ReformedRun(lived_s=lived_s, spent_s=spent, pauses=Pauses())
    weights, on_edge = spent @ missing.shares / spent.sum(), spent @ missing.on_edge / spent.sum()
    paused_per_s = weights @ (num_shards * per_s * (1 - restarts)).sum(axis=1) + on_edge @ (gone_per_s * (1 - never))
    noticed = replace(away, repair_s=max(away.repair_s - 2 * late_s, 1e-9)).down_share
    covered = coverage_probabilities(n, r, np.minimum(j, n).astype(np.float64))
    share = 1 - float(weights @ ((covered + (1 - covered) * never) * np.exp(-(num_shards * noticed**left).sum(axis=1))))
    interval_s = 1 / float(paused_per_s) if paused_per_s > 1 / LONGEST_S else LONGEST_S
    return ReformedRun(lived_s=lived_s, spent_s=spent, pauses=Pauses(share=share, interval_s=interval_s))


def time_without_machines_s(num_groups: int, group_interval_s: float, reform: ReformTimes) -> float:
    """Mean seconds until no group can be whole, the only wipe-out where any group can read all data: M losses for each
    group, at a rate that falls with the groups that are left; infinite with repair.
    """
    if reform.repair_s is not None:
        return inf
    return reform.machines_per_group * group_interval_s * float((1 / np.arange(1, num_groups + 1)).sum())
