"""Combines the closed forms into the expected run length and step time, for every policy and kind of loss."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from scipy.integrate import trapezoid
from scipy.stats import poisson

from spare_megatron.core.saves.survival import LONGEST_S, FloatArray, coverage_probabilities, lost_counts
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.plan import domains, readmission, repair
from spare_megatron.tools.plan import reforming_costs as reforming
from spare_megatron.tools.plan.facts import ClusterFacts
from spare_megatron.tools.plan.overhead import StepTimes, least_makespans, mean_step_s, patch_stacks, wait_for_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What to expect between restarts."""

    lived_s: float
    """T_f, mean seconds of training until a restart."""
    stretch: float
    """Mean step time over the step time without losses, with the steps that pauses have computed again."""
    pauses: repair.Pauses = field(default_factory=repair.Pauses)
    """Pauses for shards without a host."""


def forecast(facts: ClusterFacts, redundancy: int, num_microbatches: int) -> Forecast:
    """The forecast where lost groups do not come back; `num_microbatches` is m, 1 for stack granularity.

    Without domains losses come at a constant rate: lived_s is their interval times the sum over k of P(L > k), which
    also weights the steps with k lost. With domains, `coverage_over_time` and `down_without_repair` of
    `tools.plan.domains` count losses per group that is up; for the same constant rate here, t seconds there count as
    (1 - exp(-a t)) / a seconds, in which the whole system loses as many groups, a = 1 / F + 1 / F_d.
    """
    costs = _StepCosts.of(facts, redundancy, num_microbatches)
    step_s = mean_step_s(costs.makespans, costs.patch, costs.times)
    n = facts.num_groups
    counts = lost_counts(n)
    if not facts.has_domains:
        covered = coverage_probabilities(n, n if facts.last_resort else redundancy, counts.middle)
        weights = covered * counts.width
        lived_s = facts.times.loss_interval_s * float(weights.sum())
        return Forecast(lived_s=lived_s, stretch=_stretch(weights / weights.sum(), step_s, facts.times))
    times_s, num_down, all_down = _num_down_for_good(facts)
    covered = 1 - all_down if facts.last_resort else _coverage(facts, redundancy)
    rate_per_s = 1 / _intervals(facts).group_s + 1 / _intervals(facts).domain_s
    elapsed_s = -np.expm1(-rate_per_s * times_s) / rate_per_s  # the integral of the share of groups that is up
    weights = trapezoid(covered[:, None] * num_down, elapsed_s, axis=0)
    lived_s = float(trapezoid(covered, elapsed_s))
    return Forecast(lived_s=lived_s, stretch=_stretch(weights / weights.sum(), step_s, facts.times))


def forecast_with_rejoin(
    facts: ClusterFacts, redundancy: int, num_microbatches: int, rejoin: readmission.RejoinTimes
) -> Forecast:
    """The forecast where lost groups come back and are admitted in a pause.

    A group lost in a step and ready after R + X misses (R + X) / T steps of T on average. For wipe-outs it is down half
    a step longer, until the next commit. The time to a wipe-out is `tools.plan.repair.survival`, with spares or domains
    that of the equivalent independent groups (`equivalent_repair`, `equivalent_domain_repair`). Steps are weighted by
    the groups down: over time since the restart, with spares or domains in the steady state. A shard without a host is
    waited for as long as a restart takes, and the step is computed again then. Derived. The stretch is rather high: a
    group that came back has work of all its shards, so more hosts share a patch.
    """
    costs = _StepCosts.of(facts, redundancy, num_microbatches)
    away = readmission.absence(facts.num_groups, facts.group_interval_s, rejoin)
    step_s = costs.with_joins_s(facts, rejoin, away)
    counts = lost_counts(facts.num_groups)
    is_steady = facts.has_domains or rejoin.num_spares > 0
    if is_steady:
        steady = counts.sums(_steady_num_down(facts, away, rejoin)[:-1])
    else:
        steady = repair.num_down_in_ranges(facts.num_groups, counts, np.array([away.down_share]))
    cycle_s = _mean_step_s(steady, step_s)
    if not np.isfinite(cycle_s):
        return Forecast(lived_s=facts.event_interval_s, stretch=float("inf"))
    until_commit = replace(away, repair_s=away.repair_s + cycle_s / 2)
    independent = None if facts.last_resort else _independent(facts, redundancy, rejoin, until_commit)
    lived = _time_to_last_s(facts, rejoin, until_commit)
    waits = repair.Pauses()
    if independent is not None:
        lived = repair.survival(facts.num_groups, redundancy, independent)
        waits = repair.pauses(facts.num_groups, redundancy, independent, cycle_s / 2)
    weights = steady
    if not is_steady:
        weights = lived.shares_s @ readmission.num_down_over_time(facts.num_groups, counts, lived, away) / lived.mean_s
    # With no group up there is no step: the small probability of that counts as no progress.
    again = 1 + (cycle_s + rejoin.join_s) / waits.interval_s
    return Forecast(lived_s=lived.mean_s, stretch=_stretch(weights, step_s, facts.times) * again, pauses=waits)


