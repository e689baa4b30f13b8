"""Groups that come back, pauses, spares and domains: the planner against simulated runs, events and enumeration."""

from typing import Any

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.stats import binom

from spare_megatron.core.saves.survival import coverage_probabilities, endured_losses
from spare_megatron.stacking.placement import IntArray, Placement, make_placement
from spare_megatron.tools.plan.domains import (
    LossIntervals,
    consecutive_domains,
    coverage_over_time,
    domain_coverage_probabilities,
    domain_down_probabilities,
    equivalent_domain_repair,
    hosts_per_domain,
    num_down_in_domains,
)
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.plan import predict
from spare_megatron.tools.plan.readmission import (
    RejoinTimes,
    absence,
    equivalent_repair,
    hardware_wait_s,
    num_down_with_spares,
)
from spare_megatron.tools.plan.repair import RepairTimes, shard_time_to_wipe_out_s, survival
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.oracle.enumeration import covered_domain_shares
from tests.oracle.monte_carlo import (
    domain_repair_samples_s,
    domain_samples_s,
    endured_samples,
    repair_samples_s,
    spares_samples_s,
)


def repair_of(down_share: float) -> RepairTimes:
    return RepairTimes(group_interval_s=1.0, repair_s=down_share / (1 - down_share))


def facts_of(n: int, repair: RepairTimes) -> ClusterFacts:
    return ClusterFacts(
        num_groups=n,
        times=StepTimes(shard_s=1e-6, reduce_s=0.0, loss_interval_s=repair.group_interval_s / n),
        checkpoint=CheckpointTimes(save_s=1.0, restart_s=1.0),
        num_microbatches=16,
        rejoin=RejoinTimes(repair_s=repair.repair_s),
    )


def test_the_share_of_groups_down_is_that_of_simulated_groups_with_fixed_repair_times() -> None:
    repair = RepairTimes(group_interval_s=10.0, repair_s=2.0)
    rng = np.random.default_rng(4)
    up_s = np.cumsum(rng.exponential(10.0, (2000, 40)), axis=1) + 2.0 * np.arange(40)
    is_down = ((up_s < 100.0) & (up_s + 2.0 > 100.0)).any(axis=1)  # up until up_s, back 2 s later
    assert is_down.mean() == pytest.approx(repair.down_share, abs=0.02)


def test_a_shard_of_two_hosts_has_the_textbook_time_to_failure() -> None:
    """(3 a + b) / (2 a^2) for two parallel parts, a the rate of failure and b that of repair."""
    a, b = 1 / 50, 1 / 5
    found_s = shard_time_to_wipe_out_s(2, RepairTimes(group_interval_s=50.0, repair_s=5.0))
    assert found_s == pytest.approx((3 * a + b) / (2 * a * a))


@pytest.mark.parametrize(
    ("n", "r", "down"), [(13, 3, 0.1), (31, 2, 0.01), (31, 3, 0.1), (60, 2, 0.1), (60, 4, 0.3), (200, 3, 0.1)]
)
def test_time_to_wipe_out_with_repair_is_near_that_of_simulated_events(n: int, r: int, down: float) -> None:
    repair = repair_of(down)
    samples = repair_samples_s(make_placement("golomb", n, r), repair, 600, np.random.default_rng([6, n, r]))
    expected_s = survival(n, r, repair).mean_s
    print(f"N {n}, r {r}, {down:.0%} down: {expected_s:.4g}, simulated {samples.mean():.4g}")
    assert expected_s == pytest.approx(samples.mean(), rel=0.12)  # 3 standard errors of 4%


def test_one_shard_alone_is_exact_in_both_ways() -> None:
    repair = repair_of(0.2)
    assert survival(1, 4, repair).mean_s == pytest.approx(shard_time_to_wipe_out_s(4, repair), rel=0.005)


