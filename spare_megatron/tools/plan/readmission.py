"""Closed forms for lost groups that come back through a pool of spares, and for the pauses that admit them.

Symbols: N groups; F mean time from when a group is up until it is lost; R mean time until its hardware is repaired; n
spares; X the time to fetch the state once a group has hardware; J the pause at a commit that admits all ready groups. A
lost group gets the hardware that is free first: a spare at once, else the next repaired.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.stats import poisson

from spare_megatron.core.saves.survival import FloatArray, LostCounts
from spare_megatron.tools.plan.overhead import StepTimes, mean_step_s
from spare_megatron.tools.plan.repair import RepairTimes, Survival, num_down_in_ranges

_ROUNDS = 60
"""Fixed-point iterations; each rises to a bound or contracts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinTimes:
    """How a lost group comes back. ValueError if a value is out of its range."""

    repair_s: float
    """R, mean seconds from a loss until its hardware is repaired; above 0."""
    transfer_s: float = 0.0
    """X, seconds to fetch the state, during which the others train on."""
    join_s: float = 0.0
    """J, seconds that all groups wait when groups are admitted, once for all that are ready."""
    num_spares: int = 0
    """n, idle hardware, in groups."""

    def __post_init__(self) -> None:
        if not (self.repair_s > 0 and self.transfer_s >= 0 and self.join_s >= 0 and self.num_spares >= 0):
            raise ValueError(
                f"repair_s={self.repair_s} has to be above 0, transfer_s={self.transfer_s}, join_s={self.join_s} and "
                f"num_spares={self.num_spares} 0 or more"
            )


def hardware_wait_s(num_spares: int, losses_per_s: float, repair_s: float) -> float:
    """Mean seconds W from a loss until the group has hardware: E[(Q - n)+] / l, Q ~ Poisson(l R), l = `losses_per_s`.

    Q is the hardware in repair. (Q - n)+ groups wait at a time, each for that over l by Little's law: W = R P(Q >= n) -
    (n / l) P(Q > n), the backorders of Sherbrooke's METRIC (1968). By Palm's theorem Q is Poisson for any distribution
    of repair times if losses are a Poisson process, which they nearly are while few of the N groups are down.

    >>> hardware_wait_s(0, 0.1, 30.0), round(hardware_wait_s(3, 0.1, 30.0), 2)
    (30.0, 6.72)
    """
    in_repair = losses_per_s * repair_s
    if in_repair == 0:
        return repair_s if num_spares == 0 else 0.0
    wait_s = repair_s * poisson.sf(num_spares - 1, in_repair) - num_spares / losses_per_s * poisson.sf(
        num_spares, in_repair
    )
    return max(float(wait_s), 0.0)


def absence(num_groups: int, group_interval_s: float, rejoin: RejoinTimes) -> RepairTimes:
    """F, and the mean time W + X from a loss until the group is ready to be admitted.

    W is `hardware_wait_s` at the rate N / (F + absence), at which groups are lost while others are down.
    """
    extra_s = rejoin.transfer_s
    if rejoin.num_spares == 0:
        return RepairTimes(group_interval_s=group_interval_s, repair_s=rejoin.repair_s + extra_s)
    low_s, high_s = 0.0, rejoin.repair_s
    for _ in range(_ROUNDS):  # longer absences mean fewer losses and shorter waits: one crossing
        wait_s = (low_s + high_s) / 2
        rate = num_groups / (group_interval_s + wait_s + extra_s)
        is_short = hardware_wait_s(rejoin.num_spares, rate, rejoin.repair_s) > wait_s
        low_s, high_s = (wait_s, high_s) if is_short else (low_s, wait_s)
    return RepairTimes(group_interval_s=group_interval_s, repair_s=max(high_s + extra_s, 1e-9))


