"""What a campaign came to: counted from hand-drawn journals; the processes it watched: real ones that grow and stay."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.cli.running import RunDirectory
from spare_megatron.commands import app
from spare_megatron.config.schema import FaultConfig, FaultsConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal, Line, encode_line
from spare_megatron.journal.records import EndRecord, EntryRecord, FaultRecord, Record, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import Goodput
from spare_megatron.journal.state.summary import Summary
from spare_megatron.process.reports import RanksStarted, StepCommitted
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.campaign import process_watch
from spare_megatron.tools.campaign.campaign_figures import CampaignFigures, FaultCount, campaign_figures
from spare_megatron.tools.campaign.process_watch import (
    MOST_GROWTH,
    Holdings,
    ProcessReport,
    ProcessWatch,
    growth_of,
    process_problems,
)
from tests.unit.journal_in_memory import summarize

WAIT_S = 60.0
NOTHING = Holdings(memory_bytes=0, threads=0, file_descriptors=0)


def planned(step: int, group: int, kind: str = "kill", phase: str = "forward") -> dict[str, Any]:
    return {"step": step, "group": group, "rank": 0, "phase": phase, "kind": kind, "costs": []}


def struck(fault: dict[str, Any]) -> FaultRecord:
    return FaultRecord(**{name: fault[name] for name in ("step", "group", "rank", "phase", "kind")})


def commit(index: int, step: int, attempt: int, group: int = 0, **more: Any) -> EntryRecord:
    entry = {"entry": "commit", "step": step, "attempt": attempt, **more}
    return EntryRecord(group=group, index=index, entry=entry)


def fence(index: int, group: int, incarnation: int = 0) -> EntryRecord:
    return EntryRecord(group=0, index=index, entry={"entry": "fence", "group": group, "incarnation": incarnation})


def journal_of(faults: list[dict[str, Any]], *records: tuple[float, Record], num_steps: int = 9) -> Journal:
    """A run of 3 groups that begins at 100 s."""
    run = RunRecord(
        name="test",
        num_groups=3,
        ranks_per_group=1,
        redundancy=3,
        microbatches_per_shard=1,
        num_steps=num_steps,
        placement="golomb",
        granularity="microbatch",
        reduce_mode="fast",
        faults=faults,
    )
    lines = [Line(source="test", at_s=at_s, record=record) for at_s, record in ((100.0, run), *records)]
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))


def goodput_of(journal: Journal) -> Goodput:
    goodput = figures_of(journal).goodput
    assert goodput is not None
    return goodput


def figures_of(journal: Journal) -> CampaignFigures:
    return campaign_figures(journal, summarize(journal))


PAUSE = planned(3, 2, "hang")
LATE_PAUSE = planned(3, 2, "hang", "after_commit")
END = EndRecord(outcome="finished", reason="")


# --------------------------------------------------------------------------------------------------------- goodput


def test_every_second_of_a_run_is_useful_or_has_a_cause() -> None:
    journal = journal_of(
        [PAUSE],
        (105.0, commit(0, 0, 0)),  # 5 s, of which 1 s is the step
        (106.0, commit(1, 1, 1)),
        (107.0, commit(2, 2, 2)),
        (107.5, struck(PAUSE)),
        (109.5, commit(3, 3, 3)),  # 2.5 s
        (110.0, fence(4, 1)),
        (112.0, commit(5, 4, 5)),  # 2.5 s
        (113.25, commit(6, 5, 6, admit=[[1, 1]])),  # 1.25 s
        (115.25, commit(7, 6, 7)),  # 2 s
        (116.25, commit(8, 7, 8)),
        (117.0, commit(9, 8, 9)),  # 0.75 s: faster than usual
        (119.0, END),
    )
    goodput = goodput_of(journal)
    assert goodput.step_s == 1.0
    assert goodput.wall_s == 19.0
    assert goodput.useful_s == 8.75
    assert goodput.goodput == 8.75 / 19.0
    assert goodput.longest_pause_s == 2.5
    assert goodput.lost_s == {
        "start": 4.0,
        "fault": 1.5,
        "recovery": 1.5,
        "fewer_groups": 0.25,
        "admission": 1.0,
        "scatter": 0.0,
        "end": 2.0,
    }
    assert goodput.useful_s + sum(goodput.lost_s.values()) == goodput.wall_s


def test_a_fault_after_the_commit_delays_the_next_step() -> None:
    commits = [(101.0 + index, commit(index, index, index)) for index in range(4)]
    journal = journal_of([LATE_PAUSE], *commits, (104.5, struck(LATE_PAUSE)), (107.0, commit(4, 4, 4)), (107.0, END))
    assert goodput_of(journal).lost_s["fault"] == 2.0


def test_the_clock_of_one_group_may_have_jumped() -> None:
    read = [
        (at_s, commit(index, index, index, group))
        for index in range(3)
        for group, at_s in enumerate((101.0 + index, 101.0 + index, 41.0 + index))
    ]
    goodput = goodput_of(journal_of([], *read, (103.0, END)))
    assert (goodput.step_s, goodput.useful_s, goodput.wall_s) == (1.0, 3.0, 3.0)


def test_a_journal_without_an_end_has_no_goodput() -> None:
    journal = journal_of([], (101.0, commit(0, 0, 0)))
    assert figures_of(journal).goodput is None


# ---------------------------------------------------------------------------------------------------------- faults


def test_faults_are_counted_by_what_became_of_them() -> None:
    """Of five kills, two strike and one of them in a step that is never committed; of the other three one should have
    struck, one is for a group that is away, and one for a step that the run does not reach."""
    faults = [planned(1, 1), planned(4, 2), planned(3, 2), planned(2, 1), planned(8, 0), planned(2, 0, "hang")]
    journal = journal_of(
        faults,
        (101.0, commit(0, 0, 0)),
        (101.5, struck(faults[0])),
        (101.6, fence(1, 1)),
        (102.0, commit(2, 1, 1)),
        (102.2, struck(faults[5])),
        (103.0, commit(3, 2, 2, admit=[[1, 1]])),
        (104.0, commit(4, 3, 3)),
        (104.5, struck(faults[1])),
        (105.0, END),
    )
    figures = figures_of(journal)
    assert figures.faults == {
        "hang": FaultCount(planned=1, due=1, fired=1, masked=1),
        "kill": FaultCount(planned=5, due=3, fired=2, masked=1),
    }
    assert (figures.losses, figures.admissions) == (1, 1)


def a_summary(**changes: Any) -> Summary:
    summary = summarize(journal_of([]))
    return dataclasses.replace(summary, verdict="valid", reasons=(), outcome="finished", **changes)


def some_figures(**counts: int) -> CampaignFigures:
    count = FaultCount(**{"planned": 2, "due": 2, "fired": 2, "masked": 2} | counts)
    return CampaignFigures(
        faults={"kill": count}, losses=0, admissions=0, recovery_p50_s=None, recovery_p99_s=None, goodput=None
    )


def test_a_campaign_in_which_everything_was_masked_has_passed() -> None:
    assert some_figures().problems(a_summary()) == []


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"fired": 1, "masked": 1}, "kill: 1 of 2 faults that were due struck"),
        ({"masked": 1}, "kill: 1 of 2 faults that struck were masked"),
        ({"due": 0, "fired": 0, "masked": 0}, "no fault struck"),
    ],
)
def test_a_campaign_fails_by_its_faults(counts: dict[str, int], text: str) -> None:
    assert any(text in problem for problem in some_figures(**counts).problems(a_summary()))


def test_a_campaign_fails_by_its_verdict_and_its_outcome() -> None:
    summary = dataclasses.replace(a_summary(), verdict="invalid", reasons=("why",), outcome="halted")
    assert len(some_figures().problems(summary)) == 2


# ------------------------------------------------------------------------------------------------------- processes


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    samples = [Holdings(memory_bytes=n, threads=3, file_descriptors=16 - n) for n in range(16)]
    assert growth_of(samples) == Holdings(memory_bytes=8, threads=0, file_descriptors=-8)


def test_growth_beyond_the_limit_and_orphans_are_problems() -> None:
    who = dict.fromkeys(("memory_bytes", "threads", "file_descriptors"), "supervisor 0")
    fine = ProcessReport(num_processes=1, growth=MOST_GROWTH, grown_most=who, largest=NOTHING, orphans=())
    assert process_problems(fine, 3) == []
    leaking = dataclasses.replace(MOST_GROWTH, file_descriptors=MOST_GROWTH.file_descriptors + 7)
    bad = dataclasses.replace(fine, growth=leaking, orphans=("7: sleep",))
    assert process_problems(bad, 3) == [
        "process 7: sleep outlived the run",
        "supervisor 0 grew by 15 file descriptors, more than 14",
    ]


UPDATE = UpdateRecord(
    group=0, step=0, attempt=0, num_microbatches=1, loss=1.0, grad_norm=1.0, learning_rate=1.0, makespan=1, step_s=1.0
)
COMMITTED = StepCommitted(update=UPDATE, num_alive=1, split_s={}, head=1, epoch=0, num_recomputed=0, recoveries=())

GROWING = """
import sys
held = []
for _ in sys.stdin:
    held.append([(open("/dev/null"), bytearray(1 << 20)) for _ in range(2)])
    print(flush=True)
