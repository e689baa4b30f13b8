"""Simulated machines and groups: groups re-formed from machines, further groups, and groups that leave."""

from typing import Any

import numpy as np
import pytest

from spare_megatron.journal.files import Line
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.measured import in_order
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.scenario_presets import load_scenario
from spare_megatron.tools.simulate.sweep import VARIANTS, grid
from spare_megatron.tools.simulate.world import Result
from tests.unit.journal_in_memory import check_journal

NUM_GROUPS, SIZE, REFORM_S, TRANSFER_S = 9, 4, 10.0, 0.25


def scenario_with(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "reforming",
        "num_groups": NUM_GROUPS,
        "redundancy": 3,
        "microbatches_per_shard": 4,
        "costs": CostModel(compute_s=1.0, state_transfer_s=TRANSFER_S, restart_s=30.0),
        "machines_per_group": SIZE,
        "reform_s": REFORM_S,
    }
    return Scenario(**{**settings, **changes})


def loss_of(at_s: float, group: int, repair_s: float | None = None) -> Loss:
    return Loss(at_s=at_s, groups=(GroupId(group),), repair_s=repair_s)


def fleet_of(*losses: Loss, **changes: Any) -> Fleet:
    scenario = scenario_with(failures=FailureSpec(kind="trace", trace=losses), **changes)
    return Fleet(
        scenario, make_process(scenario.failures, NUM_GROUPS, np.random.default_rng(0)), np.random.default_rng(0)
    )


