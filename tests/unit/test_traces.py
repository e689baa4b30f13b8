"""Traces of machines: read, merged, imported from others' records, and simulated."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import Line
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.measured import in_order
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.trace_imports import faults_in
from spare_megatron.tools.simulate.traces import end_of, machines_away, merged, read_trace
from tests.unit.journal_in_memory import check_journal

NUM_GROUPS, SIZE = 6, 3


def away(machine: str, at_s: float, repair_s: float | None) -> Loss:
    return Loss(at_s=at_s, groups=(), machine=machine, repair_s=repair_s)


def drawn_losses(rng: np.random.Generator, num: int, num_machines: int, mean_s: float) -> list[Loss]:
    """At whole seconds from 1 to 2000, so that a grid of seconds has all of it; some overlap."""
    return [
        away(f"node-{rng.integers(num_machines)}", float(rng.integers(1, 2000)), float(rng.integers(0, 2 * mean_s)))
        for _ in range(num)
    ]


def is_away(losses: list[Loss]) -> dict[str, np.ndarray]:
    """For each machine and second whether it is away between this second and the next, fault by fault."""
    found = {loss.machine or "": np.zeros(2600, dtype=bool) for loss in losses}
    for loss in losses:
        found[loss.machine or ""][int(loss.at_s) : int(end_of(loss))] = True
    return found


def scenario_with(losses: list[Loss], **changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "traced",
        "num_groups": NUM_GROUPS,
        "redundancy": 3,
        "microbatches_per_shard": 8,
        "costs": CostModel(compute_s=1.0, restart_s=30.0),
        "machines_per_group": SIZE,
        "reform_s": 0.0,
        "failures": FailureSpec(kind="trace", trace=merged(losses)),
    }
    return Scenario(**{**settings, **changes})


def fleet_of(losses: list[Loss], seed: int = 0, **changes: Any) -> Fleet:
    scenario = scenario_with(losses, **changes)
    rng = np.random.default_rng(seed)
    return Fleet(scenario, make_process(scenario.failures, NUM_GROUPS, rng), rng)


@pytest.mark.parametrize("seed", range(5))
def test_merged_losses_are_those_of_a_grid_of_seconds(seed: int) -> None:
    losses = drawn_losses(np.random.default_rng(seed), 150, 12, 40.0)
    one_by_one = is_away(losses)
    found = merged(losses)
    assert [loss.at_s for loss in found] == sorted(loss.at_s for loss in found)
    assert len(found) < len(losses), "some overlap"
    together = is_away(list(found))
    for machine, seconds in one_by_one.items():
        assert (together[machine] == seconds).all()
        assert sum(loss.repair_s or 0.0 for loss in found if loss.machine == machine) == seconds.sum()
    counts = np.sum(list(one_by_one.values()), axis=0)
    mean, most = machines_away(found)
    assert most == counts.max()
    assert mean == pytest.approx(counts.sum() / max(map(end_of, losses)))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(5.0, None), (5.0, None)], None),
        ([(5.0, None), (5.0, 3.0)], 3.0),
        ([(5.0, 10.0), (7.0, None)], 10.0),
        ([(5.0, 10.0), (15.0, None)], None),
        ([(5.0, 0.0), (5.0, None)], None),
    ],
)
def test_an_end_that_is_not_known_is_not_made_one(
    losses: list[tuple[float, float | None]], expected: float | None
) -> None:
    (found,) = merged(away("a", at_s, repair_s) for at_s, repair_s in losses)
    assert (found.at_s, found.repair_s) == (5.0, expected)


def test_a_file_of_losses_is_read_in_the_order_of_time_and_merged(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("seconds,machine,repair_s,cause\n9,b,,fan\n2,a,5,gpu\n6.5,a,1.5,\n8.5,a,1,\n")
    found = [(loss.at_s, loss.machine, loss.repair_s, loss.cause) for loss in read_trace(tmp_path / "trace.csv")]
    assert found == [(2.0, "a", 6.0, "gpu"), (8.5, "a", 1.0, "simulated"), (9.0, "b", None, "fan")]


@pytest.mark.parametrize("num_spares", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_as_many_groups_are_whole_as_machines_are_there(num_spares: int, seed: int) -> None:
    """Of machines in whole and in broken groups, and of spares, which are lost as well, 18 or 20 in all."""
    losses = drawn_losses(np.random.default_rng(seed), 120, NUM_GROUPS * SIZE + num_spares, 120.0)
    counts = np.sum(list(is_away(losses).values()), axis=0)
    fleet = fleet_of(losses, seed, num_spares=num_spares)
    numbers_up = set()
    for second in range(2500):
        fleet.lose_until(second + 0.5)
        fleet.take_in(second + 0.5, fleet.ready(second + 0.5))
        num_whole = min(NUM_GROUPS, (NUM_GROUPS * SIZE + num_spares - int(counts[second])) // SIZE)
        assert int(fleet.is_up.sum()) == num_whole, second
        numbers_up.add(num_whole)
    assert len(numbers_up) > 2
    assert fleet.num_lost < len(merged(losses)), "some were idle or in broken groups"


def test_a_smaller_group_has_the_machines_that_are_there() -> None:
    losses = drawn_losses(np.random.default_rng(7), 60, NUM_GROUPS * SIZE, 100.0)
    counts = np.sum(list(is_away(losses).values()), axis=0)
    fleet = fleet_of(losses, least_machines=1)
    num_smaller = 0
    for second in range(2500):
        fleet.lose_until(second + 0.2)
        fleet.take_in(second + 0.3, fleet.ready(second + 0.3))
        fleet.drain(second + 0.4, fleet.noticed(second + 0.4))
        fleet.take_in(second + 0.5, fleet.ready(second + 0.5))
        machines = np.rint(SIZE / fleet.paces[fleet.is_up]).sum()
        assert machines == NUM_GROUPS * SIZE - int(counts[second]), second
        num_smaller += bool((fleet.paces[fleet.is_up] > 1).any())
    assert num_smaller > 100


def test_a_group_whose_machine_is_lost_before_it_is_admitted_is_not_ready() -> None:
    """All machines of the only group are named, so that one is lost while the group forms anew."""
    fleet = fleet_of(
        [away("a", 10.0, 5.0), away("b", 16.0, 20.0), away("c", 17.0, 0.0)], num_groups=1, redundancy=1, reform_s=10.0
    )
    fleet.lose_until(16.0)
    assert fleet.ready(30.0) == (), "whole from 15 s on, and broken again at 16 s"
    fleet.lose_until(20.0)
    assert (fleet.ready(45.9), fleet.ready(46.0)) == ((), (GroupId(0),))


def test_a_group_whose_machine_is_lost_while_it_is_admitted_is_lost_again() -> None:
    """Ready at 25 s and admitted at 35 s: the loss of a group in that time does not take it, as it takes no part."""
    alone = Loss(at_s=30.0, groups=(GroupId(0),))
    fleet = fleet_of([away("a", 10.0, 5.0), alone, away("a", 31.0, 5.0)], num_groups=1, redundancy=1, reform_s=10.0)
    fleet.lose_until(25.0)
    assert [(loss.at_s, loss.groups) for loss in fleet.take_in(35.0, fleet.ready(25.0))] == [(30.0, ()), (31.0, (0,))]
    assert (fleet.ready(45.9), fleet.ready(46.0)) == ((), (GroupId(0),))
    assert not fleet.is_up.any()
    assert (fleet.max_down, fleet.mean_down(40.0, 0.0)) == (1, 30.0 / 40.0)


def test_machines_that_are_away_at_the_end_of_a_restart_are_lost_again() -> None:
    """One of four is back by then, and so is one that was lost during the restart; later losses come at their times."""
    losses = [away("a", 10.0, 500.0), away("b", 20.0, 15.0), away("c", 35.0, 4.0), away("d", 38.0, 10.0)]
    fleet = fleet_of([*losses, away("e", 60.0, 1.0)])
    assert len(fleet.lose_until(21.0)) == 2
    fleet.restart(30.0, 40.0)
    again = fleet.lose_until(50.0)
    assert [(loss.machine, loss.at_s, loss.repair_s) for loss in again] == [("a", 40.0, 470.0), ("d", 40.0, 8.0)]
    assert fleet.next_loss_s == 60.0


def test_the_seed_draws_where_the_machines_of_a_trace_stand() -> None:
    hit = {fleet_of([away("a", 1.0, 1.0)], seed, num_spares=6).lose_until(1.0)[0].groups for seed in range(30)}
    assert () in hit, "a spare one"
    assert len(hit) > 3


SAVES = {"costs": CostModel(compute_s=1.0, restart_s=30.0, save_s=5.0), "save_interval_s": 5.0}
"""Groups wait for a save before they are admitted."""


@pytest.mark.parametrize("changes", [{}, {"least_machines": 1}, {"num_spares": 2, "last_resort": True}, SAVES])
def test_journals_of_traced_runs_are_valid(changes: dict[str, Any]) -> None:
    losses = drawn_losses(np.random.default_rng(1), 100, 15, 60.0)
    lines: list[Line] = []
    result = simulate(scenario_with(losses, num_steps=1500, **changes), 0, journal=lines.append)
    verdict = check_journal(in_order(lines))
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    assert result.losses > 20


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reform_s": None, "machines_per_group": 1, "num_groups": 20}, "set reform_s, and notice_s to 0"),
        ({"notice_s": 5.0}, "the trace names machines, as node-0: set reform_s, and notice_s to 0"),
        ({"num_groups": 4}, "the trace names 15 machines, but groups and num_spares have 12"),
    ],
)
def test_scenarios_that_do_not_fit_a_trace_of_machines_are_refused(changes: dict[str, Any], text: str) -> None:
    losses = [away(f"node-{number}", 1.0, 1.0) for number in range(15)]
    with pytest.raises(ValueError, match=text):
        scenario_with(losses, **changes)


def test_the_planned_time_between_saves_knows_the_repairs_of_a_trace() -> None:
    spec = FailureSpec(kind="trace", trace=(away("a", 10.0, 30.0), away("b", 20.0, 10.0), away("b", 40.0, None)))
    assert spec.mean_interval_s(6) == 40.0 / 3
    assert (spec.mean_repair_s(5.0), spec.mean_repair_s(None)) == (15.0, None)


# ------------------------------------------------------------------------------------------------ files

EVENTS = """Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User
one||2026-01-01T00:00:00|Unknown||Cluster Registered TRES|
one|gpu-1|2026-01-01T02:00:00|2026-01-01T03:30:00|DOWN*|Not responding|slurm(64030)
one|gpu-2|2026-01-01T02:00:00|2026-01-01T02:10:00|DRNG|ECC errors|root(0)
one|gpu-2|2026-01-01T02:10:00|Unknown|DRAIN|ECC errors|root(0)
one|gpu-1|2026-01-01T01:00:00|2026-01-01T01:00:01|DOWN||root(0)
"""
JOBS = """JobID|State|End|FailedNode
7|NODE_FAIL|2026-01-02T00:00:10|gpu-3
7.batch|NODE_FAIL|2026-01-02T00:00:10|
8|COMPLETED|2026-01-03T00:00:00|
9|NODE_FAIL|2026-01-02T00:01:00|gpu-1
10|REQUEUED|2026-01-02T00:02:00|gpu-1
"""
HBD = """"node",start_day,end_day,level,class
0,1.5,2.5,Hardware Failure,GPU
0,2.0,2.25,Software Failure,"Driver, old"
17,3,3,Other Failure,Stress Test Failure
"""


def kubernetes_event(node: str, reason: str, first: str, last: str | None = None) -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {"name": f"{node}.17f"},
        "involvedObject": {"kind": "Node", "name": node},
        "reason": reason,
        "firstTimestamp": f"2026-01-01T{first}Z",
        "lastTimestamp": None if last is None else f"2026-01-01T{last}Z",
    }


NODE_EVENTS = [
    kubernetes_event("a", "NodeReady", "10:01:00", "10:06:00"),
    kubernetes_event("a", "NodeNotReady", "10:00:00", "10:05:00"),
    kubernetes_event("a", "NodeNotReady", "10:00:30"),
    kubernetes_event("b", "NodeNotSchedulable", "09:00:00"),
    kubernetes_event("b", "NodeReady", "09:30:00"),
    {
        **kubernetes_event("b", "NodeNotReady", "11:00:00"),
        "firstTimestamp": None,
        "eventTime": "2026-01-01T11:00:00.5Z",
    },
    {**kubernetes_event("a", "NodeNotReady", "09:00:00"), "involvedObject": {"kind": "Pod", "name": "a"}},
]
OF_NODES = [("a", 0.0, 60.0), ("a", 300.0, 60.0), ("b", 3600.5, None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HBD, [("0", 129_600.0, 86_400.0), ("0", 172_800.0, 21_600.0), ("17", 259_200.0, 0.0)]),
        (EVENTS, [("gpu-1", 0.0, 1.0), ("gpu-1", 3600.0, 5400.0), ("gpu-2", 4200.0, None)]),
        (JOBS, [("gpu-3", 0.0, None), ("gpu-1", 50.0, None)]),
        (json.dumps({"kind": "List", "items": NODE_EVENTS}, indent=2), OF_NODES),
        ("\n".join(map(json.dumps, NODE_EVENTS)), OF_NODES),
    ],
)
def test_records_of_others_are_imported(
    text: str, expected: list[tuple[str, float, float | None]], tmp_path: Path
) -> None:
    (tmp_path / "records").write_text(text)
    found = sorted(faults_in(tmp_path / "records"), key=lambda fault: fault.at_s)
    assert [(fault.machine, fault.at_s, fault.repair_s) for fault in found] == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"records:1: '' has the columns of no known table"),
        ("node,start_day\n1,2\n", r"records:1: 'node,start_day' has the columns of no known table: node,start_day,"),
        (HBD + "5,soon,4,A,B\n", r"records:5: start_day='soon' has to be a number of 0 or more"),
        (HBD + "5,2,1,A,B\n", r"records:5: the fault of 5 has no beginning, or one after its end"),
        (HBD + "5,2,1,A,B,C\n", r"records:5: \['C'\] is more than the head has columns"),
        (EVENTS.replace("2026-01-01T03:30:00", "later"), r"records:3: TimeEnd='later' is no time as"),
        (EVENTS.replace("gpu-2", "gpu-[2-4]"), r"records:5: 'gpu-\[2-4\]' has to name one machine"),
        (JOBS.replace("2026-01-02T00:01:00", "Unknown"), r"records:5: the fault of gpu-1 has no beginning"),
        ('{"kind": "Event"}\n{"kind"', r"records:2: not valid JSON"),
        ('{"kind": "Event"}\n5', r"records:2: no JSON object"),
        ('{"items": null}', r"records:1: items=None has to be a list of JSON objects"),
        ('{"items": [7]}', r"records:1: items=\[7\] has to be a list of JSON objects"),
        ('{"involvedObject": 7}', r"records:1: the object of an event is 7, no JSON object"),
        (
            json.dumps(NODE_EVENTS[0]).replace("10:01", "10-01"),
            r"records:1: firstTimestamp='2026-01-01T10-01:00Z' is no",
        ),
    ],
)
def test_records_that_cannot_be_read_are_refused_with_file_line_and_value(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "records").write_text(text)
    with pytest.raises(ValueError, match=problem):
        faults_in(tmp_path / "records")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seconds,machine\n1,a\n2,\n", r"trace.csv:3: .* is no loss with seconds,machine"),
        ("seconds,machine,group\n1,a,5\n", r"trace.csv:2: .* is no loss with"),
        ("machine\na\n", r"trace.csv:2: .* is no loss with"),
        ("seconds,machine,repair_s\n1,a,-3\n", r"trace.csv:2: repair_s='-3' has to be a number of 0 or more"),
        ("seconds,machine\nnan,a\n", r"trace.csv:2: seconds='nan' has to be"),
        ("seconds,group\n1,-2\n", r"trace.csv:2: .* is no loss with"),
    ],
)
def test_traces_that_cannot_be_read_are_refused_with_file_line_and_value(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_trace(tmp_path / "trace.csv")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"cannot read the trace .*trace.csv: 'utf-8' codec"):
        read_trace(tmp_path / "trace.csv")


def spare(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def test_an_imported_trace_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "hbd.csv").write_text(HBD)
    done = spare("import-trace", tmp_path / "hbd.csv", "--out", tmp_path / "all.csv")
    assert done.exit_code == 0, done.output
    assert "2 absences of 2 machines in 3 d: 0.3 machines away on average, 1 at most; trace in" in done.stdout
    with (tmp_path / "all.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["seconds", "machine", "repair_s", "cause"],
            ["129600.0", "0", "86400.0", "Hardware Failure: GPU"],
            ["259200.0", "17", "0.0", "Other Failure: Stress Test Failure"],
        ]
    (tmp_path / "jobs.txt").write_text(JOBS)
    done = spare("import-trace", tmp_path / "jobs.txt", "--out", tmp_path / "jobs.csv")
    assert "2 machines in 50 s: machines away not known, as the ends of 2 are not; trace in" in done.stdout
    done = spare("import-trace", tmp_path / "hbd.csv", "--out", tmp_path / "some.csv", "--ignore", "stress TEST")
    assert done.exit_code == 0, done.output
    assert "1 Other Failure: Stress Test Failure (ignored)" in done.stdout
    shown = {}
    for name in ("all", "some"):
        words = ["--preset", "trace_400", "--trace", tmp_path / f"{name}.csv", "--steps", 9000, "--seeds", 1, "--json"]
        settings = ["num_groups=3", "redundancy=2", "microbatches_per_shard=4", "num_spares=0", "machines_per_group=2"]
        done = spare("simulate", *words, "--jobs", 1, *(word for one in settings for word in ("--set", one)))
        assert done.exit_code == 0, done.output
        shown[name] = json.loads(done.stdout)
    assert (shown["all"]["losses"], shown["some"]["losses"]) == (2, 1)
    # One of three groups is away for a day of 3.5: each of the others has 6 microbatches in the place of 4.
    whole_s, day_s = 9000 * 33.2, 86_400.0
    expected = 1 + day_s * (1 - 33.2 / (6 / 4 * 32.5 + 0.7)) / whole_s
    assert shown["some"]["time_to_train_ratio"]["mean"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--ignore", "fire"), "--ignore fire: no fault has that cause; known: Hardware Failure: GPU, Software"),
        (("--ignore", "failure"), "holds no faults that stop a machine"),
    ],
)
def test_causes_that_leave_no_trace_are_refused(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    (tmp_path / "hbd.csv").write_text(HBD)
    done = spare("import-trace", tmp_path / "hbd.csv", "--out", tmp_path / "trace.csv", *words)
    assert done.exit_code == 2
    assert problem in done.output
    assert not (tmp_path / "trace.csv").exists()