"""


class InStep(ProcessWatch):
    """Has something happen before each look, and notes when it has looked often enough."""

    def __init__(self, happen: Callable[[], object], num_looks: int) -> None:
        super().__init__(interval_s=0.001)
        self._happen = happen
        self._num_left = num_looks
        self.has_seen_enough = threading.Event()

    def _sample(self) -> None:
        if self._num_left == 0:
            self.has_seen_enough.set()
            return
        self._num_left -= 1
        self._happen()
        super()._sample()


def test_a_process_that_leaks_is_noticed() -> None:
    """However fast either is: it holds more at each look."""
    command = [sys.executable, "-c", GROWING]

    def grow() -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("more\n")
        child.stdin.flush()
        child.stdout.readline()

    with (
        InStep(grow, num_looks=60) as watch,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
    ):
        watch.on_event(COMMITTED)
        assert watch.has_seen_enough.wait(WAIT_S)
    report = watch.report()
    assert report.orphans == ()
    assert report.grown_most["file_descriptors"] == f"process {child.pid}"
    assert report.growth.file_descriptors > 50
    assert report.growth.memory_bytes > 50 << 20
    assert report.growth.threads < MOST_GROWTH.threads


def test_a_spare_that_takes_the_place_of_a_rank_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here this process does. It is judged anew, as the rank that it is."""
    # The fork server of another test may be importing what its processes need.
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    watch = ProcessWatch()
    held = [bytearray(1)]
    for pids in ({}, {(GroupId(1), 0): os.getpid()}):
        watch.on_event(RanksStarted(node=0, pids=pids))
        held.append(bytearray(b"x") * (100 << 20))
        for _ in range(20):
            watch._sample()
    report = watch.report()
    assert report.growth.memory_bytes < MOST_GROWTH.memory_bytes
    assert report.largest.memory_bytes > sum(map(len, held))


