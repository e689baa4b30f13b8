"""A disk that is full; a folder of checkpoints that is lost, and comes back or does not."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli.train import unsaved_end
from spare_megatron.config.schema import FaultConfig, LayoutConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.injection import Injector, fill_disk
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.proofs.proof import check
from spare_megatron.journal.records import CheckpointRecord, RestartRecord, StorageRecord, exit_code
from spare_megatron.process.reports import RecordsHeld, RecordsLost, RunEvent, StepCommitted
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.whole_run import Run, kill, losses_of, read_run, tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS = 4
_CAPABILITIES_VERSION_3 = 0x20080522

Tamper = Callable[[Path], None]


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def put_back(folder: Path) -> None:
    folder.with_name("away").rename(folder)


def put_back_and_close(folder: Path) -> None:
    put_back(folder)
    folder.chmod(0o555)


def open_again(folder: Path) -> None:
    folder.chmod(0o755)


def tampering_rank(acts: dict[tuple[int, FaultPoint], Tamper], spec: RankSpec, reports: Connection) -> None:
    """A rank that does something to the folder of checkpoints in some phase of its group; -1: of whichever is first."""
    if os.geteuid() == 0:
        # A process without capabilities is not shown the descriptors of one that has them.
        fd = os.open(spec.run_dir, os.O_PATH)
        spec = replace(spec, run_dir=Path(f"/proc/{os.getpid()}/fd/{fd}"))
        _heed_permissions()
    rank.Injector = partial(_Tampering, acts, spec)
    rank.run_rank(spec, reports)


class _Tampering(Injector):
    def __init__(self, acts: dict[tuple[int, FaultPoint], Tamper], spec: RankSpec, *parts: Any) -> None:
        super().__init__(*parts)
        self._acts, self._spec = acts, spec

    def __call__(self, phase: FaultPoint) -> None:
        super().__call__(phase)
        for group in (int(self._spec.group), -1):
            if (group, phase) in self._acts and self._is_first(f"{group}-{phase}"):
                self._acts[group, phase](self._spec.run_dir / "checkpoints")

    def _is_first(self, name: str) -> bool:
        try:
            (self._spec.run_dir / f"done-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _heed_permissions() -> None:
    """Root may do anything by its capabilities alone."""
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0


def run_of(
    corpus: Path,
    run_dir: Path,
    acts: dict[tuple[int, FaultPoint], Tamper],
    *,
    num_groups: int,
    every: int,
    **settings: Any,
) -> Run:
    """A run with synchronous saves, which is wiped out in step 3 if it has three groups; valid in any case."""
    faults = [kill(FaultPoint.FORWARD, 3, group) for group in range(3)] if num_groups == 3 else []
    config = tiny_config(
        corpus,
        LayoutConfig(num_groups=num_groups),
        steps=STEPS,
        mode="reproducible",
        hidden_dropout=0.1,
        redundancy=2,
        faults=faults,
        max_restarts=1,
    )
    saving = replace(config.checkpoint, interval_steps=every, asynchronous=False, keep_last=9, **settings)
    config = replace(config, checkpoint=saving)
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=partial(tampering_rank, acts))
    run = read_run(config, run_dir, events)
    assert run.summary.verdict == "valid", run.summary.reasons
    return run


def test_a_disk_that_stays_full_costs_the_proof_of_a_run_and_not_the_run(text_corpus: Path, tmp_path: Path) -> None:
    """It ended as one that could not begin; later as one whose journal was invalid, for it had not committed all."""
    full = [
        FaultConfig(phase=FaultPoint.FORWARD, step=STEPS - 2, group=group, rank=0, kind="disk_full") for group in (0, 1)
    ]
    run_dir = tmp_path / "run"
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=STEPS, faults=full)
    config = replace(config, checkpoint=replace(config.checkpoint, interval_steps=STEPS))
    events: list[RunEvent] = []

    def on_event(event: RunEvent) -> None:
        if not any(isinstance(earlier, StepCommitted) for earlier in events) and isinstance(event, StepCommitted):
            fill_disk(descriptor_of(run_dir / "metrics.jsonl"), None)
        events.append(event)

    summary = start_run(config, run_dir, on_event)
    assert (summary.outcome, summary.verdict) == ("finished", "unknown"), summary.reasons
    assert (summary.steps_committed, summary.steps_left) == (STEPS, 0)
    assert check(JournalIndex(run_dir)).verdict == "unknown"
    assert exit_code(summary.outcome, summary.verdict) == 1
    assert unsaved_end(config, run_dir, summary) == ""
    [held] = [event for event in events if isinstance(event, RecordsHeld)]
    [lost] = [event for event in events if isinstance(event, RecordsLost)]
    assert {Path(path).name for path in lost.paths} == {f"group-000{group}-rank-0.jsonl" for group in (0, 1)} | {
        "metrics.jsonl"
    }
    assert held.reason == lost.reason == "[Errno 28] No space left on device"
    assert [r.outcome for r in read_journal(run_dir).of(StorageRecord)] == ["held", "lost"]


def descriptor_of(path: Path) -> int:
    """That this process has the file open with."""
    return next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path))


def test_a_folder_that_is_lost_for_a_while_costs_the_saves_of_that_while(text_corpus: Path, tmp_path: Path) -> None:
    """Group 1 finds it moved away when it saves, group 2 closed to all users, group 3 has it back.

    Nothing is written where the folder was.
    """
    acts = {(1, FaultPoint.SAVE): move_away, (2, FaultPoint.SAVE): put_back_and_close, (3, FaultPoint.SAVE): open_again}
    run = run_of(text_corpus, tmp_path / "run", acts, num_groups=4, every=1)
    assert run.summary.outcome == "finished", run.summary
    records = run.journal.of(CheckpointRecord)
    assert [(r.step, r.group, r.outcome) for r in records] == [
        (1, 0, "saved"),
        (2, 1, "failed"),
        (3, 2, "failed"),
        (4, 3, "saved"),
    ]
    assert "put that back" in records[1].reason
    assert "Permission denied" in records[2].reason
    folder = tmp_path / "run" / "checkpoints"
    assert visible_steps(folder) == [4, 1]
    for step in (4, 1):
        verify(checkpoint_path(folder, step))


def test_a_restart_waits_for_the_folder_of_checkpoints(text_corpus: Path, tmp_path: Path) -> None:
    """It is gone when the first group looks for it, and back when the last has looked in vain."""
    acts = {(-1, FaultPoint.LOAD_SEARCH): move_away, (2, FaultPoint.LOAD_WAIT): put_back}
    run = run_of(text_corpus, tmp_path / "run", acts, num_groups=3, every=2)
    assert run.summary.outcome == "finished", run.summary
    assert {(r.group, r.step) for r in run.journal.of(RestartRecord)} == {(0, 2), (1, 2), (2, 2)}
    losses = losses_of(run.journal)
    assert all(len(found) == 1 for found in losses.values()), "step 2 was computed twice, with the same outcome"


def test_a_restart_without_the_folder_ends_the_run_and_says_why(text_corpus: Path, tmp_path: Path) -> None:
    """Rather than to begin from nothing where there are checkpoints."""
    acts = {(-1, FaultPoint.LOAD_SEARCH): move_away}
    run = run_of(text_corpus, tmp_path / "run", acts, num_groups=3, every=2, restart_wait_s=2.0)
    assert run.summary.outcome == "wipe_out", run.summary
    assert "put that back" in run.summary.outcome_reason
    assert run.summary.steps_committed == 3
    verify(checkpoint_path(tmp_path / "run" / "away", 2))
