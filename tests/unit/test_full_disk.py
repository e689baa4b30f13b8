"""A full disk under what a run writes down: reported once, known to `status`, and no contradiction at the end."""

import errno
import json
import os
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress, print_summary
from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.storage_watch import RESERVED_BYTES, StorageWatch
from spare_megatron.journal import files
from spare_megatron.journal.files import FORMAT, AppendingFile, BytesLost, JournalWriter, read_journal
from spare_megatron.journal.records import EndRecord, EntryRecord, StorageRecord, UpdateRecord, VoteRecord
from spare_megatron.journal.state.summary import conclude
from spare_megatron.process.reports import RecordsHeld, RecordsLost
from tests.unit.journal_in_memory import run_record

NUM_STEPS = 150
RUN = run_record(1, format=FORMAT, name="full", num_steps=NUM_STEPS)
FULL = "[Errno 28] No space left on device"


class Disk:
    """What `os.write` meets: so many bytes are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_free = 10**9
        self._write = os.write
        monkeypatch.setattr(files.os, "write", self.write)
        monkeypatch.setattr(files, "_PATIENCE_S", 0.0)

    def write(self, fd: int, data: bytes) -> int:
        if not self.num_free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.num_free])
        self.num_free -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_file_reports_once_that_it_is_held_and_once_that_it_is_written(tmp_path: Path, disk: Disk) -> None:
    reports: list[tuple[Path, str]] = []
    file = AppendingFile(tmp_path / "lines", lambda path, error: reports.append((path, error)))
    file.append("first\n")
    assert reports == []
    disk.num_free = 3
    for _ in range(3):
        file.append("second\n")
        assert reports == [(tmp_path / "lines", FULL)]
    disk.num_free = 10**9
    file.append("third\n")
    file.close()
    assert reports == [(tmp_path / "lines", FULL), (tmp_path / "lines", "")]
    assert (tmp_path / "lines").read_text() == "first\n" + 3 * "second\n" + "third\n"


def test_a_file_that_loses_its_end_ends_with_a_whole_line_and_counts_what_is_lost(tmp_path: Path, disk: Disk) -> None:
    """What a supervisor wrote after it, when its driver was gone, made one damaged line with the torn one."""
    file = AppendingFile(tmp_path / "lines")
    disk.num_free = len("first\nsec")
    for text in ("first\n", "second\n", "third\n"):
        file.append(text)
    with pytest.raises(BytesLost, match=f"No space left on device: the last 13 bytes are lost: '{tmp_path}/lines'"):
        file.close()
    assert (tmp_path / "lines").read_text() == "first\n"


def test_what_is_reserved_is_set_aside_and_not_part_of_the_file(tmp_path: Path) -> None:
    file = AppendingFile(tmp_path / "lines")
    file.append("first\n")
    file.reserve(RESERVED_BYTES)
    written = (tmp_path / "lines").stat()
    assert written.st_size == len("first\n")
    if written.st_blocks * 512 < RESERVED_BYTES:
        pytest.skip("the file system of the temporary directory reserves nothing")
    file.append("second\n")
    file.close()
    assert (tmp_path / "lines").read_text() == "first\nsecond\n"


def test_the_first_file_that_is_held_and_the_last_that_is_written_again_are_news(tmp_path: Path) -> None:
    events: list[RecordsHeld | RecordsLost] = []
    watch = StorageWatch(tmp_path, events.append)
    watch.journal = JournalWriter(tmp_path, "driver")
    one, other = str(tmp_path / "journal" / "group-0000-rank-0.jsonl"), str(tmp_path / "metrics.jsonl")
    for path, reason in [(one, FULL), (other, FULL), (one, ""), (other, "")]:
        watch.on_held(RecordsHeld(path=path, reason=reason))
    watch.record_lost()
    watch.report_lost()
    assert events == [RecordsHeld(path=one, reason=FULL), RecordsHeld(path=other, reason="")]
    name = "journal/group-0000-rank-0.jsonl"
    assert read_journal(tmp_path).of(StorageRecord) == [
        StorageRecord(outcome="held", path=name, reason=FULL),
        StorageRecord(outcome="written", path="metrics.jsonl"),
    ]


def test_what_is_lost_is_one_report_and_only_lines_of_the_journal_count_for_the_proof(tmp_path: Path) -> None:
    events: list[RecordsHeld | RecordsLost] = []
    watch = StorageWatch(tmp_path, events.append)
    watch.journal = JournalWriter(tmp_path, "driver")
    journal, metrics = str(tmp_path / "journal" / "group-0000-rank-0.jsonl"), str(tmp_path / "metrics.jsonl")
    watch.on_lost(RecordsLost(paths=(metrics,), num_bytes=5, reason=FULL))
    watch.record_lost()
    assert read_journal(tmp_path).of(StorageRecord) == []
    watch.on_lost(RecordsLost(paths=(journal,), num_bytes=7, reason=FULL))
    watch.record_lost()
    watch.report_lost()
    assert events == [RecordsLost(paths=(metrics, journal), num_bytes=12, reason=FULL)]
    assert [record.num_bytes for record in read_journal(tmp_path).of(StorageRecord)] == [7]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has committed 150 steps, and whose disk was full after 134; the driver's file has all of its lines."""
    group, driver = JournalWriter(tmp_path, "group-0000-rank-0"), JournalWriter(tmp_path, "driver")
    driver.write(RUN)
    for step in range(134):
        group.write(VoteRecord(group=0, step=step, attempt=step, is_complete=True, work_digest=""))
        group.write(EntryRecord(group=0, index=step, entry={"entry": "commit", "step": step, "attempt": step}))
        update = UpdateRecord(
            group=0,
            step=step,
            attempt=step,
            num_microbatches=1,
            loss=4.0,
            grad_norm=1.0,
            learning_rate=0.1,
            makespan=1,
            step_s=1.0,
        )
        group.write(update)
    group.close()
    driver.write(StorageRecord(outcome="held", path="journal/group-0000-rank-0.jsonl", reason=FULL))
    driver.close()
    return tmp_path


