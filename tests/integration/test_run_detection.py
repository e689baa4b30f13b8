"""Ranks, nodes and a store that stop without dying: found, or waited for, and nothing lost."""

import dataclasses
import json
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, FaultConfig, LayoutConfig, RunConfig, WatchConfig
from spare_megatron.core.machines.failure_detector import SHORT_STOP_S
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import AppendingFile
from spare_megatron.journal.records import CulpritRecord, FaultRecord, LossRecord
from spare_megatron.journal.spans import read_spans_of
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.journal.state.rank_paces import find_slowest
from spare_megatron.machine.network import why_no_slow_link
from spare_megatron.machine.processor_quota import why_no_quota
from spare_megatron.process.reports import RunEvent, StoreAway, StoreBack
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.rank import run_rank
from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    CALM_HEARTBEAT_S,
    HEARTBEAT_S,
    Run,
    alert_config,
    assert_masked,
    complete_run,
    fenced_groups,
    read_run,
)
from tests.unit.measured_run import valid_history

pytestmark = [pytest.mark.timeout(150), pytest.mark.alone]

LAYOUT = LayoutConfig(num_groups=4, pipeline_parallel=2)
STEPS = 5
SLACK_S = 10.0
"""For a machine that is slow, or busy with other things. Every timeout that would find the fault, too, is longer."""
AWAY_S = 10 * HEARTBEAT_S
"""Of a node that comes back: it is missed before that also where the store was slow meanwhile, and once more."""

PAUSE_S = 3.0
"""Twice the longest time that a rank may stand still in what it usually does at once."""
NO_QUOTA, NO_SLOW_LINK = why_no_quota(), why_no_slow_link()
HANGS = "no progress|no heartbeat"
"""On a busy machine the beats of who hangs may be late, too."""


def faulty(
    corpus: Path, faults: Sequence[FaultConfig], num_nodes: int = 1, *, isolate: bool = False, **more: Any
) -> RunConfig:
    cluster = ClusterConfig(device="cpu", num_nodes=num_nodes, isolate_nodes=isolate)
    return alert_config(corpus, LAYOUT, steps=STEPS, faults=faults, cluster=cluster, **more)


def at(phase: FaultPoint, kind: str, group: int = 1, *, step: int = 2, rank: int = 0, **more: Any) -> FaultConfig:
    return FaultConfig(phase=phase, kind=kind, step=step, group=group, rank=rank, **more)


def found_after_s(run: Run, group: int) -> float:
    """Seconds from the fault to the fence."""
    struck = [line.at_s for line in run.journal.lines if isinstance(line.record, FaultRecord)]
    fenced = [
        line.at_s for line in run.journal.lines if isinstance(line.record, LossRecord) and line.record.group == group
    ]
    return min(fenced) - min(struck)


@pytest.mark.parametrize(
    ("kind", "phase", "cause"),
    [
        ("stop", FaultPoint.IN_REDUCE, "stopped"),
        ("hang", FaultPoint.RECEIVE, HANGS),
    ],
)
def test_a_rank_that_stands_still_is_found_within_two_heartbeats_and_masked(
    text_corpus: Path, tmp_path: Path, kind: str, phase: FaultPoint, cause: str
) -> None:
    heartbeat_s = CALM_HEARTBEAT_S if kind == "stop" else HEARTBEAT_S  # so that it is not found by its silence
    config = faulty(text_corpus, [at(phase, kind, rank=1)], heartbeat_s=heartbeat_s)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(STEPS))))
    assert_masked(run)
    assert_exact(run, range(STEPS))
    assert found_after_s(run, 1) <= 2 * HEARTBEAT_S + SLACK_S
    (loss,) = run.journal.of(LossRecord)
    assert (loss.group, loss.rank) == (1, 1)
    assert re.search(cause, loss.cause)
    assert {pending["rank"]: pending["step"] for pending in loss.pending}[1] == 2


