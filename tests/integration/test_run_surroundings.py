"""What happens around a run: its output, directory, disk, folder of checkpoints, and the time to end in."""

import contextlib
import ctypes
import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from spare_megatron.cli.train import unsaved_end
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.injection import Injector, fill_disk
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.proofs.proof import check
from spare_megatron.journal.records import CheckpointRecord, LossRecord, RestartRecord, StorageRecord, exit_code
from spare_megatron.process.reports import RecordsHeld, RecordsLost, RunEvent, StepCommitted
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.whole_run import Run, complete_run, kill, losses_of, read_run, tiny_config
from tests.unit.journal_in_memory import check_journal

LAYOUT = LayoutConfig(num_groups=2)
TIMEOUT_S = 120.0
_POLL_S = 0.05


@contextlib.contextmanager
def train(
    config: RunConfig, folder: Path, streams: Callable[[], None] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`spare train` with these standard streams, or with its output in a file. It is ended with the block."""
    (folder / "preset.toml").write_text(dump_run_config(config))
    command = [sys.executable, "-m", "spare_megatron", "train", "--config", str(folder / "preset.toml")]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=streams,
            env={**os.environ, "PYTHONIOENCODING": "ascii"} if streams else None,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def output_of(folder: Path) -> str:
    """Without line breaks, as a terminal's width may be set."""
    return " ".join((folder / "output").read_text().split())


def summary_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end_s, "not in time"
        time.sleep(_POLL_S)


def num_committed(run_dir: Path) -> int:
    return sum(
        Path(file).read_text().count('"record":"update"') for file in glob.glob(f"{run_dir}/journal/group-0000*")
    )


# ---------------------------------------------------------------------------------------------------------- output


def close_all() -> None:
    os.closerange(0, 3)


def close_output() -> None:
    os.closerange(1, 3)


def fill() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def leave_unread() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


@pytest.fixture(scope="module")
def expected(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run without anything unusual computes."""
    run = complete_run(tiny_config(text_corpus, LAYOUT), tmp_path_factory.mktemp("usual") / "run")
    assert run.summary.params_sha256 is not None
    return run.summary.params_sha256


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("streams", [close_all, close_output, fill, leave_unread])
def test_output_that_nothing_takes_changes_nothing(
    text_corpus: Path, tmp_path: Path, expected: str, streams: Callable[[], None]
) -> None:
    """With closed streams its sockets and files had the numbers 1 and 2, and no step was made."""
    with train(tiny_config(text_corpus, LAYOUT), tmp_path, streams) as process:
        assert process.wait(TIMEOUT_S) == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["outcome"], summary["verdict"], summary["params_sha256"]) == ("finished", "valid", expected)


# ------------------------------------------------------------------------------------------------------- directory


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_run_goes_on_where_its_directory_is_moved(text_corpus: Path, tmp_path: Path) -> None:
    """A rank that starts later, checkpoints and the summary are there, and nothing is at the old place."""
    config = tiny_config(text_corpus, LAYOUT, steps=60, rejoins=1)
    config = replace(config, checkpoint=CheckpointConfig(interval_steps=20))
    run_dir, moved = tmp_path / "run", tmp_path / "there" / "moved"
    with train(config, tmp_path) as process:
        wait_until(lambda: num_committed(run_dir) > 2, process)
        moved.parent.mkdir()
        run_dir.rename(moved)
        [rank] = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if any("group-0001-rank-0.jsonl" in file.path for file in one.open_files())
        ]
        rank.kill()
        assert process.wait(TIMEOUT_S) == 0, output_of(tmp_path)
    assert not run_dir.exists()
    assert f"{run_dir}, the directory of the run, is now {moved}" in output_of(tmp_path)
    journal = read_journal(moved)
    assert [(loss.group, loss.incarnation) for loss in journal.of(LossRecord)] == [(1, 0)]
    assert check_journal(journal).verdict == "valid"
    assert (summary_of(moved)["outcome"], summary_of(moved)["groups_lost"]) == ("finished", 1)
    assert verify(moved / "checkpoints" / "step-00000060").manifest.step == 60


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_run_whose_directory_is_removed_ends_with_a_checkpoint(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LAYOUT, steps=5000)
    config = replace(config, checkpoint=CheckpointConfig(folder=str(tmp_path / "saved")))
    with train(config, tmp_path) as process:
        wait_until(lambda: num_committed(tmp_path / "run") > 2, process)
        (tmp_path / "run").rename(tmp_path / "gone")
        subprocess.run(["rm", "-r", str(tmp_path / "gone")], check=False)
        assert process.wait(TIMEOUT_S) == 5, output_of(tmp_path)
    assert f"the removal of its directory {tmp_path / 'gone'}" in output_of(tmp_path)
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert verify(saved).manifest.step > 2


# ------------------------------------------------------------------------------------------------------------ time


HANG = FaultConfig(phase=FaultPoint.FORWARD, step=3, group=0, rank=0, kind="hang", seconds=100.0)
WAITED_FOR = {
    "sums of a group that computes too long": HANG,
    "vote of a group that hangs": replace(HANG, phase=FaultPoint.AFTER_REDUCE),
    "control store": replace(HANG, kind="stop_store"),
}


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("awaited", WAITED_FOR)
def test_a_run_whose_step_takes_too_long_to_end_saves_what_was_committed(
    text_corpus: Path, tmp_path: Path, awaited: str
) -> None:
    """Ranks that wait save alone; the next run goes on from there."""
    config = tiny_config(text_corpus, LAYOUT, steps=5, faults=[WAITED_FOR[awaited]], heartbeat_s=7.0)
    config = replace(config, control=replace(config.control, end_grace_s=6.0))
    run_dir = tmp_path / "run"
    with train(config, tmp_path) as process:
        wait_until(lambda: num_committed(run_dir) == 3, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 5, output_of(tmp_path)
    summary = summary_of(run_dir)
    assert (summary["outcome"], summary["steps_committed"], summary["verdict"]) == ("stopped", 3, "unknown")
    assert "could not end in order within control.end_grace_s=6" in summary["outcome_reason"]
    further = replace(config, checkpoint=replace(config.checkpoint, load=str(run_dir)))
    rest = complete_run(replace(further, faults=replace(config.faults, trace=())), tmp_path / "rest")
    whole = complete_run(replace(config, faults=replace(config.faults, trace=())), tmp_path / "whole")
    assert rest.summary.steps_committed == 2
    assert rest.summary.params_sha256 == whole.summary.params_sha256


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


@pytest.mark.timeout(120)
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


@pytest.mark.timeout(120)
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


@pytest.mark.timeout(120)
def test_a_restart_waits_for_the_folder_of_checkpoints(text_corpus: Path, tmp_path: Path) -> None:
    """It is gone when the first group looks for it, and back when the last has looked in vain."""
    acts = {(-1, FaultPoint.LOAD_SEARCH): move_away, (2, FaultPoint.LOAD_WAIT): put_back}
    run = run_of(text_corpus, tmp_path / "run", acts, num_groups=3, every=2)
    assert run.summary.outcome == "finished", run.summary
    assert {(r.group, r.step) for r in run.journal.of(RestartRecord)} == {(0, 2), (1, 2), (2, 2)}
    losses = losses_of(run.journal)
    assert all(len(found) == 1 for found in losses.values()), "step 2 was computed twice, with the same outcome"


@pytest.mark.timeout(120)
def test_a_restart_without_the_folder_ends_the_run_and_says_why(text_corpus: Path, tmp_path: Path) -> None:
    """Rather than to begin from nothing where there are checkpoints."""
    acts = {(-1, FaultPoint.LOAD_SEARCH): move_away}
    run = run_of(text_corpus, tmp_path / "run", acts, num_groups=3, every=2, restart_wait_s=2.0)
    assert run.summary.outcome == "wipe_out", run.summary
    assert "put that back" in run.summary.outcome_reason
    assert run.summary.steps_committed == 3
    verify(checkpoint_path(tmp_path / "run" / "away", 2))