def end(run_dir: Path) -> None:
    driver = JournalWriter(run_dir, "driver")
    driver.write(EndRecord(outcome="finished", reason="", steps_committed=NUM_STEPS))
    lost = StorageRecord(outcome="lost", path="journal/group-0000-rank-0.jsonl", reason=FULL, num_bytes=9000)
    driver.write(lost)
    driver.close()


def test_status_says_that_the_journal_is_incomplete_while_the_run_goes_on(run_dir: Path) -> None:
    written = CliRunner().invoke(app, ["status", str(run_dir)]).stdout
    assert f"incomplete: the storage takes no more of journal/group-0000-rank-0.jsonl: {FULL}" in written
    answer = json.loads(CliRunner().invoke(app, ["status", str(run_dir), "--json"]).stdout)
    assert answer["incomplete"] == f"the storage takes no more of journal/group-0000-rank-0.jsonl: {FULL}"
    driver = JournalWriter(run_dir, "driver")
    driver.write(StorageRecord(outcome="written", path="journal/group-0000-rank-0.jsonl"))
    driver.close()
    assert "incomplete" not in CliRunner().invoke(app, ["status", str(run_dir)]).stdout


def test_the_end_of_such_a_run_does_not_contradict_itself(run_dir: Path) -> None:
    """It was `invalid`, had 134 steps committed, and its last checkpoint was reported as missing."""
    end(run_dir)
    summary = conclude(run_dir)
    assert (summary.outcome, summary.steps_committed, summary.steps_left) == ("finished", NUM_STEPS, 0)
    assert (summary.verdict, summary.final_loss) == ("unknown", None)
    assert "has not taken the last 9 kB of journal/group-0000-rank-0.jsonl" in summary.reasons[0]
    assert any("finished after 150 committed steps" in reason for reason in summary.reasons)
    console = RunConsole(file=StringIO())
    print_summary(replace(summary, reasons=tuple(f"reason {n}" for n in range(200))), run_dir, console)
    assert isinstance(console.file, StringIO)
    assert "reason 9\nand 190 more: spare check" in console.file.getvalue()


def test_the_driver_alone_knows_how_many_steps_there_are_where_its_own_end_is_lost(run_dir: Path) -> None:
    summary = conclude(run_dir, EndRecord(outcome="finished", reason="", steps_committed=NUM_STEPS))
    assert (summary.outcome, summary.steps_committed, summary.steps_left) == ("finished", NUM_STEPS, 0)


def test_the_screen_names_the_file_what_is_lost_and_what_is_not(tmp_path: Path) -> None:
    console = RunConsole(file=StringIO())
    progress = RunProgress(RunConfig(), console, tmp_path)
    path = "/run/journal/group-0000-rank-0.jsonl"
    progress.on_event(RecordsHeld(path=path, reason=FULL))
    progress.on_event(RecordsHeld(path=path, reason=""))
    progress.on_event(RecordsLost(paths=(path, "/run/metrics.jsonl"), num_bytes=9000, reason=FULL))
    assert isinstance(console.file, StringIO)
    held, written, lost = console.file.getvalue().splitlines()
    for text in (path, "--run-dir", FULL, "make room", "Training goes on"):
        assert text in held
    assert "nothing that was written down is lost" in written
    for text in (f"{path} and 1 other file", FULL, "its checkpoints are not"):
        assert text in lost
