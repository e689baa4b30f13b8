"""Groups that go on with fewer machines: simulated steps against drawn cases, and against the closed forms."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.core.log.entries import Commit
from spare_megatron.journal.files import Line
from spare_megatron.journal.records import EntryRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.overhead import StepTimes, least_makespans
from spare_megatron.tools.plan.plan import predict
from spare_megatron.tools.plan.reforming_costs import ReformTimes
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.measured import in_order, read_steps
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import check_journal

WHOLE_ALONE = {(4, 4): [1.375] * 4, (8, 4): [1.188] * 4, (16, 8): [1.125] * 4, (64, 8): [1.062] * 4}
SMALLER = {
    (4, 4): [1.083, 1.167, 1.250, 1.333],
    (8, 4): [1.062, 1.083, 1.125, 1.167],
    (16, 8): [1.062] * 4,
    (64, 8): [1.062] * 4,
}
"""Groups and machines of each -> the step over that without losses after 1 to 4 groups lost a machine each, m = 16."""


def scenario_with(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "shapes",
        "num_groups": 4,
        "redundancy": 3,
        "microbatches_per_shard": 16,
        "num_steps": 100,
        "costs": CostModel(compute_s=1.0, restart_s=30.0),
        "machines_per_group": 4,
        "least_machines": 3,
        "reform_s": 0.0,
        "save_interval_s": float("inf"),
    }
    return Scenario(**{**settings, **changes})


def losses_of(*groups: int, repair_s: float | None = None) -> FailureSpec:
    """10 s apart."""
    losses = (
        Loss(at_s=5.5 + 10 * number, groups=(GroupId(group),), repair_s=repair_s) for number, group in enumerate(groups)
    )
    return FailureSpec(kind="trace", trace=tuple(losses))


@pytest.mark.parametrize("size", WHOLE_ALONE)
@pytest.mark.parametrize("num_lost", [1, 2, 3, 4])
def test_the_command_in_the_docs_gives_the_steps_of_the_table(
    size: tuple[int, int], num_lost: int, tmp_path: Path
) -> None:
    trace = tmp_path / "losses.csv"
    trace.write_text("seconds,group\n" + "".join(f"{1 + 1000 * group},{group}\n" for group in range(num_lost)))
    num_groups, machines = size
    options = [
        *("--preset", "paper_n200", "--granularity", "microbatch", "--redundancy", "3", "--steps", "1500"),
        *("--seeds", "1", "--reform", "60s", "--machines-per-group", str(machines), "--jobs", "1", "--json"),
    ]
    settings = [
        *(f"num_groups={num_groups}", "costs.reduce_s=0", "costs.jitter=0", "save_interval_s=inf"),
        *("failures.kind=trace", "failures.shape=1", f"failures.trace_file={trace}"),
    ]
    for least, table in ((machines, WHOLE_ALONE), (machines - 1, SMALLER)):
        given = [*options, "--least-machines", str(least), *(text for one in settings for text in ("--set", one))]
        result = CliRunner().invoke(app, ["simulate", *given])
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert (shown["losses"], shown["restarts"], shown["pauses"]) == (num_lost, 0, 0)
        assert shown["time_to_train_ratio"]["mean"] == pytest.approx(table[size][num_lost - 1], rel=0.01)


@pytest.mark.parametrize("size", SMALLER)
def test_the_planned_step_is_that_of_the_table(size: tuple[int, int]) -> None:
    planned = least_makespans(size[0], 16, np.arange(1.0, 5.0), size[1], size[1] - 1)
    assert planned.tolist() == pytest.approx(SMALLER[size], abs=6e-4)


@pytest.mark.parametrize(("num_groups", "machines", "loss_s"), [(4, 4, 7200.0), (8, 4, 3600.0), (16, 8, 1800.0)])
def test_the_planned_step_is_that_of_simulated_runs(num_groups: int, machines: int, loss_s: float) -> None:
    """With machines that are repaired, so that groups become smaller and whole again."""
    costs = {"reduce_s": 6.0, "save_s": 1.5, "restart_s": 3600.0, "join_s": 1.0}
    common: dict[str, Any] = {"machines_per_group": machines, "least_machines": machines - 1, "reform_s": 60.0}
    scenario = scenario_with(
        **{"num_groups": num_groups, "redundancy": min(4, num_groups), "num_steps": 2500, "repair_s": 3600.0, **common},
        costs=CostModel(compute_s=64.0, **costs),
        failures=FailureSpec(mean_s=loss_s),
        save_interval_s=1000.0,
    )
    run = simulate(scenario, 0)
    assert run.losses > 10
    facts = ClusterFacts(
        num_groups=num_groups,
        times=StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=loss_s),
        checkpoint=CheckpointTimes(save_s=1.5, restart_s=3600.0),
        num_microbatches=16,
        reform=ReformTimes(run_s=2500 * 70.0, repair_s=3600.0, join_s=1.0, **common),
    )
    simulated = run.availability * run.time_to_train_ratio
    planned = predict(facts, "reform", scenario.redundancy).stretch
    whole = predict(replace(facts, reform=replace(facts.reform, least_machines=None)), "reform", scenario.redundancy)
    print(f"\n{num_groups} x {machines}: {planned / simulated - 1:+.1%}")
    assert planned == pytest.approx(simulated, rel=0.015)
    assert whole.stretch > planned + 0.03


def test_a_shorter_pipeline_is_filled_in_fewer_rounds() -> None:
    """Of 12 layers: (17 + 3) x 3 in three groups of 4 stages, and (13 + 2) x 4 in that of 3, over (16 + 3) x 3."""
    costs = CostModel(compute_s=1.0, pipeline_fill=3.0)
    lines: list[Line] = []
    simulate(scenario_with(costs=costs, failures=losses_of(0)), 0, journal=lines.append)
    admitted = next(
        line.at_s for line in lines if isinstance(line.record, EntryRecord) and "stages" in line.record.entry
    )
    last = max(line.at_s for line in lines)
    num_steps = 100 - round(admitted) - 1
    assert num_steps > 80
    assert (last - admitted) / num_steps == pytest.approx(20 / 19, rel=0.02)


def fleet_of(failures: FailureSpec, **changes: Any) -> Fleet:
    scenario = scenario_with(failures=failures, **changes)
    return Fleet(
        scenario, make_process(failures, scenario.num_groups, np.random.default_rng(0)), np.random.default_rng(0)
    )


def test_a_repaired_machine_makes_the_smaller_group_leave_and_come_back_whole() -> None:
    fleet = fleet_of(losses_of(2, repair_s=100.0), reform_s=10.0)
    fleet.lose_until(6.0)
    assert fleet.ready(15.0) == ()
    assert fleet.ready(15.5) == (GroupId(2),)
    assert fleet.smaller == {GroupId(2): 3}
    fleet.take_in(16.0, (GroupId(2),))
    assert (fleet.paces.tolist(), fleet.noticed(105.0)) == ([1, 1, 4 / 3, 1], set())
    assert fleet.ready(105.6) == ()
    assert fleet.noticed(105.6) == {GroupId(2)}, "the repaired machine takes its empty place"
    fleet.drain(106.0, (GroupId(2),))
    assert (fleet.is_up.tolist(), fleet.num_drained) == ([True, True, False, True], 0)
    assert (fleet.ready(115.9), fleet.ready(116.0), fleet.smaller) == ((), (GroupId(2),), {})
    fleet.take_in(116.0, (GroupId(2),))
    assert (fleet.paces.tolist(), fleet.noticed(200.0)) == ([1] * 4, set())


def test_a_smaller_group_that_loses_a_machine_waits_for_those_of_others() -> None:
    """With two machines it is too small; with the three that the next group has left they make one whole group, and
    the last machine makes no further one.
    """
    fleet = fleet_of(losses_of(1, 1, 0))
    for at_s in (6.0, 16.0, 26.0):
        fleet.lose_until(at_s)
        fleet.take_in(at_s, fleet.ready(at_s))
    assert fleet.is_up.tolist() == [True, False, True, True]
    assert fleet.paces.tolist()[0] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"repair_s": 40.0, "num_spares": 1},
        {"repair_s": 60.0, "least_machines": 2, "costs": CostModel(compute_s=1.0, restart_s=30.0, pipeline_fill=3.0)},
        {"last_resort": True, "least_machines": 2},
    ],
)
def test_journals_of_random_losses_are_valid_and_name_the_stages(changes: dict[str, Any]) -> None:
    lines: list[Line] = []
    settings = {"num_groups": 6, "num_steps": 200, "reform_s": 5.0, "failures": FailureSpec(mean_s=20.0), **changes}
    result = simulate(scenario_with(**settings), 0, journal=lines.append)
    journal = in_order(lines)
    verdict = check_journal(journal)
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    named = [record.entry for record in journal.of(EntryRecord) if record.entry.get("stages")]
    assert named
    assert all(entry["entry"] == Commit.__name__.lower() for entry in named)
    assert result.losses >= 5
    assert read_steps(journal)[-1].step <= named[0]["step"], "costs are measured by whole groups alone"
    again: list[Line] = []
    simulate(scenario_with(**settings), 0, journal=again.append)
    assert again == lines


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"least_machines": 5}, "least_machines=5 has to be from 1 to machines_per_group=4"),
        ({"least_machines": 0}, "least_machines=0 has to be from 1 to machines_per_group=4"),
        ({"partition_redundancy": 2}, "least_machines cannot be with partition_redundancy"),
        ({"costs": CostModel(compute_s=1.0, full_speed_groups=2.0)}, "least_machines cannot be with"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        scenario_with(**changes)