def test_rare_and_frequent_wipe_outs_meet() -> None:
    """Just below the limit the sum over times has to give what the exponential gives above."""
    repair = repair_of(0.05)
    rare, frequent = survival(30, 4, repair), survival(60, 4, repair)
    assert np.isinf(rare.times_s[-1])
    assert np.isfinite(frequent.times_s[-1])
    assert rare.mean_s * 30 == pytest.approx(frequent.mean_s * 60, rel=0.01)


def test_repairs_that_take_forever_are_none() -> None:
    n, r = 600, 6
    repair = RepairTimes(group_interval_s=1.0, repair_s=1e6)
    shares = coverage_probabilities(n, r)[:n]
    without_s = float((shares / (n - np.arange(n))).sum())  # k lost: the next loss comes at rate N - k
    assert survival(n, r, repair).mean_s == pytest.approx(without_s, rel=0.05)
    facts = facts_of(n, repair)
    assert predict(facts, "rejoin", r).stretch == pytest.approx(predict(facts, "microbatch", r).stretch, rel=0.05)


def test_fast_repairs_leave_hardly_any_stretch() -> None:
    repair = RepairTimes(group_interval_s=1.0, repair_s=1e-9)
    assert predict(facts_of(60, repair), "rejoin", 3).stretch == pytest.approx(1.0, abs=1e-3)


def test_times_to_wipe_out_beyond_all_measure_do_not_overflow() -> None:
    assert np.isfinite(survival(100, 48, RepairTimes(group_interval_s=1e9, repair_s=1.0)).mean_s)


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0)])
def test_repair_times_out_of_range_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RepairTimes(group_interval_s=times[0], repair_s=times[1])
    with pytest.raises(ValueError, match="above 0"):
        LossIntervals(group_s=times[0], domain_s=times[1])


# ------------------------------------------------------------------------------------------------------- domains


def endured_domains(placement: Placement, domain_of: IntArray) -> float:
    """Expected losses of whole domains before a wipe-out."""
    return float(domain_coverage_probabilities(hosts_per_domain(placement, domain_of))[1:].sum())


def mean_time_s(counts: IntArray, intervals: LossIntervals) -> float:
    times_s, covered = coverage_over_time(counts, intervals)
    return float(trapezoid(covered, times_s))


def test_hosts_per_domain_of_a_small_ring() -> None:
    counts = hosts_per_domain(make_placement("consecutive", 4, 2), np.array([0, 0, 1, 1]))
    assert counts.tolist() == [[1, 1], [2, 0], [1, 1], [0, 2]]  # shard s is on groups s and s - 1


def test_a_domain_that_holds_all_hosts_of_a_shard_wipes_out_alone() -> None:
    domain_of = np.arange(12) // 4
    counts = hosts_per_domain(make_placement("consecutive", 12, 3), domain_of)
    assert domain_coverage_probabilities(counts).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_domains_of_one_group_are_groups() -> None:
    counts = hosts_per_domain(make_placement("golomb", 31, 4), np.arange(31))
    np.testing.assert_allclose(domain_coverage_probabilities(counts), coverage_probabilities(31, 4), atol=0.06)


