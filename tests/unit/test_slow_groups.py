"""Slow groups, and groups that share processors, in the simulator and in the planner."""

from dataclasses import replace
from math import inf
from statistics import mean
from typing import Any

import numpy as np
import pytest

from benchmarks.slow_group import BLOCK_STEPS, processor_price
from spare_megatron.journal.files import Line
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.paces import dealt_stacks
from spare_megatron.stacking.placement import IntArray
from spare_megatron.stacking.plans import Work
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.slow_group_costs import NAMED_AFTER, SlowRate, replaced_ratio, slow_cost
from spare_megatron.tools.simulate.compute_fit import finish_times, stacks_of, stretch
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, SlowGroups
from spare_megatron.tools.simulate.scenario import CostModel, Scenario, SimulatedPolicy
from spare_megatron.tools.simulate.world import World

SCENARIO = Scenario(
    name="slow",
    num_groups=40,
    redundancy=4,
    num_steps=4000,
    costs=CostModel(compute_s=10.0, reduce_s=1.0),
    slow=SlowRate(group_interval_s=50_000.0, duration_s=2_000.0, factor=2.0),
)


def ratio_of(scenario: Scenario, seed: int = 0) -> float:
    return simulate(scenario, seed).time_to_train_ratio


def test_slow_groups_are_slow_for_their_share_of_the_time() -> None:
    spec = SlowRate(group_interval_s=300.0, duration_s=100.0, factor=3.0)
    slow = SlowGroups(spec, 50, np.random.default_rng(0))
    seen = np.array([slow.factors(now_s) for now_s in np.arange(1000.0, 40_000.0, 50.0)])
    assert set(np.unique(seen)) == {1.0, 3.0}
    assert np.mean(seen == 3.0) == pytest.approx(spec.share, rel=0.05)


def test_without_slow_groups_nothing_is_measured() -> None:
    quiet = replace(SCENARIO, slow=SlowRate())
    assert quiet.rounds is None
    assert ratio_of(quiet) == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_the_planner_knows_what_dealing_by_pace_is_worth(factor: float) -> None:
    slow = replace(SCENARIO.slow, factor=factor)
    times = StepTimes(shard_s=10.0, reduce_s=1.0, loss_interval_s=1e12)
    rate = SlowRate(group_interval_s=slow.group_interval_s or 0.0, duration_s=slow.duration_s, factor=factor)
    planned = slow_cost(40, 16, times, rate)
    scenario = replace(SCENARIO, slow=slow)
    even, dealt = ratio_of(replace(scenario, deal_by_pace=False)), ratio_of(scenario)
    print(f"factor {factor}: {planned}, simulated {even:.3f} and {dealt:.3f}")
    assert even - 1 == pytest.approx(planned.even_ratio - 1, rel=0.2)
    assert dealt - 1 == pytest.approx(planned.dealt_ratio - 1, rel=0.2)
    assert dealt < even


def test_a_spare_takes_the_part_of_a_slow_machine_where_the_rule_of_runs_says_so() -> None:
    """Alone 15 of 16 groups take longer than work that is dealt by pace, so that none is drained without a spare."""
    slow = SlowRate(group_interval_s=50_000.0, duration_s=2_000.0, factor=4.0)
    costs = CostModel(compute_s=10.0, reduce_s=1.0, join_s=30.0)
    dealt = replace(SCENARIO, num_groups=16, num_steps=3000, costs=costs, slow=slow)
    times = StepTimes(shard_s=10.0, reduce_s=1.0, loss_interval_s=1e12)
    without, spared = (replaced_ratio(16, 16, times, slow, join_s=30.0, has_spare=spare) for spare in (False, True))
    assert without is None
    assert spared is not None
    short = replace(dealt, num_steps=500)
    assert simulate(replace(short, replace_slow=True), 0) == simulate(short, 0)
    runs = [simulate(replace(dealt, replace_slow=True, num_spares=1), seed) for seed in range(4)]
    assert sum(run.drains for run in runs) > 10
    found = mean(run.time_to_train_ratio for run in runs)
    print(f"planned {spared:.4f}, simulated {found:.4f}")
    assert found - 1 == pytest.approx(spared - 1, rel=0.25)


