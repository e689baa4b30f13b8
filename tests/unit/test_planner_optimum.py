"""Cadence, availability and best redundancy, also of wide groups: closed forms against optima and simulation."""

import json
import random
from dataclasses import replace
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import lambertw
from typer.testing import CliRunner

from benchmarks.paper_model import (
    mean_overhead,
    paper_availability,
    paper_cadence_s,
    paper_redundancy,
    paper_time_to_train,
)
from spare_megatron.commands import app
from spare_megatron.core.saves.survival import optimal_cadence_s
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import share_of
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts, HoldingLimits, Policy
from spare_megatron.tools.plan.overhead import StepTimes, least_makespans, patch_stacks
from spare_megatron.tools.plan.plan import (
    availability,
    best_availability,
    candidates,
    closed_form_redundancy,
    optimize,
    predict,
)
from spare_megatron.tools.plan.readmission import RejoinTimes
from spare_megatron.tools.plan.reforming_costs import ReformTimes
from spare_megatron.tools.plan.width import plans_by_width, widened
from tests.oracle.monte_carlo import (
    SimulatedRun,
    availability_sample,
    endured_samples,
    simulated_time_to_train,
)

CHECKPOINT = CheckpointTimes(save_s=60.0, restart_s=3600.0)
REDUCE_S = {200: 2.0, 600: 6.0, 1000: 10.0}


def paper_facts(n: int, repair_s: float | None = 600.0) -> ClusterFacts:
    times = StepTimes(shard_s=64.0, reduce_s=REDUCE_S[n], loss_interval_s=300.0)
    rejoin = None if repair_s is None else RejoinTimes(repair_s=repair_s)
    return ClusterFacts(num_groups=n, times=times, checkpoint=CHECKPOINT, num_microbatches=16, rejoin=rejoin)


@pytest.mark.parametrize("restart_s", [0.0, 3600.0])
@pytest.mark.parametrize("times", [(60.0, 9e4), (1.0, 50.0), (0.01, 1e7), (600.0, 700.0), (50.0, 10.0)])
def test_the_cadence_is_the_numeric_optimum_of_the_availability(times: tuple[float, float], restart_s: float) -> None:
    save_s, to_failure_s = times
    best_s = optimal_cadence_s(*times)
    found = minimize_scalar(
        lambda log_s: -availability(float(np.exp(log_s)), save_s, to_failure_s, restart_s),
        bounds=(np.log(save_s), np.log(1e4 * best_s)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert np.exp(found.x) == pytest.approx(best_s, rel=1e-4)
    assert best_availability(*times, restart_s) == pytest.approx(-found.fun, rel=1e-12)
    assert best_availability(*times, restart_s) == pytest.approx(availability(best_s, *times, restart_s))


@pytest.mark.parametrize("to_failure_s", [1e-3, 10.0, 9e4, 1e12])
def test_the_cadence_solves_its_equation_to_many_digits(to_failure_s: float) -> None:
    """t + exp(-t) - 1 = e changes its sign within 1e-12 of the answer, in decimals of 80 digits."""
    for exponent in np.linspace(-20, 3, 47):
        save_s = float(10**exponent) * to_failure_s
        e = Decimal(save_s) / Decimal(to_failure_s)
        t = Decimal(optimal_cadence_s(save_s, to_failure_s)) / Decimal(to_failure_s)
        with localcontext(prec=80):
            below, above = (t * (1 + sign * Decimal("1e-12")) for sign in (-1, 1))
            assert below + (-below).exp() - 1 < e < above + (-above).exp() - 1, f"T_s / T_f = 10^{exponent}"


def test_rare_wipe_outs_have_the_cadence_of_young_and_frequent_ones_that_of_lambert() -> None:
    assert optimal_cadence_s(1.0, 1e12) == pytest.approx(np.sqrt(2e12), rel=1e-6)
    for save_s in (0.05, 0.3, 2.0, 20.0):
        x = 1 + lambertw(-np.exp(-1 - save_s)).real
        assert optimal_cadence_s(save_s, 1.0) == pytest.approx(save_s + x, rel=1e-9)
        assert best_availability(save_s, 1.0, 3.0) == pytest.approx((1 - x) / 4, rel=1e-6)


def test_hopeless_times_have_an_availability_that_can_be_divided_by() -> None:
    assert best_availability(3600.0, 1.0, 0.0) == 1e-300
    assert availability(1e6, 1.0, 1.0, 0.0) == 0.0


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("nan"))])
def test_a_cadence_from_times_out_of_range_is_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="has to be"):
        optimal_cadence_s(*times)


@pytest.mark.parametrize(
    "times", [(10.0, 60.0, 1.0, 1.0), (60.0, -1.0, 1.0, 1.0), (60.0, 1.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0)]
)
def test_an_availability_from_times_out_of_range_is_refused(times: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="has to be"):
        availability(*times)
    with pytest.raises(ValueError, match="restart_s=-1 has to be"):
        best_availability(1.0, 1.0, -1)