@pytest.mark.parametrize("is_spread", [True, False])
@pytest.mark.parametrize(("size", "r"), [(2, 2), (2, 3), (3, 3), (4, 2)])
def test_domains_endured_are_near_those_of_exact_enumeration(size: int, r: int, is_spread: bool) -> None:
    n = 24
    domain_of = np.arange(n) % (n // size) if is_spread else np.arange(n) // size
    placement = make_placement("golomb", n, r)
    exact = float(covered_domain_shares(placement, domain_of)[1:].sum())
    assert endured_domains(placement, domain_of) == pytest.approx(exact, rel=0.2, abs=0.1)


@pytest.mark.parametrize("r", [3, 5, 8])
def test_spread_hosts_endure_more_domains(r: int) -> None:
    n, size = 200, 4
    placement = make_placement("golomb", n, r)
    endured = {}
    for name, domain_of in (("beside", np.arange(n) // size), ("apart", np.arange(n) % (n // size))):
        counted = endured_samples(domain_of[placement.host_array], n // size, 3000, np.random.default_rng([8, r]))
        endured[name] = endured_domains(placement, domain_of)
        print(f"r {r}, {name}: {endured[name]:.2f} domains, counted {counted.mean():.2f}")
        assert endured[name] == pytest.approx(counted.mean(), rel=0.05)
    assert endured["beside"] < endured["apart"] <= endured_losses(n // size, min(r, n // size)) + 5


@pytest.mark.parametrize("r", [3, 5, 8])
def test_time_to_wipe_out_with_domains_is_a_lower_bound_within_8_percent(r: int) -> None:
    """Losing no shard of one pattern makes losing none of another more likely: the product is a lower bound."""
    n = 200
    intervals = LossIntervals(group_s=200.0, domain_s=200.0)
    placement = make_placement("golomb", n, r)
    for domain_of in (np.arange(n) // 4, np.arange(n) % 50):
        samples = domain_samples_s(placement, domain_of, intervals, 2000, np.random.default_rng([8, r]))
        noise_s = samples.std() / np.sqrt(len(samples))
        found_s = mean_time_s(hosts_per_domain(placement, domain_of), intervals)
        print(f"r {r}: {found_s:.2f} s, simulated {samples.mean():.2f} +- {noise_s:.2f} s")
        assert 0.92 * samples.mean() - 2 * noise_s < found_s < samples.mean() + 3 * noise_s


def test_domains_that_are_hardly_ever_lost_do_not_matter() -> None:
    n, r = 60, 4
    counts = hosts_per_domain(make_placement("golomb", n, r), np.arange(n) // 4)
    found_s = mean_time_s(counts, LossIntervals(group_s=1.0, domain_s=1e9))
    shares = coverage_probabilities(n, r)[:n]
    assert found_s == pytest.approx(float((shares / (n - np.arange(n))).sum()), rel=0.08)


def test_domains_that_do_not_fit_are_refused() -> None:
    placement = make_placement("golomb", 7, 3)
    with pytest.raises(ValueError, match="do not fit 7 groups"):
        hosts_per_domain(placement, np.arange(6))


@pytest.mark.parametrize(("restart_s", "is_random"), [(3600.0, False), (150.0, True)])
def test_shards_without_a_host_pause_training_as_often_and_as_long_as_in_simulated_runs(
    restart_s: float, *, is_random: bool
) -> None:
    """Groups are back after 10 minutes, r = 3. Hosts that come later than a restart would end are not waited for."""
    costs = CostModel(compute_s=64.0, reduce_s=6.0, save_s=1.5, restart_s=restart_s, join_s=1.0)
    scenario = Scenario(
        name="pausing",
        num_groups=60,
        redundancy=3,
        num_steps=800,
        costs=costs,
        failures=FailureSpec(mean_s=100.0),
        repair_s=600.0,
        repair_is_random=is_random,
        save_interval_s=300.0,
    )
    facts = ClusterFacts(
        num_groups=60,
        times=StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=100.0),
        checkpoint=CheckpointTimes(save_s=1.5, restart_s=restart_s),
        num_microbatches=16,
        rejoin=RejoinTimes(repair_s=600.0, join_s=1.0),
    )
    plan, runs = predict(facts, "rejoin", 3), [simulate(scenario, seed) for seed in range(6)]
    trained_s = sum(run.end_s - run.terms["pause"] - run.terms["restart"] for run in runs)
    pauses, restarts = sum(run.pauses for run in runs), sum(run.restarts for run in runs)
    assert pauses >= 40
    assert 0.7 < pauses / trained_s * plan.pause_interval_s < 1.5
    assert np.mean([run.time_to_train_ratio for run in runs]) == pytest.approx(plan.time_to_train_ratio, rel=0.05)
    if is_random:
        assert 0.6 < restarts / trained_s * plan.time_to_wipe_out_s < 1.5
    else:
        assert restarts == 0
        assert plan.time_to_wipe_out_s > 1e8


NEVER_S = 1e15


def facts_with(n: int, interval_s: float, rejoin: RejoinTimes | None, **others: Any) -> ClusterFacts:
    return ClusterFacts(
        num_groups=n,
        times=StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=interval_s),
        checkpoint=CheckpointTimes(save_s=60.0, restart_s=3600.0),
        num_microbatches=16,
        rejoin=rejoin,
        **others,
    )


def simulated_stretch(facts: ClusterFacts, redundancy: int) -> float:
    """Mean step between wipe-outs over that without losses, in two simulated runs of 1000 steps."""
    rejoin = facts.rejoin
    assert rejoin is not None
    costs = CostModel(
        compute_s=64.0,
        reduce_s=6.0,
        save_s=60.0,
        restart_s=3600.0,
        join_s=rejoin.join_s,
        state_transfer_s=rejoin.transfer_s,
        fetch_s=facts.fetch_s,
    )
    failures = FailureSpec(mean_s=facts.times.loss_interval_s)
    if facts.has_domains:
        mean_s = facts.domain_interval_s * facts.num_domains
        failures = FailureSpec(kind="domain", mean_s=mean_s, groups_per_domain=facts.groups_per_domain)
    scenario = Scenario(
        name="planned",
        num_groups=facts.num_groups,
        redundancy=redundancy,
        num_steps=1000,
        costs=costs,
        failures=failures,
        repair_s=rejoin.repair_s,
        num_spares=rejoin.num_spares,
        last_resort=facts.last_resort,
        notice_s=facts.notice_s,
        save_interval_s=3000.0,
    )
    runs = [simulate(scenario, seed) for seed in (0, 1)]
    assert min(run.losses for run in runs) > 100
    return float(np.mean([run.availability * run.time_to_train_ratio for run in runs]))


DOMAINS_ALONE = {"groups_per_domain": 4, "domain_interval_s": 600.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interval_s", "redundancy", "rejoin", "others"),
    [
        (300.0, 6, RejoinTimes(repair_s=600.0), {}),
        (300.0, 6, RejoinTimes(repair_s=600.0, join_s=30.0), {}),
        (300.0, 6, RejoinTimes(repair_s=600.0, join_s=30.0, transfer_s=300.0), {}),
        (300.0, 6, RejoinTimes(repair_s=1800.0, join_s=30.0, num_spares=4), {}),
        (NEVER_S, 6, RejoinTimes(repair_s=600.0, join_s=30.0), DOMAINS_ALONE),
        (300.0, 1, RejoinTimes(repair_s=600.0, join_s=30.0), {"last_resort": True, "fetch_s": 10.0}),
        (300.0, 6, RejoinTimes(repair_s=600.0), {"notice_s": 120.0}),
        (300.0, 6, RejoinTimes(repair_s=600.0), {"notice_s": 35.0}),
    ],
    ids=["repair", "join", "transfer", "spares", "domains", "last resort", "notice", "short notice"],
)
def test_the_stretch_is_that_of_simulated_runs_or_up_to_5_percent_higher(
    interval_s: float, redundancy: int, rejoin: RejoinTimes, others: dict[str, Any]
) -> None:
    facts = facts_with(60, interval_s, rejoin, **others)
    planned, simulated = predict(facts, "rejoin", redundancy).stretch, simulated_stretch(facts, redundancy)
    print(f"planned {planned:.4f}, simulated {simulated:.4f}: {planned / simulated - 1:+.2%}")
    assert simulated * 0.98 < planned < simulated * 1.05


def test_a_pause_costs_what_it_takes_times_the_commits_that_have_one() -> None:
    without, with_pause = (
        predict(facts_with(600, 300.0, RejoinTimes(repair_s=600.0, join_s=join_s)), "rejoin", 8).stretch
        for join_s in (0.0, 30.0)
    )
    # About a loss in 300 s and so a return; a step of 80 s has one with 1 - exp(-80 / 300), at most.
    assert (with_pause - without) * 70.0 == pytest.approx(30.0 * 0.24, rel=0.1)


# -------------------------------------------------------------------------------------------------------- spares


@pytest.mark.parametrize("num_spares", [0, 1, 3, 8])
def test_the_wait_for_hardware_is_that_of_a_simulated_pool(num_spares: int) -> None:
    rejoin = RejoinTimes(repair_s=30.0, num_spares=num_spares)
    away = absence(60, 600.0, rejoin)
    counted_s = pool_absences_s(60, 600.0, rejoin).mean()
    print(f"{away.repair_s:.3f} s, counted {counted_s:.3f} s")
    assert away.repair_s == pytest.approx(counted_s, rel=0.08, abs=0.05)


def pool_absences_s(num_groups: int, group_interval_s: float, rejoin: RejoinTimes) -> np.ndarray:
    """Absences of lost groups, event by event, with none of the code under test; repairs of constant length."""
    rng = np.random.default_rng(5)
    free_s = [0.0] * rejoin.num_spares
    losses = rng.exponential(group_interval_s, num_groups)
    absences_s = []
    for _ in range(40_000):
        group = int(losses.argmin())
        free_s = sorted([*free_s, losses[group] + rejoin.repair_s])
        back_s = max(free_s.pop(0), losses[group])
        absences_s.append(back_s - losses[group])
        losses[group] = back_s + rng.exponential(group_interval_s)
    return np.array(absences_s)


def test_spares_without_end_leave_no_wait_and_none_the_whole_repair() -> None:
    assert hardware_wait_s(0, 0.1, 30.0) == 30.0
    assert hardware_wait_s(40, 0.1, 30.0) == pytest.approx(0.0, abs=1e-9)
    assert hardware_wait_s(2, 0.0, 30.0) == 0.0


@pytest.mark.parametrize("num_spares", [0, 2])
def test_time_to_wipe_out_with_spares_is_near_that_of_simulated_events(num_spares: int) -> None:
    redundancy = 3
    rejoin = RejoinTimes(repair_s=60.0, transfer_s=5.0, num_spares=num_spares)
    away = absence(31, 600.0, rejoin)
    lived_s, absences_s = spares_samples_s(
        make_placement("golomb", 31, redundancy), 600.0, rejoin, 400, np.random.default_rng(7)
    )
    equivalent = equivalent_repair(redundancy, num_down_with_spares(31, away, rejoin), 600.0)
    expected_s = survival(31, redundancy, equivalent).mean_s
    print(f"absence {away.repair_s:.2f} s, counted {absences_s.mean():.2f}; {expected_s:.4g} s, {lived_s.mean():.4g}")
    assert away.repair_s == pytest.approx(absences_s.mean(), rel=0.15)
    assert expected_s == pytest.approx(lived_s.mean(), rel=0.25)


@pytest.mark.parametrize("repair_s", [10.0, 9000.0, 1e7])
def test_groups_without_hardware_are_those_that_are_in_repair_beyond_the_spares(repair_s: float) -> None:
    """A few, so many that none at all is as good as impossible, and all."""
    rejoin = RejoinTimes(repair_s=repair_s, transfer_s=100.0, num_spares=10)
    away = absence(3000, 1e4, rejoin)
    num_down = num_down_with_spares(3000, away, rejoin)
    lost_per_s = 3000 / (1e4 + away.repair_s)
    assert num_down.sum() == pytest.approx(1.0)
    assert num_down @ np.arange(3001) == pytest.approx(lost_per_s * away.repair_s, rel=0.01)


def test_groups_that_are_down_independently_are_equivalent_to_themselves() -> None:
    away = RepairTimes(group_interval_s=600.0, repair_s=30.0)
    found = equivalent_repair(3, binom.pmf(np.arange(101), 100, away.down_share), 600.0)
    # C(k, 2) / C(N - 1, 2) of a Binomial(N) is u^2 N / (N - 2).
    assert found.down_share == pytest.approx(away.down_share * (100 / 98) ** 0.5, rel=1e-3)


# ------------------------------------------------------------------------------------------------------- domains


def test_domains_of_independent_groups_are_binomial() -> None:
    intervals = LossIntervals(group_s=600.0, domain_s=NEVER_S)
    of_four = domain_down_probabilities(4, intervals, 60.0)
    away = RepairTimes(group_interval_s=600.0, repair_s=60.0)
    np.testing.assert_allclose(of_four, binom.pmf(np.arange(5), 4, away.down_share), atol=1e-9)
    of_two = domain_down_probabilities(2, intervals, 60.0)
    all_groups = num_down_in_domains(np.array([4, 4, 2]), {4: of_four, 2: of_two})
    np.testing.assert_allclose(all_groups, binom.pmf(np.arange(11), 10, away.down_share), atol=1e-9)


def test_a_domain_that_is_lost_as_one_is_down_as_one_host() -> None:
    of_one = domain_down_probabilities(1, LossIntervals(group_s=NEVER_S, domain_s=600.0), 60.0)
    assert of_one == pytest.approx([10 / 11, 1 / 11])


@pytest.mark.parametrize(("redundancy", "is_apart"), [(2, True), (3, True), (3, False)])
def test_time_to_wipe_out_with_domains_and_repair_is_near_that_of_simulated_events(
    redundancy: int, is_apart: bool
) -> None:
    n, size, absence_s = 60, 3, 60.0
    domain_of = consecutive_domains(n, size)
    placement = make_placement("golomb", n, redundancy, size if is_apart else 1)
    intervals = LossIntervals(group_s=1200.0, domain_s=2400.0)
    counts = hosts_per_domain(placement, domain_of)
    expected_s = survival(n, redundancy, equivalent_domain_repair(counts, intervals, absence_s)).mean_s
    samples_s = domain_repair_samples_s(
        placement, domain_of, intervals, absence_s, (400, np.random.default_rng([3, redundancy]))
    )
    print(f"r {redundancy}: {expected_s:.4g} s, simulated {samples_s.mean():.4g} s")
    assert expected_s == pytest.approx(samples_s.mean(), rel=0.25)


def test_a_plan_with_domains_has_the_time_of_simulated_losses_and_knows_no_domains_without_them() -> None:
    facts = facts_with(200, 300.0, None, groups_per_domain=4, domain_interval_s=1200.0)
    plan = predict(facts, "microbatch", 5)
    intervals = LossIntervals(group_s=200 * 300.0, domain_s=50 * 1200.0)
    samples_s = domain_samples_s(
        make_placement("golomb", 200, 5, 4), consecutive_domains(200, 4), intervals, 1000, np.random.default_rng(2)
    )
    # Counted per group that is up; the plan has as many losses at the rate of all groups.
    lost_per_s = 1 / intervals.group_s + 1 / intervals.domain_s
    at_full_rate_s = (1 - np.exp(-lost_per_s * samples_s)) / lost_per_s
    print(f"{plan.time_to_wipe_out_s:.0f} s, simulated {at_full_rate_s.mean():.0f} s")
    assert plan.time_to_wipe_out_s == pytest.approx(at_full_rate_s.mean(), rel=0.08)
    rare = predict(facts_with(200, 300.0, None, groups_per_domain=4, domain_interval_s=1e12), "microbatch", 5)
    none = predict(facts_with(200, 300.0, None), "microbatch", 5)
    assert rare.stretch == pytest.approx(none.stretch, rel=0.02)
    assert rare.time_to_wipe_out_s == pytest.approx(none.time_to_wipe_out_s, rel=0.08)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValueError, match="num_spares=2: a pool of spares is planned for groups"):
        facts_with(60, 300.0, RejoinTimes(repair_s=60.0, num_spares=2), groups_per_domain=4, domain_interval_s=600.0)
    with pytest.raises(ValueError, match="groups_per_domain=61 has to be from 1 to num_groups=60"):
        facts_with(60, 300.0, None, groups_per_domain=61)
    with pytest.raises(ValueError, match=r"repair_s=0.0 has to be above 0"):
        RejoinTimes(repair_s=0.0)
    with pytest.raises(ValueError, match="last_resort takes single microbatches"):
        predict(facts_with(60, 300.0, None, last_resort=True), "stack", 3)
