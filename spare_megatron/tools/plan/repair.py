"""Closed forms for lost groups that come back independently: how many are down, pauses, and the time to a wipe-out.

Symbols: N groups, r hosts of each shard. A group that is up is lost at rate 1 / F; one that is down is back after a
mean time R, with no queue for repairs (a finite source; M/G/infinity is the limit for large N). u = R / (F + R). A
shard without a host pauses training; if none of its hosts is back within W, all groups restart.
"""

from dataclasses import dataclass, replace
from math import exp, expm1, inf, log1p

import numpy as np
from scipy.stats import binom

from spare_megatron.core.saves.survival import (
    LONGEST_S,
    FloatArray,
    LostCounts,
    host_chain,
    restart_share,
    shard_survival,
    spent_s,
)

_RARE = 1e3
"""Wipe-outs at least this many relaxation times apart find the groups in their steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTimes:
    """How often one group is lost and when it is back. ValueError unless both times are above 0."""

    group_interval_s: float
    """F, mean seconds from when a group is up until it is lost: N loss intervals of the system."""
    repair_s: float
    """R, mean seconds from its loss until it takes part again."""
    wait_s: float | None = None
    """W, seconds for which a shard without a host is waited for; None restarts at once."""

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
    """The distribution of the time until wipe-out, as a step function."""

    times_s: FloatArray
    """Seconds since all groups were up, ascending."""
    shares_s: FloatArray
    """Mean seconds of training between each time and the one before; runs that have ended count 0."""

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
    """Mean seconds from all up until all r hosts of one shard are down together, for W. Exact for exponential times.

    A birth-death chain over i, the hosts down: up at rate (r - i) / F, down at i / R. The mean time from i to i + 1 is
    e_i = F / (r - i) * (1 + i / R * e_(i-1)); the result is the sum of e_0 to e_(r-1). Of the losses of a last host
    only the share exp(-r W / R) counts: e_(r-1) has F over that in the place of F.

    >>> [shard_time_to_wipe_out_s(hosts, RepairTimes(group_interval_s=50.0, repair_s=5.0)) for hosts in (1, 2)]
    [50.0, 325.0]
    """
    total_s = step_s = 0.0
    for i in range(redundancy):
        step_s = repair.group_interval_s / (redundancy - i) * (1 + i / repair.repair_s * step_s)
        if i == redundancy - 1:
            share = restart_share(redundancy, repair.repair_s, repair.wait_s)
            step_s = step_s / share if share else inf
        total_s += step_s
        if total_s == inf:
            break
    return total_s


def survival(num_groups: int, redundancy: int, repair: RepairTimes) -> Survival:
    """Time until some shard has all its hosts down, for W, with the N shards taken as independent.

    P(no wipe-out by t) = S_1(t)^N, S_1(t) = 1 - P(all hosts of one shard were down together by t), from the matrix
    exponential of the chain of `shard_time_to_wipe_out_s` with r absorbing. Where wipe-outs are more than 1000
    relaxation times apart, S_1 is exponential and the mean is that of one shard over N; there only the mean of repair
    times matters (a shard reaches all-down at rate r u^(r-1) (1 - u) / F for any distribution), elsewhere they are
    exponential. Derived; a lower bound, since shards that share hosts fail together more often.
    """
    rare_s = min(shard_time_to_wipe_out_s(redundancy, repair) / num_groups, LONGEST_S)
    if rare_s > _RARE * repair.relaxation_s:
        return Survival(times_s=np.array([np.inf]), shares_s=np.array([rare_s]))
    generator = host_chain(redundancy, repair.group_interval_s, repair.repair_s, repair.wait_s)
    times_s, shares = shard_survival(generator, 1e-5 * repair.relaxation_s / redundancy)
    with np.errstate(divide="ignore"):
        hazard = -num_groups * np.log(np.clip(shares[:, 0], 0.0, 1.0))
    return Survival(times_s=times_s, shares_s=spent_s(times_s, hazard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Pauses for hosts of shards that are expected, for no longer than W each."""

    share: float = 0.0
    """Share of the time between restarts that training pauses."""
    interval_s: float = LONGEST_S
    """Mean seconds of training between pauses."""


def pauses(num_groups: int, redundancy: int, repair: RepairTimes, late_s: float) -> Pauses:
    """The pauses in the steady state; a loss is acted on `late_s` after it.

    All hosts of a shard are down for the share u^r of the time, those of any of N with probability 1 - (1 - u^r)^N. Of
    that, pauses make up 1 - p (1 + x), x = r W / R, p = exp(-x): the first return takes R / r on average, and one
    after W is a restart. They begin at the rate N r u^(r-1) (1 - u) / F while no other shard pauses. `repair_s`
    is until the commit, half a step longer, which counts for how often; for how long, from when the loss is acted on.
    """
    if repair.wait_s is None:
        return Pauses()
    r, long_s = redundancy, repair.group_interval_s
    waits = r * repair.wait_s / repair.repair_s
    ended = 1 - restart_share(r, repair.repair_s, repair.wait_s) * (1 + waits)
    noticed = replace(repair, repair_s=max(repair.repair_s - 2 * late_s, 1e-9)).down_share
    share = -expm1(num_groups * log1p(-(noticed**r))) * ended
    u = repair.down_share
    begin_per_s = num_groups * r * u ** (r - 1) * (1 - u) / long_s * exp(num_groups * log1p(-(u**r)))
    begin_per_s *= 1 - restart_share(r, repair.repair_s, repair.wait_s)
    interval_s = (1 - share) / begin_per_s if begin_per_s > 1 / LONGEST_S else LONGEST_S
    return Pauses(share=share, interval_s=interval_s)