def num_down_with_spares(num_groups: int, away: RepairTimes, rejoin: RejoinTimes) -> FloatArray:
    """P(k groups are down) in the steady state, k from 0 to N: (Q - n)+ wait for hardware, the others have it.

    Q ~ Poisson(l R) as in `hardware_wait_s`. Groups that have hardware and fetch the state or wait for a commit are
    Poisson with the rest of the mean absence `away`, taken as independent of Q. Counts above N are counted as N.
    """
    rate = num_groups / (away.group_interval_s + away.repair_s)
    least, most = _likely(rate * rejoin.repair_s)
    k = np.arange(min(max(least - rejoin.num_spares, 0), num_groups), min(num_groups, most) + 1)
    waiting = poisson.pmf(k + rejoin.num_spares, rate * rejoin.repair_s)
    if k[0] == 0:
        waiting[0] = poisson.cdf(rejoin.num_spares, rate * rejoin.repair_s)
    others = max(rate * away.repair_s - rate * hardware_wait_s(rejoin.num_spares, rate, rejoin.repair_s), 0.0)
    others_k = np.arange(min(num_groups, _likely(others)[1]) + 1)
    found = np.convolve(waiting, poisson.pmf(others_k, others))[: num_groups + 1 - k[0]]
    pmf = np.zeros(num_groups + 1)
    pmf[k[0] : k[0] + len(found)] = found
    pmf[-1] += max(1.0 - pmf.sum(), 0.0)
    return pmf


def _likely(mean: float) -> tuple[int, int]:
    """Bounds outside which a Poisson probability underflows."""
    return max(int(mean - 40 * sqrt(mean)), 0), int(mean + 40 * sqrt(mean) + 800)


def equivalent_repair(redundancy: int, num_down: FloatArray, group_interval_s: float) -> RepairTimes:
    """Repair times of independent groups whose shards lose their last host as often as with this distribution of k.

    A loss takes the last host of a given shard of the lost group with probability E[C(k, r - 1) / C(N - 1, r - 1)], k
    down among the N - 1 others. Independent groups that are down for a share u have u^(r-1) there. u exceeds the actual
    share of time down, since groups that wait for hardware are down together. r is 2 or more, and `num_down` has
    P(k down) for k from 0 to N. Derived; the pool is full at the start, which the steady state ignores.
    """
    num_groups = len(num_down) - 1
    k = np.arange(num_groups + 1, dtype=np.float64)
    log_share = np.full(num_groups + 1, -np.inf)
    is_enough = (k >= redundancy - 1) & (num_down > 0)
    i = np.arange(redundancy - 1)
    log_share[is_enough] = np.log((k[is_enough, None] - i) / np.maximum(num_groups - 1 - i, 1)).sum(axis=1)
    with np.errstate(divide="ignore"):
        log_mean = np.logaddexp.reduce(np.log(num_down) + np.minimum(log_share, 0.0))
    share = min(max(float(np.exp(log_mean / (redundancy - 1))), 1e-12), 1 - 1e-6)
    return RepairTimes(group_interval_s=group_interval_s, repair_s=group_interval_s * share / (1 - share))


def step_with_joins_s(
    makespans: FloatArray, patch: FloatArray, times: StepTimes, join_s: float, ready_per_s: FloatArray
) -> FloatArray:
    """Mean seconds from commit to commit, for each k down: T = step + P J, P = 1 - exp(-ready_per_s T).

    A commit with any group ready pauses for J, in which further groups are lost and get ready; iterated from P = 0 it
    rises to the least solution. Derived; exact for groups that get ready independently at a constant rate.
    `ready_per_s` is k over the mean absence, with groups that get ready together counted once.
    """
    pause_s = np.zeros_like(makespans)
    for _ in range(_ROUNDS):
        step_s = mean_step_s(makespans, patch, times, pause_s)
        pause_s = join_s * -np.expm1(-ready_per_s * step_s)
    return mean_step_s(makespans, patch, times, pause_s)


def num_down_over_time(num_groups: int, counts: LostCounts, lived: Survival, away: RepairTimes) -> FloatArray:
    """P(k down) for k in each range, at each time of a survival, all groups up at t = 0; shape (times, ranges):
    Binomial(N, u (1 - exp(-t / relaxation))).
    """
    down = away.down_share * -np.expm1(-lived.times_s / away.relaxation_s)
    return num_down_in_ranges(num_groups, counts, down[:, None])
