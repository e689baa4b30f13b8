"""When groups are lost, one by one or by domains: distributions, rates, repair, and placements that know of domains."""

import dataclasses
from math import inf
from typing import Any

import numpy as np
import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.oracle.monte_carlo import endured_samples
from tests.unit.journal_in_memory import check_journal


def intervals(spec: FailureSpec, is_up: np.ndarray, num: int = 4000) -> np.ndarray:
    process = make_process(spec, is_up.size, np.random.default_rng(0))
    return np.diff([process.strike(is_up).at_s for _ in range(num)])


@pytest.mark.parametrize(("shape", "spread"), [(1.0, 1.0), (0.78, 1.297)])
def test_system_wide_times_have_the_mean_and_the_spread_of_their_weibull_distribution(
    shape: float, spread: float
) -> None:
    all_groups = np.ones(1000, dtype=np.bool_)
    times = intervals(FailureSpec(mean_s=300.0, shape=shape), all_groups)
    assert times.mean() == pytest.approx(300.0, rel=0.05)
    assert times.std() / times.mean() == pytest.approx(spread, rel=0.06)


def test_the_system_wide_rate_falls_with_the_groups_that_take_part() -> None:
    half = np.arange(10_000) < 5000
    assert intervals(FailureSpec(mean_s=300.0), half).mean() == pytest.approx(600.0, rel=0.05)


def test_the_system_wide_clock_runs_faster_again_when_groups_come_back() -> None:
    is_up = np.array([True, False])
    process = make_process(FailureSpec(mean_s=100.0), 2, np.random.default_rng(3))
    first_s = process.strike(np.array([True, True])).at_s
    due_s = process.next_s()
    is_up[1] = True
    process.came_back(first_s + 10.0, (GroupId(1),), is_up)
    assert process.next_s() - (first_s + 10.0) == pytest.approx((due_s - first_s - 10.0) / 2)


def test_no_clock_runs_while_a_restart_is_under_way() -> None:
    for kind in ("system", "group", "node", "domain"):
        process = make_process(FailureSpec(kind=kind, mean_s=100.0), 4, np.random.default_rng(3))  # type: ignore[arg-type]
        due_s = process.next_s()
        process.restarted(due_s / 2, due_s / 2 + 1000.0, ())
        assert process.next_s() == pytest.approx(due_s + 1000.0)


def test_each_group_is_lost_at_a_rate_of_its_own_and_only_while_it_takes_part() -> None:
    process = make_process(FailureSpec(kind="group", mean_s=100.0), 2000, np.random.default_rng(0))
    losses = [process.strike(np.ones(2000, dtype=np.bool_)) for _ in range(2000)]
    assert len({loss.groups for loss in losses}) == 2000
    assert process.next_s() == inf
    assert np.median([loss.at_s for loss in losses]) == pytest.approx(100.0 * np.log(2), rel=0.06)
    process.came_back(5000.0, (GroupId(7),), np.ones(2000, dtype=np.bool_))
    assert process.strike(np.ones(2000, dtype=np.bool_)).groups == (7,)


def test_a_domain_takes_all_its_groups_that_are_up() -> None:
    spec = FailureSpec(kind="domain", mean_s=100.0, groups_per_domain=4)
    process = make_process(spec, 10, np.random.default_rng(0))
    is_up = np.ones(10, dtype=np.bool_)
    is_up[5] = False
    assert {process.strike(is_up).groups for _ in range(50)} == {(0, 1, 2, 3), (4, 6, 7), (8, 9)}


def test_a_trace_is_replayed_in_order() -> None:
    losses = (Loss(at_s=9.0, groups=(GroupId(1),)), Loss(at_s=3.0, groups=(GroupId(0), GroupId(2))))
    process = make_process(FailureSpec(kind="trace", trace=losses), 3, np.random.default_rng(0))
    is_up = np.array([True, True, False])
    assert process.next_s() == 3.0
    assert process.strike(is_up).groups == (0,)
    assert process.strike(is_up).groups == (1,)
    assert process.next_s() == inf


def test_a_process_without_failures_never_strikes() -> None:
    for kind in ("system", "group", "node", "domain"):
        process = make_process(FailureSpec(kind=kind), 4, np.random.default_rng(0))  # type: ignore[arg-type]
        assert process.next_s() == inf