@pytest.mark.parametrize("num_spares", [0, 5])
@pytest.mark.parametrize("is_repaired", [False, True])
def test_missing_machines_cost_as_few_groups_as_their_number_allows(num_spares: int, *, is_repaired: bool) -> None:
    """Losses of random groups that are up, 100 s apart; repairs take up to 1500 s, all times end on other fractions."""
    rng = np.random.default_rng(num_spares)
    trace = [
        loss_of(100.0 * (number + 1), group, float(rng.integers(200, 1500)) + 0.5 if is_repaired else None)
        for number, group in enumerate(rng.integers(0, NUM_GROUPS, 60).tolist())
    ]
    fleet = fleet_of(*trace, num_spares=num_spares)
    back_at_s: list[float] = []  # of each machine that was lost
    num_short = 0
    for at_s in np.arange(50.0, 6100.0, 50.0).tolist():
        for loss in fleet.lose_until(at_s):
            back_at_s += [np.inf if loss.repair_s is None else loss.at_s + loss.repair_s for _ in loss.groups]
        if at_s % 100:  # 50 s after a loss; a group whose machine came back since may still be forming
            fleet.take_in(at_s, fleet.ready(at_s))
            left = [NUM_GROUPS * SIZE + num_spares - sum(back > t for back in back_at_s) for t in (at_s - 11.0, at_s)]
            allowed = {min(NUM_GROUPS, num // SIZE) for num in range(min(left), max(left) + 1)}
            assert int(fleet.is_up.sum()) in allowed
            num_short += max(allowed) < NUM_GROUPS
    assert num_short > 10
    assert len(back_at_s) > 20


def test_a_group_is_ready_once_it_is_formed_and_has_fetched_the_state() -> None:
    fleet = fleet_of(loss_of(100.0, 0), loss_of(200.0, 5), loss_of(300.0, 7, repair_s=1.0))
    fleet.lose_until(150.0)
    assert fleet.ready(1e9) == (), "no machine for group 0"
    fleet.lose_until(250.0)
    assert (fleet.ready(210.24), fleet.ready(210.25)) == ((), (GroupId(0),)), "a machine of group 5 moves to it"
    fleet.take_in(211.0, (GroupId(0),))
    fleet.lose_until(305.0)
    # Group 7 takes one of the two machines of group 5 that are left; the repaired one makes no other group whole.
    assert fleet.ready(1e9) == (GroupId(7),)


def test_a_repaired_machine_makes_a_group_whole_from_then_on() -> None:
    fleet = fleet_of(loss_of(100.0, 2, repair_s=20.0))
    fleet.lose_until(100.0)
    assert (fleet.ready(130.24), fleet.ready(130.25)) == ((), (GroupId(2),))


def test_machines_come_back_in_the_order_of_time_with_losses() -> None:
    """Readiness was not polled between the repair and the second loss, whose group has machines to give, too."""
    fleet = fleet_of(loss_of(100.0, 2, repair_s=20.0), loss_of(150.0, 5))
    fleet.lose_until(200.0)
    assert (fleet.ready(130.24), fleet.ready(130.25)) == ((), (GroupId(2),))


def test_a_restart_brings_back_all_machines_and_spares() -> None:
    fleet = fleet_of(loss_of(100.0, 2, repair_s=90.0), loss_of(150.0, 5), loss_of(300.0, 2), num_spares=1)
    fleet.lose_until(160.0)
    fleet.restart(160.0, 170.0)
    assert fleet.is_up.all()
    assert fleet.ready(250.0) == ()
    fleet.lose_until(300.0)
    assert fleet.ready(310.25) == (GroupId(2),), "by the spare"


@pytest.mark.parametrize("last_resort", [False, True])
def test_the_journal_of_a_run_with_re_formed_groups_is_valid(*, last_resort: bool) -> None:
    lines: list[Line] = []
    failures = FailureSpec(mean_s=12.0)
    scenario = scenario_with(failures=failures, num_steps=300, last_resort=last_resort, save_interval_s=50.0)
    result = simulate(scenario, 0, journal=lines.append)
    verdict = check_journal(in_order(lines))
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    assert result.losses > NUM_GROUPS - 1, "more machines are lost than groups could be"
    assert sum(result.terms.values()) == pytest.approx(result.end_s)


def test_training_waits_for_a_machine_that_is_repaired_sooner_than_a_restart_would_be_over() -> None:
    """No machine is left for group 4, the only host of its shard, until its own is back after 20 s."""
    failures = FailureSpec(kind="trace", trace=(loss_of(5.5, 4, repair_s=20.0),))
    times = {restart_s: CostModel(compute_s=1.0, restart_s=restart_s) for restart_s in (31.0, 29.0)}
    waited, restarted = (
        simulate(scenario_with(failures=failures, redundancy=1, num_steps=20, costs=costs, save_interval_s=3.0), 0)
        for costs in times.values()
    )
    assert (waited.pauses, waited.restarts, waited.end_s) == (1, 0, 5.5 + 20.0 + REFORM_S + 15.0)
    assert (restarted.pauses, restarted.restarts) == (0, 1)


def test_re_forming_keeps_groups_that_would_be_gone() -> None:
    costs = CostModel(compute_s=60.0, reduce_s=5.0, restart_s=600.0, save_s=1.0)
    failures = FailureSpec(mean_s=200.0)
    common: dict[str, Any] = {"costs": costs, "failures": failures, "num_groups": 60, "num_steps": 600}
    formed = simulate(scenario_with(**common, machines_per_group=50), 0)
    alone = simulate(scenario_with(**common, machines_per_group=1, reform_s=None), 0)
    assert formed.losses > 150
    assert formed.mean_down < 5 < alone.mean_down
    assert formed.time_to_train_ratio < alone.time_to_train_ratio - 0.1


def test_detection_and_rebuild_are_charged_unless_the_scenario_says_what_they_take() -> None:
    flags = {"reform_s": 60.0, "machines_per_group": 4}
    charged = load_scenario("paper_n200", flags).costs
    assert (charged.detect_s, charged.rebuild_s) == (2.0, 2.0)
    assert load_scenario("paper_n200", {**flags, "costs.detect_s": 0.5}).costs.detect_s == 0.5
    assert load_scenario("paper_n200").costs.detect_s == 0.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reform_s": None}, "machines_per_group=4 is never used: set reform_s"),
        ({"machines_per_group": 0}, "machines_per_group=0 has to be 1 or more"),
        ({"reform_s": -1.0}, "reform_s=-1.0 has to be 0 or more"),
        ({"policy": "replication"}, "reform_s=10.0 belongs to the policy spare"),
        ({"failures": FailureSpec(kind="node", nodes_per_group=4)}, "reform_s=10.0 is simulated for failures.kind"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        scenario_with(**changes)


def test_policies_that_cannot_re_form_are_compared_without() -> None:
    scenarios = grid(scenario_with(last_resort=True), VARIANTS, (3,))
    assert [(one.policy, one.reform_s is None, one.last_resort) for one in scenarios] == [
        ("checkpoint_only", True, False),
        ("replication", True, False),
        ("spare", False, False),
        ("spare", False, True),
    ]


COSTS = CostModel(compute_s=8.0, reduce_s=1.0, detect_s=2.0, rebuild_s=3.0, agree_s=0.5, join_s=0.25, restart_s=500.0)


def growing_with(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "growing",
        "num_groups": 8,
        "redundancy": 3,
        "microbatches_per_shard": 8,
        "num_steps": 12,
        "costs": COSTS,
        "last_resort": True,
    }
    return Scenario(**{**settings, **changes})


def losses_at(*losses: tuple[float, int], repair_s: float | None = None) -> FailureSpec:
    trace = tuple(Loss(at_s=at_s, groups=(GroupId(group),), repair_s=repair_s) for at_s, group in losses)
    return FailureSpec(kind="trace", trace=trace)


def run_with(**changes: Any) -> Result:
    """A run whose journal is valid."""
    lines: list[Line] = []
    run = simulate(growing_with(**changes), 0, journal=lines.append)
    verdict = check_journal(in_order(lines))
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    assert sum(run.terms.values()) == pytest.approx(run.end_s)
    return run


def test_further_groups_share_the_work_once_the_first_step_is_committed() -> None:
    alone, grown = run_with(), run_with(further_groups=3)
    assert alone.end_s == 12 * 9.0
    # 64 microbatches of 1 s over 8 groups, then over 11: the most that one computes is 6.
    assert grown.end_s == 9.0 + 0.25 + 11 * (6.0 + 1.0)
    assert grown.losses == 0


def test_a_further_group_takes_the_place_of_a_lost_one() -> None:
    lost = run_with(further_groups=1, failures=losses_at((30.0, 2)))
    # Nine groups still have a largest load of 8; the loss costs a patch of 1 s while a communicator is built in 3 s.
    loss_s = 2.0 + 0.5 + 2.5
    assert lost.end_s == pytest.approx(12 * 9.0 + 0.25 + loss_s, abs=3.0)
    assert lost.terms["extra_compute"] == 0, "eight groups are left for eight shards"


def test_a_group_with_notice_leaves_at_a_commit_and_its_loss_costs_no_patch() -> None:
    sudden = run_with(failures=losses_at((30.0, 2)))
    noticed = run_with(failures=losses_at((30.0, 2)), notice_s=20.0)
    assert (sudden.drains, sudden.losses, noticed.drains, noticed.losses) == (0, 1, 1, 1)
    assert all(sudden.terms[cause] > 0 for cause in ("patch", "agree"))
    assert all(noticed.terms[cause] == 0 for cause in ("patch", "detect", "agree", "rework"))
    # It leaves with the commit at 18 s, the first after the notice, and the others build a communicator in 3 s. The
    # ten steps that are left have 64 microbatches for seven groups.
    assert noticed.end_s == 2 * 9.0 + 3.0 + 10 * (10.0 + 1.0)


def test_a_notice_that_comes_too_late_for_a_commit_changes_nothing() -> None:
    sudden, late = (run_with(failures=losses_at((26.0, 2)), notice_s=notice_s) for notice_s in (0.0, 7.5))
    assert (late.drains, late.terms) == (0, sudden.terms)


def test_no_group_leaves_that_is_the_last_host_of_a_shard() -> None:
    hosts_only: dict[str, Any] = {"last_resort": False, "redundancy": 1, "save_interval_s": 5.0}
    run = run_with(failures=losses_at((30.0, 2)), notice_s=20.0, **hosts_only)
    assert (run.drains, run.restarts) == (0, 1)


def test_a_group_that_left_comes_back_once_it_is_repaired() -> None:
    run = run_with(failures=losses_at((30.0, 2), (70.0, 2), repair_s=5.0), notice_s=20.0)
    assert (run.drains, run.losses) == (2, 2)
    assert run.mean_down < 2


@pytest.mark.parametrize("reform_s", [None, 4.0])
def test_journals_of_random_losses_with_notice_and_further_groups_are_valid(reform_s: float | None) -> None:
    run = run_with(
        failures=FailureSpec(mean_s=40.0),
        notice_s=15.0,
        further_groups=2,
        num_steps=150,
        reform_s=reform_s,
        machines_per_group=1 if reform_s is None else 5,
        repair_s=60.0,
    )
    assert run.losses > run.drains > 10


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"further_groups": 1, "last_resort": False}, "further_groups=1 host no shard: set last_resort"),
        ({"further_groups": -1}, "further_groups=-1 has to be 0 or more"),
        ({"notice_s": -1.0}, "notice_s=-1.0 has to be 0 or more"),
        ({"notice_s": 9.0, "policy": "replication", "last_resort": False}, "notice_s=9.0 belongs to the policy spare"),
        ({"notice_s": 9.0, "failures": FailureSpec(kind="group")}, "notice_s=9.0 is simulated for failures.kind"),
    ],
)
def test_settings_of_growth_that_do_not_fit_together_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        growing_with(**changes)