@pytest.mark.parametrize(
    "fault",
    [
        at(FaultPoint.FORWARD, "stop", seconds=SHORT_STOP_S),
        at(FaultPoint.AFTER_REDUCE, "hang", seconds=0.4 * HEARTBEAT_S),
        at(FaultPoint.FORWARD, "slow", factor=4.0, seconds=SLACK_S),
        at(FaultPoint.FORWARD, "slow_data", factor=20.0),
        at(FaultPoint.FORWARD, "delay", seconds=0.4 * HEARTBEAT_S),
        at(FaultPoint.FORWARD, "clock_jump", seconds=-3600.0),
        at(FaultPoint.FORWARD, "disk_full", seconds=0.2),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_slow_but_honest_rank_is_waited_for(text_corpus: Path, tmp_path: Path, fault: FaultConfig) -> None:
    heartbeat_s = CALM_HEARTBEAT_S if fault.kind == "stop" else HEARTBEAT_S
    run = complete_run(faulty(text_corpus, [fault], heartbeat_s=heartbeat_s), tmp_path / "run")
    if fault.kind == "clock_jump":  # its records are an hour early
        assert run.summary.outcome == "finished"
        assert fenced_groups(run.journal) == set()
    else:
        assert_masked(run)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("slow_host", marks=pytest.mark.skipif(bool(NO_QUOTA), reason=NO_QUOTA)),
        pytest.param("slow_link", marks=pytest.mark.skipif(bool(NO_SLOW_LINK), reason=NO_SLOW_LINK)),
    ],
)
def test_a_node_with_little_of_its_processors_or_link_is_waited_for(
    text_corpus: Path, tmp_path: Path, kind: str
) -> None:
    fault = at(FaultPoint.FORWARD, kind, factor=16.0)
    config = faulty(text_corpus, [fault], num_nodes=4, isolate=kind == "slow_link", heartbeat_s=CALM_HEARTBEAT_S)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert fenced_groups(run.journal) == set()
    if kind == "slow_host":
        assert "waited in" in (run.run_dir / "logs" / "supervisor-1.log").read_text()


def test_a_rank_that_computes_slowly_is_distinguished_from_those_that_wait_for_it(
    text_corpus: Path, tmp_path: Path
) -> None:
    """And named, with its machine: in the journal, the report, and to the user's command."""
    num_steps, events_file = 80, tmp_path / "events"
    config = faulty(text_corpus, [at(FaultPoint.FORWARD, "slow", factor=8.0, step=0, rank=1)], num_nodes=4)
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=num_steps),
        watch=WatchConfig(on_event=("/bin/sh", "-c", f"cat >> {events_file}")),
    )
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert fenced_groups(run.journal) == set()
    history = valid_history(read_run_state(run.run_dir))
    assert history.paces.ratio.shape == (num_steps, 4, 2)
    culprit = run.journal.of(CulpritRecord)[0]
    assert (culprit.machine, culprit.cause, culprit.of_group, culprit.rank) == (1, "compute", 1, 1)
    events = [json.loads(f"{{{text}") for text in events_file.read_text().split("{")[1:]]
    assert [event["event"] for event in (events[0], events[-1])] == ["culprit", "end"]
    assert (events[0]["machine"], events[-1]["outcome"]) == (1, "finished")
    slowest = find_slowest(history.paces.ratio)
    assert slowest is not None
    assert (slowest.group, slowest.rank) == (1, 1)
    # Its neighbour in the pipeline waits as long as it is slow, and that does not count.
    assert slowest.ratio > 1.3 * slowest.next_ratio


@pytest.mark.parametrize("kind", ["stop_node", "kill_supervisor"])
def test_a_lost_node_costs_its_groups_and_nothing_else(text_corpus: Path, tmp_path: Path, kind: str) -> None:
    run = complete_run(faulty(text_corpus, [at(FaultPoint.BACKWARD, kind)], num_nodes=4), tmp_path / "run")
    assert_masked(run)
    assert fenced_groups(run.journal) == {1}
    assert found_after_s(run, 1) <= 2 * HEARTBEAT_S + SLACK_S
    assert all("node 1" in loss.cause for loss in run.journal.of(LossRecord))


def test_a_rank_on_another_node_than_its_leader_is_watched(text_corpus: Path, tmp_path: Path) -> None:
    """Its node receives the group's start, and of its steps, from the first of the group's ranks that it has.

    The last step ends only when a node without a leader has written down what its rank did around the loss.
    """
    config = faulty(text_corpus, [at(FaultPoint.BACKWARD, "stop", rank=1)], num_nodes=8, heartbeat_s=CALM_HEARTBEAT_S)
    last = STEPS + 1
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=last + 1))
    run = complete_run(config, tmp_path / "run", Watch(windows=frozenset({(last, 1)})))
    assert_masked(run)
    assert fenced_groups(run.journal) == {1}
    assert found_after_s(run, 1) <= 2 * HEARTBEAT_S + SLACK_S
    ((_, loss),) = valid_history(read_run_state(run.run_dir)).losses
    assert (loss.group, loss.rank) == (1, 1)
    assert "stopped" in loss.cause
    parts = read_spans_of(run.run_dir)
    before_the_end = next(part for part in parts if (part.group, part.rank) == (0, 1))
    assert {2, 3} < {span.step for span in before_the_end.spans}
    unfinished = {(part.group, part.rank) for part in parts for span in part.spans if span.name.startswith("lost in")}
    assert unfinished == {(1, 0), (1, 1)}


