"""Journal lines, files, and the figures drawn from them. Whole runs are checked in tests/integration."""

import errno
import io
import os
import re
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import print_summary
from spare_megatron.journal.files import AppendingFile, Journal, JournalWriter, Line, decode_line, read_journal
from spare_megatron.journal.fold import fold_log
from spare_megatron.journal.proofs.audit_history import Spoiled
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    FaultRecord,
    LossRecord,
    Record,
    RecoveryRecord,
    VoteRecord,
)
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.recoveries import find_recoveries
from spare_megatron.journal.state.run_state import RunState
from tests.unit.journal_in_memory import check_journal, run_record, summarize

RUN = run_record(5, num_steps=99)
VOTE = VoteRecord(group=1, step=2, attempt=3, is_complete=True, work_digest="")


def journal_of(*records: tuple[float, Record]) -> Journal:
    lines = (Line(source="test", at_s=at_s, record=record) for at_s, record in records)
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))


def recovery(group: int, computed_at_s: float, noticed_at_s: float, num_patched: int = 2) -> RecoveryRecord:
    return RecoveryRecord(
        group=group,
        step=7,
        lost=[3],
        computed_at_s=computed_at_s,
        noticed_at_s=noticed_at_s,
        agree_s=0.25,
        patch_s=0.5,
        rebuild_s=0.125,
        reduce_s=0.0625,
        num_patched=num_patched,
    )


def test_a_line_survives_the_file(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "writer", now_s=lambda: 12.5)
    writer.write(VOTE)
    writer.close()
    assert read_journal(tmp_path).lines == (Line(source="writer", at_s=12.5, record=VOTE),)


def test_a_torn_last_line_was_never_written(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "writer")
    writer.write(VOTE)
    file = tmp_path / "journal" / "writer.jsonl"
    file.write_text(file.read_text() + '{"record":"vote","sour')
    journal = read_journal(tmp_path)
    assert [line.record for line in journal.lines] == [VOTE]
    assert journal.damage == ()


@pytest.mark.parametrize("text", ["not json", "[1]", '{"record":"guess"}', '{"record":"vote","source":"x","at_s":1}'])
def test_any_other_line_that_cannot_be_read_makes_the_journal_invalid(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "writer.jsonl").write_text(text + "\n")
    journal = read_journal(tmp_path)
    assert len(journal.damage) == 1
    assert check_journal(journal).verdict == "invalid"


def test_what_two_threads_append_at_once_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendingFile(tmp_path / "lines")
    other = threading.Thread(target=file.append, args=("second\n",))
    write = os.write

    def write_late(fd: int, data: bytes) -> int:
        if other.ident is None:
            other.start()
            other.join(0.2)  # the other one has its chance in the middle of this write, and does not get through
        return write(fd, data)

    monkeypatch.setattr("spare_megatron.journal.files.os.write", write_late)
    file.append("first\n")
    other.join()
    assert (tmp_path / "lines").read_text() == "first\nsecond\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EACCES])
def test_what_storage_does_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    file, write, answers = AppendingFile(tmp_path / "lines"), os.write, [code, code]

    def write_or_fail(fd: int, data: bytes) -> int:
        if answers:
            raise OSError(answers.pop(), "not now")
        return write(fd, data)

    monkeypatch.setattr("spare_megatron.journal.files.os.write", write_or_fail)
    for text in ("first\n", "second\n", "third\n"):
        file.append(text)
    file.close()
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\n"


def test_a_descriptor_that_the_file_server_has_forgotten_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write, stale = AppendingFile(tmp_path / "lines"), os.write, tmp_path / "stale"
    file.append("first\n")
    (tmp_path / "lines").rename(stale)

    def write_unless_stale(fd: int, data: bytes) -> int:
        if os.path.samestat(os.fstat(fd), stale.stat()):
            raise OSError(errno.ESTALE, "stale file handle")
        return write(fd, data)

    monkeypatch.setattr("spare_megatron.journal.files.os.write", write_unless_stale)
    file.append("second\n")
    file.append("third\n")
    file.close()
    assert stale.read_text() == "first\n"
    assert (tmp_path / "lines").read_text() == "second\nthird\n"