def test_a_slow_machine_leaves_once_it_has_cost_what_a_change_does_and_the_spare_is_as_fast_as_others() -> None:
    slow = SlowRate(group_interval_s=2e5, duration_s=1e9, factor=2.0)  # one turns slow, and stays so
    costs = CostModel(compute_s=10.0, reduce_s=1.0, join_s=20.0)
    scenario = replace(SCENARIO, num_groups=8, num_steps=1500, costs=costs, slow=slow, replace_slow=True, num_spares=1)
    run = simulate(scenario, 4)
    assert (run.drains, run.losses, run.max_down) == (1, 0, 1)
    assert run.terms["join"] == 20.0
    # 3 steps with the same work and 12 until it is named; then as many as lose two admissions: each 1.25 s of 12.25 s.
    lost_s = 3 * 10.0 + (NAMED_AFTER - 3) * 1.25 + 40.0
    assert run.terms["extra_compute"] == pytest.approx(lost_s, abs=1.25)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replace_slow": True, "slow": SlowRate()}, "replace_slow has no effect: set slow.group_interval_s"),
        ({"replace_slow": True, "policy": "checkpoint_only"}, "replace_slow is simulated for the policy spare"),
        ({"replace_slow": True, "notice_s": 9.0}, "without reform_s and notice_s"),
        ({"replace_slow": True, "failures": FailureSpec(kind="group")}, "failures.kind system or trace, not group"),
        ({"evaluate_every": 5}, r"evaluate_every=5 and costs.evaluate_s=0.0 have an effect together alone"),
        ({"evaluate_every": -1}, "evaluate_every=-1 has to be 0 or more"),
        (
            {"evaluate_every": 5, "costs": CostModel(compute_s=1.0, evaluate_s=1.0), "policy": "replication"},
            "evaluate_every is simulated for the policies spare and checkpoint_only",
        ),
    ],
)
def test_what_is_not_simulated_or_has_no_effect_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(SCENARIO, **changes)


def test_losses_beside_slow_groups_leave_a_valid_journal_that_repeats() -> None:
    failures = replace(SCENARIO.failures, kind="system", mean_s=2000.0)
    scenario = replace(SCENARIO, num_groups=7, num_steps=300, failures=failures, repair_s=500.0)
    journals: list[list[Line]] = [[], []]
    for journal in journals:
        simulate(scenario, 3, journal=journal.append)
    assert journals[0] == journals[1]
    assert len(journals[0]) > 1000


@pytest.mark.parametrize("policy", ["spare", "checkpoint_only", "replication"])
def test_a_slow_link_lengthens_the_sum_for_all_groups(policy: SimulatedPolicy) -> None:
    """Shares of time weigh steps per second, so the mean step is harmonic."""
    spec = SlowRate(group_interval_s=10_000.0, duration_s=400.0, factor=3.0)
    costs = CostModel(compute_s=10.0, reduce_s=5.0)
    scenario = replace(SCENARIO, slow=SlowRate(), slow_links=spec, costs=costs, policy=policy, redundancy=4)
    compute_s = 10.0 * (4 if policy == "replication" else 1)
    quiet_s, slow_s, none_slow = compute_s + 5.0, compute_s + 15.0, (1 - spec.share) ** 40
    mean_s = 1 / (none_slow / quiet_s + (1 - none_slow) / slow_s)
    found = simulate(scenario, 0)
    assert found.end_s / scenario.num_steps == pytest.approx(mean_s, rel=0.03)


def test_only_links_of_groups_that_take_part_count() -> None:
    spec = SlowRate(group_interval_s=1.0, duration_s=1e12, factor=3.0)  # all links, soon
    world = World(replace(SCENARIO, slow=SlowRate(), slow_links=spec), 0)
    assert world.reduce_s([GroupId(0)]) == 1.0
    world.ledger.spend("compute", 1.0)
    slow = [group for group in range(40) if world.reduce_s([GroupId(group)]) == 3.0]
    assert 0 < len(slow) < 40
    assert world.reduce_s([GroupId(group) for group in range(40) if group not in slow]) == 1.0
    assert world.reduce_s([GroupId(group) for group in range(40)]) == 3.0