def scenario(**changes: object) -> Scenario:
    base = Scenario(
        name="x", num_groups=40, redundancy=4, num_steps=300, microbatches_per_shard=4,
        costs=CostModel(compute_s=60.0, reduce_s=5.0, save_s=2.0, restart_s=300.0, join_s=1.0),
        failures=FailureSpec(mean_s=200.0, shape=0.78),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_repair_times_come_from_the_trace_where_it_has_them_and_may_be_random() -> None:
    losses = (Loss(at_s=1.0, groups=(GroupId(0),), repair_s=5.0), Loss(at_s=2.0, groups=(GroupId(1),)))
    spec = FailureSpec(kind="trace", trace=losses)
    process = make_process(spec, 40, np.random.default_rng(0))
    fleet = Fleet(scenario(failures=spec), process, np.random.default_rng(0))
    fleet.lose_until(10.0)
    assert (fleet.ready(5.9), fleet.ready(6.0), fleet.ready(1e9)) == ((), (0,), (0,))

    spec = FailureSpec(kind="group", mean_s=1.0)
    process = make_process(spec, 40, np.random.default_rng(0))
    fleet = Fleet(scenario(repair_s=100.0, repair_is_random=True), process, np.random.default_rng(0))
    fleet.lose_until(1000.0)
    assert 5 < len(fleet.ready(50.0)) < 35


@pytest.mark.parametrize(
    "changes",
    [
        {"failures": FailureSpec(kind="group", mean_s=8000.0, shape=0.8), "repair_s": 900.0, "repair_is_random": True},
        {"failures": FailureSpec(kind="domain", mean_s=4000.0, groups_per_domain=3), "repair_s": 600.0},
        {"failures": FailureSpec(kind="node", nodes_per_group=5, mean_s=4e4, shape=0.8), "repair_s": 600.0},
        {"failures": FailureSpec(mean_s=200.0), "num_spares": 4, "repair_s": 900.0},
        {"policy": "replication"},
        {"policy": "replication", "repair_s": 500.0},
        {"policy": "checkpoint_only", "num_steps": 100, "failures": FailureSpec(mean_s=400.0)},
        {"last_resort": True, "repair_s": 900.0, "redundancy": 1},
        {"granularity": "stack"},
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_terms_add_up_and_the_same_seed_gives_the_same_result(seed: int, changes: dict[str, object]) -> None:
    result = simulate(scenario(**changes), seed)
    assert sum(result.terms.values()) == pytest.approx(result.end_s, rel=1e-12)
    assert min(result.terms[cause] for cause in result.terms if cause != "jitter") >= 0
    assert result.losses > 5
    assert result.time_to_train_ratio > 1
    assert 0 < result.availability <= 1
    assert result == simulate(scenario(**changes), seed)
    assert result != simulate(scenario(**changes), seed + 100)


def test_groups_down_agree_with_the_rate_of_losses_times_the_repair_time() -> None:
    costs = CostModel(compute_s=1.0)
    busy = scenario(num_steps=20_000, failures=FailureSpec(mean_s=50.0), repair_s=60.0, costs=costs, num_groups=20)
    result = simulate(busy, seed=0)
    # Little's law; a group waits for half a step beside its repair.
    per_s = result.losses / result.end_s
    assert result.mean_down == pytest.approx(per_s * (60.0 + 0.5 * result.time_to_train_ratio), rel=0.03)
    assert result.losses > 300


def with_domains(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "racks",
        "num_groups": 24,
        "redundancy": 3,
        "num_steps": 400,
        "microbatches_per_shard": 4,
        "costs": CostModel(compute_s=10.0, save_s=1.0, restart_s=100.0),
        "failures": FailureSpec(kind="domain", mean_s=3000.0, groups_per_domain=4),
    }
    return Scenario(**{**settings, **changes})


def test_the_placement_takes_the_domains_of_the_failures_by_default() -> None:
    assert with_domains().placed_groups_per_domain == 4
    assert with_domains(groups_per_domain=1).placed_groups_per_domain == 1
    assert with_domains(groups_per_domain=6).placed_groups_per_domain == 6
    assert with_domains(placement="consecutive").placed_groups_per_domain == 1
    assert with_domains(failures=FailureSpec(mean_s=100.0), groups_per_domain=3).placed_groups_per_domain == 3


def test_domains_of_a_placement_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="groups_per_domain=0 has to be 1 or more"):
        with_domains(groups_per_domain=0)
    with pytest.raises(ValueError, match="groups_per_domain=4 needs the placement golomb"):
        with_domains(groups_per_domain=4, placement="consecutive")


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_losses_of_domains_wipe_out_later_where_the_placement_knows_of_them(granularity: str) -> None:
    def wipe_outs_per_s(groups_per_domain: int | None) -> float:
        case = with_domains(groups_per_domain=groups_per_domain, granularity=granularity, num_steps=4000)
        results = [simulate(case, seed) for seed in range(4)]
        return sum(result.restarts for result in results) / sum(result.end_s for result in results)

    assert wipe_outs_per_s(None) < 0.8 * wipe_outs_per_s(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"groups_per_domain": 1}, {"redundancy": 6, "num_steps": 8000}, {"num_groups": 60}]
)
def test_the_expected_time_to_wipe_out_by_domains_is_met_by_simulation(changes: dict[str, Any]) -> None:
    costs, failures = CostModel(compute_s=2.5e-3), FailureSpec(kind="domain", mean_s=0.3, groups_per_domain=4)
    case = with_domains(costs=costs, failures=failures, save_interval_s=0.0, **{"num_steps": 4000} | changes)
    result = simulate(case, seed=1)
    assert result.restarts > 50
    assert result.end_s / result.restarts == pytest.approx(case.time_to_wipe_out_s(), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 8000},
        {"groups_per_domain": 1},
        {"num_groups": 60},
        {"num_groups": 60, "redundancy": 2},
        {"num_groups": 60, "redundancy": 2, "groups_per_domain": 1},
    ],
)
def test_the_expected_time_to_wipe_out_by_domains_that_come_back_is_near_that_of_simulation(
    changes: dict[str, Any],
) -> None:
    """A lower bound, as sets of domains that overlap are lost together more often than independent ones."""
    costs, failures = CostModel(compute_s=2.5e-3), FailureSpec(kind="domain", mean_s=0.3, groups_per_domain=4)
    case = with_domains(
        costs=costs, failures=failures, save_interval_s=0.0, repair_s=0.1, **{"num_steps": 4000} | changes
    )
    result = simulate(case, seed=1)
    simulated_s = result.end_s / result.restarts
    print(f"{changes}: {result.restarts} wipe-outs, {simulated_s:.3f} s, expected {case.time_to_wipe_out_s():.3f} s")
    assert result.restarts > 50
    assert 0.6 * simulated_s < case.time_to_wipe_out_s() < 1.15 * simulated_s