def forecast_with_reform(
    facts: ClusterFacts, redundancy: int, num_microbatches: int, reform: reforming.ReformTimes
) -> Forecast:
    """The forecast where a loss takes a machine and groups are re-formed from broken ones, over `reform.run_s`.

    The groups down are those that machines are missing for (`tools.plan.reforming_costs.missing_groups`) and those that
    are being re-formed: Poisson with mean A over the interval between losses. For wipe-outs A is half a step longer, as
    for a group that rejoins. A pause admits the group of one loss at a time, or those of several in one step. Derived;
    the stretch is rather high, like that of groups that rejoin. With L < M it is machines that are down, M for a group
    that is re-formed; such a group starts anew at each loss, and again when its machine is back. The groups of a domain
    are re-formed together.
    """
    if facts.has_domains:
        size = facts.groups_per_domain * reform.machines_per_group
        reform = replace(reform, domain_machines=size, domain_interval_s=facts.domain_interval_s)
    n, interval_s = facts.num_groups, facts.times.loss_interval_s
    unit = reform.machines_per_group if reform.least < reform.machines_per_group else 1
    starts_per_s = (2 if unit > 1 and reform.repair_s else 1) / interval_s
    costs = _StepCosts.of(facts, redundancy, num_microbatches, unit, min(reform.least, unit))
    ready_per_s = np.full_like(costs.makespans, starts_per_s + 1 / facts.domain_interval_s)
    step_s = readmission.step_with_joins_s(costs.makespans, costs.patch, costs.times, reform.join_s, ready_per_s)
    missing = reforming.missing_groups(n, facts.group_interval_s, reform)
    if facts.last_resort:
        lived_s = min(reforming.time_without_machines_s(n, facts.group_interval_s, reform), LONGEST_S)
        spent_s, waits = np.diff(missing.times_s, prepend=0.0), repair.Pauses()
    else:
        until_commit = replace(reform, reform_s=reform.reform_s + step_s[0] / 2)
        found = reforming.survival(
            n, redundancy, facts.group_interval_s, until_commit, facts.checkpoint.restart_s, step_s[0] / 2
        )
        lived_s, waits, spent_s = found.lived_s, found.pauses, found.spent_s
    mean = reform.absence_s * starts_per_s
    num_coming = np.arange(int(mean + 10 * mean**0.5) + 10)
    coming = np.zeros(len(num_coming) * unit)
    coming[::unit] = poisson.pmf(num_coming, mean)
    missed = missing.shares if unit == 1 else reforming.missing_machines(missing, reform)
    num_down = np.convolve(spent_s @ missed / spent_s.sum(), coming)
    if facts.has_domains:
        at_once = np.arange(20)
        together = np.zeros(len(at_once) * facts.groups_per_domain * unit)
        together[:: facts.groups_per_domain * unit] = poisson.pmf(at_once, reform.absence_s / facts.domain_interval_s)
        num_down = np.convolve(num_down, together)
    num_down = num_down[: n * unit]
    weights = lost_counts(n * unit).sums(np.pad(num_down, (0, n * unit - len(num_down))))
    again = 1 + (step_s[0] + reform.join_s) / waits.interval_s
    return Forecast(
        lived_s=lived_s, stretch=_stretch(weights / weights.sum(), step_s, facts.times) * again, pauses=waits
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StepCosts:
    """Stacks per step and per patch for each range of groups, or machines, down, and how often a patch is needed."""

    makespans: FloatArray
    patch: FloatArray
    times: StepTimes

    @classmethod
    def of(
        cls, facts: ClusterFacts, redundancy: int, num_microbatches: int, num_machines: int = 1, least: int = 1
    ) -> "_StepCosts":
        n = facts.num_groups
        lost = lost_counts(n * num_machines).middle
        makespans = least_makespans(n, num_microbatches, lost, num_machines, least)
        k = np.minimum(lost / num_machines, n - 1)
        fetch = facts.fetch_s / facts.times.shard_s if facts.last_resort else None
        patch = patch_stacks(n, redundancy, num_microbatches, k, fetch=fetch)
        if fetch is not None:
            makespans = makespans + wait_for_data(n, redundancy, num_microbatches, fetch, k)
        # Losses of which no group knows at the commit before, which lies up to a step back.
        sudden_share = max(1 - facts.notice_s / facts.times.step_s, 0.0)
        return cls(
            makespans=makespans,
            patch=patch * sudden_share,
            times=replace(facts.times, loss_interval_s=facts.event_interval_s),
        )

    def with_joins_s(
        self, facts: ClusterFacts, rejoin: readmission.RejoinTimes, away: repair.RepairTimes
    ) -> FloatArray:
        n = facts.num_groups
        if rejoin.num_spares:  # a group that comes back on a spare was hardly down
            ready_per_s = np.full_like(self.makespans, n / (facts.group_interval_s + away.repair_s))
        else:  # groups lost together are repaired together: one pause per domain
            groups_at_once = facts.event_interval_s / facts.lost_group_interval_s
            ready_per_s = lost_counts(n).middle / (away.repair_s * groups_at_once)
        return readmission.step_with_joins_s(self.makespans, self.patch, self.times, rejoin.join_s, ready_per_s)


def _stretch(weights: FloatArray, step_s: FloatArray, times: StepTimes) -> float:
    """Mean step time over that without losses; `weights` are the shares of time with each count of groups down."""
    return _mean_step_s(weights, step_s) / times.step_s


def _mean_step_s(weights: FloatArray, step_s: FloatArray) -> float:
    steps_per_s = float((weights / step_s).sum())
    return 1 / steps_per_s if steps_per_s > 0 else float("inf")


def _steady_num_down(facts: ClusterFacts, away: repair.RepairTimes, rejoin: readmission.RejoinTimes) -> FloatArray:
    """P(k groups down), k from 0 to N, with domains or with spares."""
    if facts.has_domains:
        intervals, sizes = _intervals(facts), _domain_sizes(facts)
        of_one = {int(s): domains.domain_down_probabilities(int(s), intervals, away.repair_s) for s in np.unique(sizes)}
        return domains.num_down_in_domains(sizes, of_one)
    return readmission.num_down_with_spares(facts.num_groups, away, rejoin)


def _time_to_last_s(facts: ClusterFacts, rejoin: readmission.RejoinTimes, away: repair.RepairTimes) -> repair.Survival:
    """Until all groups are down at once."""
    n = facts.num_groups
    lived_s = repair.shard_time_to_wipe_out_s(n, away)
    if facts.has_domains:  # the rates into and out of the all-down state are equal
        all_down = float(_steady_num_down(facts, away, rejoin)[-1])
        lived_s = away.repair_s / (n * all_down) if all_down > 0 else LONGEST_S
    return repair.Survival(times_s=np.array([np.inf]), shares_s=np.array([min(lived_s, LONGEST_S)]))


def _independent(
    facts: ClusterFacts, redundancy: int, rejoin: readmission.RejoinTimes, away: repair.RepairTimes
) -> repair.RepairTimes:
    """Independent groups whose shards lose their last host as often, waited for as long as a restart takes."""
    wait_s = facts.checkpoint.restart_s
    if facts.has_domains:
        counts = _hosts_per_domain(facts, redundancy)
        away = domains.equivalent_domain_repair(counts, _intervals(facts), away.repair_s)
    elif redundancy > 1 and rejoin.num_spares:
        away = readmission.equivalent_repair(redundancy, _steady_num_down(facts, away, rejoin), away.group_interval_s)
        # The first host to get hardware waits for no longer than its own repair, which all others may need as well.
        wait_s *= away.repair_s / (redundancy * (rejoin.repair_s + rejoin.transfer_s))
    return replace(away, wait_s=wait_s)


def _intervals(facts: ClusterFacts) -> domains.LossIntervals:
    return domains.LossIntervals(group_s=facts.group_interval_s, domain_s=facts.num_domains * facts.domain_interval_s)


def _domain_sizes(facts: ClusterFacts) -> domains.IntArray:
    return np.bincount(_domain_of(facts))


def _domain_of(facts: ClusterFacts) -> domains.IntArray:
    return domains.consecutive_domains(facts.num_groups, facts.groups_per_domain)


@lru_cache(maxsize=2)  # the same for every redundancy and granularity
def _num_down_for_good(facts: ClusterFacts) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Times; P(k down by then, with no repair) for k in each range, shape (times, ranges); P(all down)."""
    intervals, sizes = _intervals(facts), _domain_sizes(facts)
    times_s = domains.times_to_look_at_s(intervals)
    of_one = {int(size): domains.down_without_repair(int(size), intervals, times_s) for size in np.unique(sizes)}
    num_down = domains.num_down_in_domains(sizes, of_one)
    return times_s, lost_counts(facts.num_groups).sums(num_down[:, :-1]), num_down[:, -1]


@lru_cache(maxsize=64)  # the same for every granularity
def _coverage(facts: ClusterFacts, redundancy: int) -> FloatArray:
    """P(no wipe-out) at the times of `_num_down_for_good`."""
    return domains.coverage_over_time(_hosts_per_domain(facts, redundancy), _intervals(facts))[1]


@lru_cache(maxsize=64)
def _hosts_per_domain(facts: ClusterFacts, redundancy: int) -> domains.IntArray:
    placement = make_placement("golomb", facts.num_groups, redundancy, facts.groups_per_domain)
    return domains.hosts_per_domain(placement, _domain_of(facts))