@pytest.mark.skipif(os.geteuid() != 0, reason="networks of their own need root")
@pytest.mark.parametrize("phase", [FaultPoint.FORWARD, FaultPoint.IN_REDUCE, FaultPoint.AFTER_VOTE])
def test_a_node_that_is_cut_off_for_a_while_costs_its_groups_and_nothing_else(
    text_corpus: Path, tmp_path: Path, phase: FaultPoint
) -> None:
    config = faulty(text_corpus, [at(phase, "cut", seconds=AWAY_S)], num_nodes=4, isolate=True)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(STEPS))))
    assert_masked(run)
    assert fenced_groups(run.journal) == {1}
    assert_exact(run, range(STEPS))


def test_a_node_that_wakes_up_finds_itself_fenced_and_changes_nothing(text_corpus: Path, tmp_path: Path) -> None:
    """Its groups hold the complete sum of the step and have not voted on it when they are stopped."""
    faults = [
        at(FaultPoint.AFTER_REDUCE, "stop_node", seconds=AWAY_S, step=1),
        at(
            FaultPoint.FORWARD, "delay", group=3, step=STEPS - 1, seconds=0.9 * HEARTBEAT_S
        ),  # so that it can wake up in time
    ]
    run = complete_run(faulty(text_corpus, faults, num_nodes=4, num_microbatches=8), tmp_path / "run")
    assert_masked(run)
    assert fenced_groups(run.journal) == {1}


def test_training_pauses_while_the_store_is_away(text_corpus: Path, tmp_path: Path) -> None:
    faults = [
        at(FaultPoint.AFTER_VOTE, "stop_store", seconds=3 * HEARTBEAT_S),
        at(
            FaultPoint.FORWARD, "delay", group=3, step=STEPS - 1, seconds=0.9 * HEARTBEAT_S
        ),  # the run outlasts the next look
    ]
    run = complete_run(faulty(text_corpus, faults), tmp_path / "run")
    assert_masked(run)
    assert fenced_groups(run.journal) == set()
    kinds = [type(event) for event in run.events if isinstance(event, StoreAway | StoreBack)]
    assert kinds[:2] == [StoreAway, StoreBack], "a busy machine may make it seem away once more"


@pytest.mark.parametrize(
    ("kind", "reason"), [("stop_store", "control.store_timeout_s"), ("kill_store", "control store died")]
)
def test_a_store_that_is_gone_for_good_ends_the_run(text_corpus: Path, tmp_path: Path, kind: str, reason: str) -> None:
    config = faulty(text_corpus, [at(FaultPoint.BEFORE_REDUCE, kind)])
    config = dataclasses.replace(config, control=dataclasses.replace(config.control, store_timeout_s=2.0))
    summary = start_run(config, tmp_path / "run", lambda _: None)
    assert summary.outcome == "failed"
    assert reason in summary.outcome_reason
    assert summary.groups_lost == 0
    assert summary.verdict == "unknown"
    assert multiprocessing.active_children() == []
    (path,) = all_checkpoints(tmp_path / "run" / "checkpoints")
    assert f"the state is in {path}, for checkpoint.load or --resume" in summary.outcome_reason
    assert path.name == f"step-{summary.steps_committed:08d}.state"
    names = [
        f"group-{group:04d}-rank-{rank}{end}" for group in (0, 1) for rank in (0, 1) for end in (".json", ".state")
    ]
    assert sorted(file.name for file in path.iterdir()) == names
    checkpoint = verify(path)
    assert sorted(checkpoint.manifest.files) == names[1:4:2], "those of one group are enough"


def pausing_rank(spec: RankSpec, reports: Connection) -> None:
    """A rank whose storage pauses once, as it does for all others, when step 2 is to be written down."""
    append = AppendingFile.append

    def append_late(file: AppendingFile, text: str) -> None:
        if '"record":"update"' in text and '"step":2' in text:
            (spec.run_dir / f"paused-{spec.group}").touch()
            time.sleep(PAUSE_S)
        append(file, text)

    AppendingFile.append = append_late  # type: ignore[method-assign]
    run_rank(spec, reports)


def test_a_pause_of_the_storage_of_all_groups_is_waited_for(text_corpus: Path, tmp_path: Path) -> None:
    """Every leader stands in the same write, for longer than a rank may stand still elsewhere."""
    config = alert_config(text_corpus, LayoutConfig(num_groups=3), steps=STEPS)
    config = dataclasses.replace(config, control=dataclasses.replace(config.control, heartbeat_interval_s=1.0))
    events: list[RunEvent] = []
    start_run(config, tmp_path / "run", events.append, rank_main=pausing_rank)
    run = read_run(config, tmp_path / "run", events)
    assert {path.name for path in run.run_dir.glob("paused-*")} == {"paused-0", "paused-1", "paused-2"}
    assert run.journal.of(LossRecord) == []
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