@pytest.mark.parametrize("cadence", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("to_failure_s", [60.0, 1e3, 9e3, 3e5])
def test_availability_is_that_of_simulated_saves(to_failure_s: float, cadence: float) -> None:
    wipe_outs_s = np.random.default_rng(2).exponential(to_failure_s, 200_000)
    cadence_s = max(cadence * optimal_cadence_s(60.0, to_failure_s), 61.0)
    simulated = availability_sample(cadence_s, CHECKPOINT, wipe_outs_s)
    assert availability(cadence_s, 60.0, to_failure_s, 3600.0) == pytest.approx(simulated, rel=0.015)


def test_the_published_redundancies() -> None:
    assert [closed_form_redundancy(n) for n in (200, 600, 1000)] == [8, 10, 10]
    assert [paper_redundancy(n, 300.0, CHECKPOINT) for n in (200, 600, 1000)] == [8, 10, 10]
    assert [closed_form_redundancy(n) for n in (1, 2, 3)] == [1, 1, 2]


@pytest.mark.parametrize(("n", "published"), [(200, 2.92), (600, 2.49), (1000, 2.34)])
def test_plans_are_within_3_percent_of_the_published_simulation(n: int, published: float) -> None:
    plan = optimize(paper_facts(n), "stack")
    print(f"N = {n}: {plan.time_to_train_ratio:.3f} at r = {plan.redundancy}, published {published}")
    assert plan.time_to_train_ratio == pytest.approx(published, rel=0.03)
    assert plan.redundancy in (8, 9)


def test_the_availability_of_the_paper_is_ours_where_wipe_outs_are_rare() -> None:
    """It counts lost work as time beyond T_f, so that it asks for longer intervals the longer a restart takes."""
    for to_failure_s, difference in ((9e4, 1e-3), (9e6, 5e-6)):
        cadence_s = optimal_cadence_s(60.0, to_failure_s)
        exact = availability(cadence_s, 60.0, to_failure_s, 3600.0)
        assert paper_availability(cadence_s, to_failure_s, CHECKPOINT) == pytest.approx(exact, rel=difference)
    assert paper_cadence_s(9e3, CHECKPOINT) > 1.2 * optimal_cadence_s(60.0, 9e3)


def test_the_paper_estimate_is_an_upper_bound_of_the_plan() -> None:
    facts = paper_facts(600)
    paper = paper_time_to_train(600, 10, 300.0, CHECKPOINT, facts.times)
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


FACTS = ClusterFacts(
    num_groups=24,
    times=StepTimes(shard_s=60.0, reduce_s=6.0, loss_interval_s=3600.0),
    checkpoint=CheckpointTimes(save_s=10.0, restart_s=600.0),
    num_microbatches=8,
)


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_a_wide_group_computes_as_many_passes_as_the_planner_has_microbatches(num_lanes: int) -> None:
    """Of the dealing of single microbatches, and of rows, which are dealt as the microbatches of one lane are."""
    chance, num_groups, m = random.Random(num_lanes), 7, 4
    placement = make_placement("golomb", num_groups, num_groups)
    for _ in range(20):
        num_lost = chance.randrange(num_groups - 1)
        alive = frozenset(map(GroupId, chance.sample(range(num_groups), num_groups - num_lost)))
        expected = least_makespans(num_groups, m)[num_lost] * m
        for row_size in (1, num_lanes):
            units = m * num_lanes // row_size
            work = initial_order(placement, units, "microbatch").for_groups(alive).work
            shares = [
                share_of(work.of(group), lane=lane, num_lanes=num_lanes, row_size=row_size, units_per_shard=units)
                for group in alive
                for lane in range(num_lanes)
            ]
            assert max(map(len, shares)) == expected


def test_a_width_is_planned_as_that_many_groups_with_less_between_them() -> None:
    (found,) = plans_by_width(FACTS, "microbatch", [4], over_groups_s=4.0)
    times = replace(FACTS.times, reduce_s=3.0)
    expected = optimize(replace(FACTS, num_groups=6, times=times), "microbatch")
    assert found.plan.redundancy == expected.redundancy
    assert found.plan.time_to_train_ratio == pytest.approx(expected.time_to_train_ratio * 63 / 66)
    assert (found.num_lanes, found.num_groups, found.lost_share) == (4, 6, 1 / 6)


def test_what_a_group_has_of_machines_spares_and_domains_follows_its_width() -> None:
    reform = ReformTimes(machines_per_group=3, least_machines=2, reform_s=60.0, run_s=1e6, num_spares=5)
    wide = widened(replace(FACTS, reform=reform, rejoin=RejoinTimes(repair_s=600.0, num_spares=5)), 4)
    assert wide.reform is not None
    assert wide.rejoin is not None
    assert (wide.reform.machines_per_group, wide.reform.num_spares, wide.rejoin.num_spares) == (12, 5, 1)
    assert wide.reform.least_machines == 8
    domains = replace(FACTS, groups_per_domain=4, domain_interval_s=1e6)
    assert (widened(domains, 2).groups_per_domain, widened(domains, 2).num_domains) == (2, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "1,7"], "7 lanes do not divide the 24 groups"),
        (["--widths", "two"], "--widths two has to be numbers of lanes"),
        (["--widths", "0"], "0 lanes do not divide the 24 groups"),
        (["--over-groups", "1s"], "--over-groups 1s needs --widths"),
        (["--widths", "2", "--over-groups", "9s", "--reduce", "6s"], "--over-groups 9s exceeds the rest of a step"),
        (
            ["--widths", "8", "--groups-per-domain", "4", "--domain-mtbf", "9d"],
            "8 lanes do not divide a domain of 4 groups",
        ),
    ],
)
def test_widths_that_cannot_be_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *CLUSTER, *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


CLUSTER = ["--groups", "24", "--mtbf", "1h", "--restart", "10m", "--save", "10s", "--microbatches", "8"]


def test_plan_compares_widths() -> None:
    result = CliRunner().invoke(app, ["plan", *CLUSTER, "--widths", "1,2,4"])
    assert result.exit_code == 0, result.output
    assert "wide groups" in result.output
    figures = json.loads(CliRunner().invoke(app, ["plan", *CLUSTER, "--widths", "1,4", "--json"]).stdout)
    one, four = figures["widths"]
    assert one["plan"]["time_to_train_ratio"] == pytest.approx(figures["time_to_train_ratio"])
    assert (four["num_lanes"], four["num_groups"]) == (4, 6)