def test_a_write_that_is_wrong_in_itself_is_not_held_back(tmp_path: Path) -> None:
    file = AppendingFile(tmp_path / "lines")
    os.close(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.append("text")


def test_a_directory_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_journal(tmp_path)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        decode_line('{"record":"guess","source":"s","at_s":1.0}')


def test_a_run_of_before_there_were_domains_had_none() -> None:
    text = (
        '{"record":"run","source":"supervisor","at_s":1.0,"name":"old","num_groups":4,"ranks_per_group":1,'
        '"redundancy":2,"microbatches_per_shard":4,"num_steps":3,"placement":"golomb","granularity":"microbatch",'
        '"reduce_mode":"fast","faults":[]}'
    )
    record = decode_line(text).record
    assert isinstance(record, RunRecord)
    assert record.groups_per_domain == 1


def test_the_last_commit_admits_no_group_and_no_other_may_follow() -> None:
    last = {"entry": "commit", "step": 0, "attempt": 0, "admit": [[1, 1]], "is_last": True}
    entries: dict[int, dict[str, Any]] = {0: {"entry": "fence", "group": 1, "incarnation": 0}, 1: last}
    fold = fold_log(entries, RUN)
    assert (fold.groups, fold.errors) == ({0, 2, 3, 4}, [])
    assert [commit.is_last for commit in fold.kept_commits] == [True]
    entries[2] = {"entry": "commit", "step": 1, "attempt": 1}
    assert fold_log(entries, RUN).errors == ["step 1 is committed after the last"]


def test_a_step_begins_with_the_groups_admitted_before_it() -> None:
    entries: dict[int, dict[str, Any]] = {
        0: {"entry": "fence", "group": 1, "incarnation": 0},
        1: {"entry": "commit", "step": 0, "attempt": 0},
        2: {"entry": "commit", "step": 1, "attempt": 1, "admit": [[1, 1]]},
        3: {"entry": "fence", "group": 2, "incarnation": 0},
        4: {"entry": "commit", "step": 2, "attempt": 2},
    }
    all_groups = frozenset(range(5))
    began_with = [commit.began_with for commit in fold_log(entries, RUN).kept_commits]
    assert began_with == [all_groups, all_groups - {1}, all_groups]


@pytest.mark.parametrize(
    ("run", "lost", "is_believed"),
    [
        (replace(RUN, redundancy=2), (0, 1, 2), True),
        (replace(RUN, redundancy=2, last_resort=True), (0, 1, 2), False),
        (replace(RUN, redundancy=2, last_resort=True), (0, 1, 2, 3, 4), True),
    ],
)
def test_with_hosts_of_last_resort_only_the_loss_of_all_groups_is_a_wipe_out(
    run: RunRecord, lost: tuple[int, ...], is_believed: bool
) -> None:
    fences = [EntryRecord(group=0, index=i, entry={"entry": "fence", "group": group}) for i, group in enumerate(lost)]
    end = EndRecord(outcome="wipe_out", reason="")
    verdict = check_journal(journal_of((0.0, run), *((1.0, fence) for fence in fences), (2.0, end)))
    assert any("every shard has a surviving host" in reason for reason in verdict.reasons) != is_believed


@pytest.mark.parametrize(("second", "is_reported"), [("wipe_out", False), ("finished", True)])
def test_several_nodes_may_report_the_same_end(second: str, is_reported: bool) -> None:
    """Each does so where the driver is lost."""
    fences = [EntryRecord(group=0, index=i, entry={"entry": "fence", "group": i}) for i in range(5)]
    ends = (2.0, EndRecord(outcome="wipe_out", reason="")), (3.0, EndRecord(outcome=second, reason=""))
    verdict = check_journal(journal_of((0.0, RUN), *((1.0, fence) for fence in fences), *ends))
    assert any("ends that differ" in reason for reason in verdict.reasons) == is_reported


def test_a_journal_without_a_run_proves_nothing() -> None:
    assert check_journal(journal_of((1.0, VOTE))).verdict == "unknown"


def test_a_recovery_is_that_of_the_survivor_that_finished_computing_last() -> None:
    fault = FaultRecord(group=3, rank=0, step=7, phase="forward", kind="kill")
    journal = journal_of((100.0, fault), (105.0, recovery(0, 101.0, 104.0)), (105.0, recovery(1, 103.0, 103.5)))
    [found] = find_recoveries(journal)
    assert found.detect_s == 0.5
    assert found.total_s == 0.5 + 0.25 + 0.5 + 0.125 + 0.0625
    assert (found.num_patched, found.lost, found.phase) == (4, (3,), "forward")


def test_what_is_computed_again_is_one_number_for_losses_and_for_discarded_sums() -> None:
    """Two survivors patch step 7; in step 9 the sum is discarded, and they compute all of it again, 4 + 2 each.

    Growth of what they contribute to later attempts would be 2 each in both steps.
    """
    records: list[tuple[float, Record]] = [(0.0, RUN)]
    for step, at_s, work in ((7, 10.0, [4, 4, 6]), (9, 20.0, [4, 4, 6])):
        for group, (number, load) in product((0, 1), enumerate(work)):
            contribution = ContributionRecord(
                group=group,
                step=step,
                attempt=step + number,
                epoch=0,
                members=[0, 1],
                microbatches={str(group): list(range(load))},
            )
            records.append((at_s + number, contribution))
        num_patched = 2 if step == 7 else 6
        records += [
            (at_s + 5.0, replace(recovery(group, at_s, at_s + 1.0, num_patched), step=step)) for group in (0, 1)
        ]
    journal, run_state = journal_of(*records), RunState()
    for line in journal.lines:
        run_state.add_line(line)
    summary, console = summarize(journal), RunConsole(file=io.StringIO())
    assert [found.num_patched for found in summary.recoveries] == [4, 12]
    assert summary.microbatches_recomputed == dict(run_state.figures())["microbatches_recomputed"] == 16
    print_summary(summary, Path("run"), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert re.search(r"microbatches computed again +16 *\n", text)
    assert re.findall(r"^ *[79] +3 .* (\d+) *$", text, re.MULTILINE) == ["4", "12"]


def test_the_summary_says_which_steps_a_wrong_group_may_have_spoiled() -> None:
    console = RunConsole(file=io.StringIO())
    summary = summarize(journal_of((0.0, RUN)))
    assert summary.spoiled is None
    print_summary(replace(summary, spoiled=Spoiled(audited_steps=6, num_steps=12, groups=[2])), Path("run"), console)
    assert isinstance(console.file, io.StringIO)
    line = "the first 6 of 12 steps are audited; what group 2 computed since is in the parameters\nto go back: "
    assert line in console.file.getvalue()


def test_detection_starts_at_the_loss_if_the_survivor_was_waiting_already() -> None:
    fault = FaultRecord(group=3, rank=0, step=7, phase="in_reduce", kind="kill")
    [found] = find_recoveries(journal_of((103.0, fault), (105.0, recovery(0, 101.0, 103.25))))
    assert found.detect_s == 0.25


def test_without_an_injected_fault_the_loss_is_when_the_supervisor_saw_it() -> None:
    loss = LossRecord(group=3, rank=0, cause="SIGKILL", entry_index=9)
    [found] = find_recoveries(journal_of((103.0, loss), (105.0, recovery(0, 101.0, 103.5))))
    assert (found.detect_s, found.phase) == (0.5, None)


def test_a_group_lost_twice_is_missed_from_its_second_loss_on() -> None:
    admitted = {"entry": "commit", "step": 4, "attempt": 5, "admit": [[3, 1]]}
    records: list[tuple[float, Record]] = [
        (50.0, FaultRecord(group=3, rank=0, step=2, phase="backward", kind="kill")),
        (50.2, LossRecord(group=3, rank=0, cause="SIGKILL", entry_index=3)),
        (60.0, EntryRecord(group=0, index=7, entry=admitted)),
        (101.5, LossRecord(group=3, rank=0, cause="SIGSEGV", entry_index=9, incarnation=1)),
        (102.0, recovery(0, 101.0, 102.0)),
        (200.0, FaultRecord(group=3, rank=0, step=30, phase="forward", kind="kill")),
    ]
    [found] = find_recoveries(journal_of(*records))
    assert (found.detect_s, found.phase) == (0.5, None)


@pytest.mark.parametrize(("fenced_before_step", "verdict_says_so"), [(1, True), (2, False)])
def test_a_fault_is_not_excused_by_the_fence_of_an_earlier_incarnation(
    fenced_before_step: int, verdict_says_so: bool
) -> None:
    fault = {"step": 1, "group": 3, "rank": 0, "phase": "forward", "kind": "kill", "costs": [3]}
    fence = {"entry": "fence", "group": 3, "incarnation": int(fenced_before_step == 2)}
    steps = [{"entry": "commit", "step": step, "attempt": step, "admit": []} for step in range(3)]
    back = {"entry": "fence", "group": 3, "incarnation": 0}
    steps[0]["admit"] = [[3, 1]]
    log = [back, steps[0], fence, *steps[1:]] if fenced_before_step == 2 else [back, *steps]
    records = [(float(index), EntryRecord(group=0, index=index, entry=entry)) for index, entry in enumerate(log)]
    struck = FaultRecord(group=3, rank=0, step=1, phase="forward", kind="kill")
    journal = journal_of((0.0, replace(RUN, faults=[fault])), *records, (1.0, struck))
    reasons = check_journal(journal).reasons
    assert any("no entry fences group 3" in reason for reason in reasons) == verdict_says_so


def test_the_summary_of_a_journal_that_was_cut_off_says_so() -> None:
    summary = summarize(journal_of((1.0, VOTE)))
    assert (summary.outcome, summary.steps_committed, summary.final_loss) == ("unknown", 0, None)
