"""Cadence, availability and best redundancy: closed forms against numeric optima and simulation."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from spare_megatron.core.cadence import optimal_cadence_s
from spare_megatron.core.placement import make_placement
from spare_megatron.planner.availability import availability, best_availability
from spare_megatron.planner.facts import ClusterFacts, HoldingLimits, Policy
from spare_megatron.planner.montecarlo import (
    SimulatedRun,
    availability_sample,
    endured_samples,
    simulated_time_to_train,
)
from spare_megatron.planner.optimum import (
    CheckpointTimes,
    closed_form_redundancy,
    numeric_redundancy,
    time_to_train,
)
from spare_megatron.planner.overhead import StepTimes, least_makespans, mean_overhead, patch_stacks
from spare_megatron.planner.plan import candidates, optimize, predict
from spare_megatron.planner.rejoin import RejoinTimes

CHECKPOINT = CheckpointTimes(save_s=60.0, restart_s=3600.0)
REDUCE_S = {200: 2.0, 600: 6.0, 1000: 10.0}


def paper_facts(n: int, repair_s: float | None = 600.0) -> ClusterFacts:
    times = StepTimes(shard_s=64.0, reduce_s=REDUCE_S[n], loss_interval_s=300.0)
    rejoin = None if repair_s is None else RejoinTimes(repair_s=repair_s)
    return ClusterFacts(num_groups=n, times=times, checkpoint=CHECKPOINT, num_microbatches=16, rejoin=rejoin)


@pytest.mark.parametrize("times", [(60.0, 9e4, 3600.0), (1.0, 50.0, 0.0), (0.01, 1e7, 30.0), (600.0, 700.0, 10.0)])
def test_the_cadence_is_the_numeric_optimum_of_the_availability(times: tuple[float, float, float]) -> None:
    save_s, to_failure_s, restart_s = times
    best_s = optimal_cadence_s(*times)
    found = minimize_scalar(
        lambda log_s: -availability(float(np.exp(log_s)), save_s, to_failure_s, restart_s),
        bounds=(np.log(save_s), np.log(1e4 * best_s)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert np.exp(found.x) == pytest.approx(best_s, rel=1e-4)
    assert best_availability(*times) == pytest.approx(-found.fun, rel=1e-12)
    assert best_availability(*times) == pytest.approx(availability(best_s, *times))


@pytest.mark.parametrize("times", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, -1.0), (float("nan"), 1.0, 1.0)])
def test_a_cadence_from_times_out_of_range_is_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="has to be"):
        optimal_cadence_s(*times)


@pytest.mark.parametrize("times", [(10.0, 60.0, 1.0, 1.0), (60.0, -1.0, 1.0, 1.0), (60.0, 1.0, 0.0, 1.0)])
def test_an_availability_from_times_out_of_range_is_refused(times: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="has to be"):
        availability(*times)


@pytest.mark.parametrize(("to_failure_s", "error"), [(9e3, 0.03), (3e4, 0.01), (3e5, 0.003)])
def test_availability_is_near_that_of_simulated_saves(to_failure_s: float, error: float) -> None:
    wipe_outs_s = np.random.default_rng(2).exponential(to_failure_s, 100_000)
    cadence_s = optimal_cadence_s(60.0, to_failure_s, 3600.0)
    simulated = availability_sample(cadence_s, CHECKPOINT, wipe_outs_s)
    assert best_availability(60.0, to_failure_s, 3600.0) == pytest.approx(simulated, rel=error)


def test_the_published_redundancies() -> None:
    assert [closed_form_redundancy(n) for n in (200, 600, 1000)] == [8, 10, 10]
    assert [numeric_redundancy(n, 300.0, CHECKPOINT) for n in (200, 600, 1000)] == [8, 10, 10]
    assert [closed_form_redundancy(n) for n in (1, 2, 3)] == [1, 1, 2]


@pytest.mark.parametrize(("n", "published"), [(200, 2.92), (600, 2.49), (1000, 2.34)])
def test_plans_are_within_3_percent_of_the_published_simulation(n: int, published: float) -> None:
    plan = optimize(paper_facts(n), "stack")
    print(f"N = {n}: {plan.time_to_train_ratio:.3f} at r = {plan.redundancy}, published {published}")
    assert plan.time_to_train_ratio == pytest.approx(published, rel=0.03)
    assert plan.redundancy in (8, 9)


def test_the_paper_estimate_is_an_upper_bound_of_the_plan() -> None:
    facts = paper_facts(600)
    paper = time_to_train(600, 10, 300.0, CHECKPOINT, facts.times)
    assert predict(facts, "stack", 10).time_to_train_ratio < paper < 1.1 * optimize(facts, "stack").time_to_train_ratio


@pytest.mark.parametrize(("policy", "n", "r"), [("stack", 600, 9), ("microbatch", 200, 6), ("microbatch", 1000, 5)])
def test_plans_are_within_3_percent_of_simulated_runs(policy: Policy, n: int, r: int) -> None:
    facts = paper_facts(n)
    plan = predict(facts, policy, r)
    m = 16 if policy == "microbatch" else 1
    rng = np.random.default_rng([11, n])
    losses = endured_samples(make_placement("golomb", n, r).host_array, n, 60, rng) + 1
    run = SimulatedRun(times=facts.times, checkpoint=CHECKPOINT, cadence_s=plan.cadence_s)
    simulated = simulated_time_to_train(losses, least_makespans(n, m), patch_stacks(n, r, m), run, rng)
    print(f"{policy} {n} {r}: plan {plan.time_to_train_ratio:.3f}, simulated {simulated:.3f}")
    assert plan.time_to_train_ratio == pytest.approx(simulated, rel=0.03)


def test_stretch_is_below_the_mean_over_counts_and_above_1() -> None:
    """Long steps are fewer in the same time, which the mean over counts of losses overlooks."""
    facts = paper_facts(600)
    stack, microbatch = predict(facts, "stack", 10).stretch, predict(facts, "microbatch", 10).stretch
    assert 1 < microbatch < stack < mean_overhead(600, 10, facts.times)


def test_finer_policies_train_faster() -> None:
    facts = paper_facts(600)
    ratios = [optimize(facts, policy).time_to_train_ratio for policy in ("stack", "microbatch", "rejoin")]
    assert ratios == sorted(ratios, reverse=True)


def test_the_optimum_is_the_least_redundancy_within_a_thousandth_of_the_least_ratio() -> None:
    facts = paper_facts(200)
    plans = candidates(facts, "rejoin")
    chosen = optimize(facts, "rejoin")
    least = min(plan.time_to_train_ratio for plan in plans)
    assert chosen.time_to_train_ratio <= 1.001 * least
    assert all(plan.time_to_train_ratio > 1.001 * least for plan in plans if plan.redundancy < chosen.redundancy)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["stack", "microbatch", "rejoin"])
def test_few_groups_have_a_plan(n: int, policy: Policy) -> None:
    times = StepTimes(shard_s=1.0, reduce_s=0.1, loss_interval_s=1000.0)
    rejoin = RejoinTimes(repair_s=100.0)
    facts = ClusterFacts(num_groups=n, times=times, checkpoint=CHECKPOINT, num_microbatches=4, rejoin=rejoin)
    plan = optimize(facts, policy)
    assert 1 <= plan.redundancy <= n
    assert 1 < plan.time_to_train_ratio < 1e3
    assert 0 < plan.availability < 1


def test_limits_hold_the_redundancy_down() -> None:
    facts = paper_facts(600)
    memory = HoldingLimits(shard_bytes=100, memory_bytes=350)
    assert optimize(facts, "stack", memory).redundancy == 3
    reading = HoldingLimits(shard_bytes=700, read_bytes_per_s=50.0)  # 5 in a step of 70 s
    assert optimize(facts, "stack", reading).redundancy == 5
    with pytest.raises(ValueError, match="not hold even one shard of 100 bytes"):
        optimize(facts, "stack", HoldingLimits(shard_bytes=100, memory_bytes=99))


def test_what_cannot_be_planned_is_refused() -> None:
    facts = paper_facts(200, repair_s=None)
    with pytest.raises(ValueError, match="rejoin needs the time"):
        predict(facts, "rejoin", 3)
    with pytest.raises(ValueError, match="policy 'other' is unknown"):
        predict(facts, "other", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="redundancy=201 exceeds the 200"):
        predict(facts, "stack", 201)
    with pytest.raises(ValueError, match="num_groups=0"):
        ClusterFacts(num_groups=0, times=facts.times, checkpoint=CHECKPOINT)