def test_a_process_whose_parent_is_gone_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses_s), sleep=lambda _: pauses_s.append(1.0))
    monkeypatch.setattr(process_watch, "time", clock)
    command = f"import os, subprocess, sys\nsubprocess.Popen(['sleep', '987'])\nprint({os.getpid()})"
    with ProcessWatch() as watch:
        subprocess.run([sys.executable, "-c", command], timeout=60, check=True, stdout=subprocess.DEVNULL)
    assert sum(pauses_s) == process_watch._FAREWELL_S
    [orphan] = watch.report().orphans
    pid, _, command_line = orphan.partition(": ")
    assert command_line == "sleep 987"
    assert not psutil.pid_exists(int(pid))


# ------------------------------------------------------------------------------------------------------ the command


class NothingSeen:
    """A watch of processes that saw none."""

    on_event = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self) -> ProcessReport:
        return ProcessReport(num_processes=0, growth=NOTHING, grown_most={}, largest=NOTHING, orphans=())


def test_figures_are_shown_though_their_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours have gone into them."""

    def train(config: RunConfig, directory: RunDirectory, *_: object) -> Summary:
        journal, run_dir = journal_of([PAUSE], (101.0, commit(0, 0, 0)), (119.0, END)), directory.path
        (run_dir / "journal").mkdir(parents=True)
        text = "".join(encode_line(line) + "\n" for line in journal.lines)
        (run_dir / "journal/driver.jsonl").write_text(text)
        (run_dir / "campaign.json").symlink_to("/dev/full")
        return summarize(journal)

    config = RunConfig(faults=FaultsConfig(trace=(FaultConfig(phase=FaultPoint.FORWARD),)))
    monkeypatch.setattr("spare_megatron.tools.campaign.campaign_command.load_runnable", lambda *_: config)
    monkeypatch.setattr("spare_megatron.tools.campaign.campaign_command.run_and_show", train)
    monkeypatch.setattr(process_watch, "ProcessWatch", NothingSeen)
    result = CliRunner().invoke(app, ["campaign", "any.toml", "--json", "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 1, result.output
    unwritten = "campaign.json could not be written: [Errno 28] No space left on device"
    assert unwritten in json.loads(result.stdout)["problems"]
    assert unwritten in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (FaultsConfig(), "faults.trace is empty and faults.mean_steps absent: no fault would strike; set one of them"),
        (
            FaultsConfig(mean_steps=1000.0, recovery_steps=5),
            "faults.mean_steps=1000.0 draws no fault that redundancy can mask in train.steps=20, of which the last",
        ),
    ],
)
def test_a_campaign_without_faults_is_refused_before_it_has_trained_for_hours(
    faults: FaultsConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = "spare_megatron.tools.campaign.campaign_command.load_runnable"
    monkeypatch.setattr(loader, lambda *_: RunConfig(faults=faults))
    result = CliRunner().invoke(app, ["campaign", "any.toml", "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--days", "40", "60"), "--days 40 60 are those of --trace; give that, or leave it out"),
        (("--day", "30s"), "--day 30s is how long a day of --trace takes; give that, or leave it out"),
    ],
)
def test_days_without_a_trace_are_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = "spare_megatron.tools.campaign.campaign_command.load_runnable"
    monkeypatch.setattr(loader, lambda *_: RunConfig(faults=FaultsConfig(mean_steps=1.0)))
    result = CliRunner().invoke(app, ["campaign", "any.toml", "--run-dir", str(tmp_path / "run"), *words])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
