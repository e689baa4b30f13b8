"""Rejoining with pauses, spares, domains and hosts of last resort: the planner beside simulated runs and events."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.plan.domains import (
    LossIntervals,
    consecutive_domains,
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
from spare_megatron.tools.plan.repair import RepairTimes, survival
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.oracle.monte_carlo import domain_repair_samples_s, domain_samples_s, spares_samples_s

NEVER_S = 1e15


def facts_of(n: int, interval_s: float, rejoin: RejoinTimes | None, **others: Any) -> ClusterFacts:
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
    ],
    ids=["repair", "join", "transfer", "spares", "domains", "last resort"],
)
def test_the_stretch_is_that_of_simulated_runs_or_up_to_5_percent_higher(
    interval_s: float, redundancy: int, rejoin: RejoinTimes, others: dict[str, Any]
) -> None:
    facts = facts_of(60, interval_s, rejoin, **others)
    planned, simulated = predict(facts, "rejoin", redundancy).stretch, simulated_stretch(facts, redundancy)
    print(f"planned {planned:.4f}, simulated {simulated:.4f}: {planned / simulated - 1:+.2%}")
    assert simulated * 0.98 < planned < simulated * 1.05


def test_a_pause_costs_what_it_takes_times_the_commits_that_have_one() -> None:
    without, with_pause = (
        predict(facts_of(600, 300.0, RejoinTimes(repair_s=600.0, join_s=join_s)), "rejoin", 8).stretch
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
    facts = facts_of(200, 300.0, None, groups_per_domain=4, domain_interval_s=1200.0)
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
    rare = predict(facts_of(200, 300.0, None, groups_per_domain=4, domain_interval_s=1e12), "microbatch", 5)
    none = predict(facts_of(200, 300.0, None), "microbatch", 5)
    assert rare.stretch == pytest.approx(none.stretch, rel=0.02)
    assert rare.time_to_wipe_out_s == pytest.approx(none.time_to_wipe_out_s, rel=0.08)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValueError, match="num_spares=2: a pool of spares is planned for groups"):
        facts_of(60, 300.0, RejoinTimes(repair_s=60.0, num_spares=2), groups_per_domain=4, domain_interval_s=600.0)
    with pytest.raises(ValueError, match="groups_per_domain=61 has to be from 1 to num_groups=60"):
        facts_of(60, 300.0, None, groups_per_domain=61)
    with pytest.raises(ValueError, match=r"repair_s=0.0 has to be above 0"):
        RejoinTimes(repair_s=0.0)
    with pytest.raises(ValueError, match="last_resort takes single microbatches"):
        predict(facts_of(60, 300.0, None, last_resort=True), "stack", 3)
