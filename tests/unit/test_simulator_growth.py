"""Groups beyond the shards, and groups that leave before they are lost: the simulator against counts by hand."""

from typing import Any

import pytest

from spare_megatron.journal.files import Line
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.measured import in_order
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.world import Result
from tests.unit.journal_in_memory import check_journal

COSTS = CostModel(compute_s=8.0, reduce_s=1.0, detect_s=2.0, rebuild_s=3.0, agree_s=0.5, join_s=0.25, restart_s=500.0)


def scenario_with(**changes: Any) -> Scenario:
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
    run = simulate(scenario_with(**changes), 0, journal=lines.append)
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
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        scenario_with(**changes)