@pytest.mark.parametrize(("num_groups", "size", "redundancy"), [(200, 4, 8), (200, 8, 9), (1000, 8, 9)])
def test_more_domains_are_endured_by_a_placement_that_knows_of_them(
    num_groups: int, size: int, redundancy: int
) -> None:
    domain_of = np.arange(num_groups) // size
    endured = {}
    for known in (1, size):
        hosts = make_placement("golomb", num_groups, redundancy, known).host_array
        samples = endured_samples(domain_of[hosts], num_groups // size, 1000, np.random.default_rng(num_groups))
        endured[known] = (samples.mean(), samples.std() / np.sqrt(samples.size))
    print(f"N {num_groups}, domains of {size}, r {redundancy}: endured {endured}")
    assert endured[size][0] > endured[1][0] + 5 * endured[1][1]


def test_the_journal_of_a_run_with_domains_is_checked_against_its_own_placement() -> None:
    lines: list[Line] = []
    simulate(
        with_domains(num_steps=30, failures=FailureSpec(kind="domain", mean_s=600.0, groups_per_domain=4)),
        1,
        lines.append,
    )
    run = lines[0].record
    assert isinstance(run, RunRecord)
    assert run.groups_per_domain == 4
    assert check_journal(Journal(lines=tuple(lines))).verdict == "valid"
    other = dataclasses.replace(lines[0], record=dataclasses.replace(run, groups_per_domain=1))
    answer = check_journal(Journal(lines=(other, *lines[1:])))
    assert answer.verdict == "invalid"
    assert any("without hosting it" in reason for reason in answer.reasons)