@pytest.mark.parametrize(("num_slow", "factor"), [(0, 2.0), (1, 2.0), (3, 1.5), (5, 1.1), (8, 4.0)])
def test_the_least_makespan_is_that_of_all_ends(num_slow: int, factor: float) -> None:
    ends = sorted({i * pace for pace in (1.0, factor) for i in range(1, 200)})
    least = next(
        end for end in ends if (8 - num_slow) * int(end + 1e-9) + num_slow * int(end / factor + 1e-9) >= 8 * 16
    )
    assert dealt_stacks(8, 16, num_slow, factor) == pytest.approx(least / 16)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy": "replication"}, "is simulated for the policies spare and checkpoint_only"),
        ({"costs": CostModel(compute_s=1.0, full_speed_groups=2.0)}, "needs groups with processors of their own"),
    ],
)
def test_what_does_not_go_with_slow_groups_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(SCENARIO, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["group_interval_s", "duration_s", "factor"])
def test_values_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1.0 of slow groups or links has to be above 0"):
        SlowRate(**{name: -1.0})


def stepped(loads: IntArray, num_microbatches: int, costs: CostModel, tick: float = 1e-3) -> list[float]:
    """Every group that is not done gets the same rate, at most 1, in every tick."""
    fill = costs.pipeline_fill
    left = [(load + fill) / (num_microbatches + fill) if load else 0.0 for load in loads]
    done = [0.0] * len(left)
    now = 0.0
    while any(part > 0 for part in left):
        active = [index for index, part in enumerate(left) if part > 0]
        rate = min(1.0, costs.full_speed_groups / len(active))
        now += tick
        for index in active:
            left[index] -= rate * tick
            if left[index] <= 0:
                done[index] = now
    return done


@pytest.mark.parametrize("seed", range(12))
def test_finish_times_are_those_of_small_steps_of_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 9, size=int(rng.integers(1, 7)))
    groups = [inf, 0.5, 1.0, 1.4, 3.0][seed % 5]
    costs = CostModel(compute_s=1.0, pipeline_fill=float(rng.choice([0.0, 0.5, 3.0])), full_speed_groups=groups)
    assert finish_times(loads, 4, costs).tolist() == pytest.approx(stepped(loads, 4, costs), abs=0.02)


def test_the_last_group_to_finish_is_what_work_takes() -> None:
    work = Work(np.array([[0, 0, 0, 1], [1, 1, 1, 1]], dtype=np.int32))
    for groups in (inf, 2.0, 1.0):
        costs = CostModel(compute_s=1.0, pipeline_fill=1.0, full_speed_groups=groups)
        assert stacks_of(work, 4, costs) == pytest.approx(finish_times(work.loads, 4, costs).max())
    assert stacks_of(Work(np.full((2, 4), -1, dtype=np.int32)), 4, costs) == 0.0


def test_groups_slow_each_other_down_only_beyond_the_processors() -> None:
    costs = CostModel(compute_s=1.0, full_speed_groups=2.0)
    assert [stretch(n, costs) for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    assert stretch(1000, CostModel(compute_s=1.0)) == 1.0


def test_a_setting_in_which_no_group_computes_at_full_speed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"costs.full_speed_groups=0.0 has to be above 0"):
        CostModel(compute_s=1.0, full_speed_groups=0.0)
    with pytest.raises(ValueError, match=r"costs.rebuild_s=inf has to be 0 or more, and finite"):
        CostModel(compute_s=1.0, rebuild_s=inf)


def test_what_paces_add_to_processor_time_is_no_drift() -> None:
    num_steps = BLOCK_STEPS * (2 * 5 + 3) + 1
    blocks = [step // BLOCK_STEPS for step in range(num_steps)]
    spent_s = [1.0 + 0.01 * block + (0.5 if block % 2 else 0.0) for block in blocks]
    used = dict(enumerate(np.cumsum([0.0, *spent_s[:-1]]).tolist()))
    found = processor_price(dict.fromkeys(range(num_steps), 2.0), [used, used])
    assert found["added_processor_s"] == pytest.approx(0.5)
    assert found["added_processor_over_step"] == pytest.approx(0.25)
    assert found["ci95"] == pytest.approx(0.0, abs=1e-9)
