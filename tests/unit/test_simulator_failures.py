"""When groups are lost: distributions, rates that follow the groups that take part, repair and spares."""

import dataclasses
from math import inf

import numpy as np
import pytest

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.scenario import CostModel, Scenario


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
