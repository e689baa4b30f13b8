"""What hand-drawn logs say of restarts, pauses, lost incarnations, faults that were due, and lost redundancy."""

from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.journal.files import Journal, Line, decode_line, encode_line
from spare_megatron.journal.fold import Finding, Fold, fold_log
from spare_megatron.journal.journal_view import steps_of
from spare_megatron.journal.proofs.audit_history import _missing
from spare_megatron.journal.proofs.check_state import check_restored
from spare_megatron.journal.proofs.proof import is_due
from spare_megatron.journal.records import (
    AuditRecord,
    ContributionRecord,
    EntryRecord,
    ParamsRecord,
    RedundancyRecord,
    RepairRecord,
)
from spare_megatron.journal.state.goodput import full_redundancy_s
from spare_megatron.journal.state.overview import UNPROVEN, overview_of
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.tools.report.history import history_of
from tests.unit.journal_in_memory import JournalInMemory, run_record, summarize

RUN = run_record(2, redundancy=1)


def commit(step: int, attempt: int) -> dict[str, Any]:
    return {"entry": "commit", "step": step, "attempt": attempt}


def restart(step: int, snapshot: int | None) -> dict[str, Any]:
    return {"entry": "restart", "step": step, "snapshot": snapshot, "members": [[0, 1], [1, 1]]}


def folded(*entries: dict[str, Any]) -> Fold:
    return fold_log(dict(enumerate(entries)), RUN)


def test_a_restart_of_a_run_that_ended_early_evaluates_at_that_end_again() -> None:
    """The fold knew only `train.steps` for the end, so that it took this evaluation for one that was not due."""
    run = run_record(2, eval_every_steps=4)
    early = commit(1, 1) | {"save": True, "is_last": True}
    evaluated = {"entry": "evaluated", "step": 2, "attempt": 2}
    entries = [commit(0, 0), early, evaluated, restart(2, None), evaluated | {"attempt": 4}]
    fold = fold_log(dict(enumerate(entries)), run)
    assert (list(fold.errors), [one.entry.step for one in fold.evaluations]) == ([], [2, 2])


@pytest.mark.parametrize("back", [restart(2, None), {"entry": "undo", "step": 2, "attempt": 6, "snapshot": 1}])
def test_an_evaluation_of_steps_that_were_undone_does_not_count(back: dict[str, Any]) -> None:
    """Until the next one it was shown as the last evaluation."""

    def evaluated(step: int, attempt: int, loss: int) -> dict[str, Any]:
        return {"entry": "evaluated", "step": step, "attempt": attempt, "sums": [["validation", loss << 32, 1]]}

    kept = commit(1, 1) | {"save": True}
    entries = [commit(0, 0), kept, evaluated(2, 2, 5), commit(2, 3), commit(3, 4), evaluated(4, 5, 3), back]
    fold, state, found = fold_log({}, run_record(2, eval_every_steps=2)), RunState(), []
    state.add_line(Line(source="test", at_s=0.0, record=fold.run))
    for index, entry in enumerate(entries):
        fold.add(index, entry)
        state.add_line(Line(source="test", at_s=1.0 + index, record=EntryRecord(group=0, index=index, entry=entry)))
        found.append(state.evaluated)
        assert fold.last_losses() == state.evaluated
    first, voided = ({"validation": {"step": step, "loss": loss}} for step, loss in ((2, 5.0), (4, 3.0)))
    assert found == [{}, {}, first, first, first, voided, first]
    assert history_of(state, overview_of(state, 9.0, UNPROVEN, window_s=9.0)).evaluations == {"validation": {2: 5.0}}


def compared(*digests: tuple[int, int, str]) -> Journal:
    """Restarts before it, committed steps, digest."""
    records = [
        ParamsRecord(group=group, step=step, sha256=sha256, num_restarts=count)
        for count, step, sha256 in digests
        for group in (0, 1)
    ]
    return Journal(lines=tuple(Line(source="test", at_s=0.0, record=record) for record in records))


def found(journal: Journal, fold: Fold) -> list[Finding]:
    [part] = steps_of(JournalInMemory(journal), fold)
    return list(check_restored(part, RUN, fold))


BEFORE = [commit(0, 0), {"entry": "retry", "step": 1, "attempt": 1}, commit(1, 2), commit(2, 3)]


def test_a_restart_from_a_snapshot_needs_the_commit_that_it_was_taken_after() -> None:
    assert folded(*BEFORE, restart(2, 2)).errors == []
    assert folded(*BEFORE, restart(2, 2)).step == 2
    for step, attempt in ((2, 1), (1, 2), (4, 9)):
        (error,) = folded(*BEFORE, restart(step, attempt)).errors
        assert f"a snapshot after {step} steps, which attempt {attempt} did not commit" in error


def test_a_snapshot_of_what_was_undone_is_an_error() -> None:
    entries = [*BEFORE, restart(2, 2), commit(2, 5)]
    assert folded(*entries, restart(3, 5)).errors == []
    assert len(folded(*entries, restart(3, 3)).errors) == 1


@pytest.mark.parametrize("snapshot", [2, None])
def test_what_is_taken_over_is_what_the_groups_held(snapshot: int | None) -> None:
    fold = folded(*BEFORE, restart(2, snapshot), commit(2, 5))
    assert found(compared((0, 2, "a"), (1, 2, "a")), fold) == []
    assert found(compared((0, 1, "a"), (1, 2, "b")), fold) == []  # was not compared there
    (finding,) = found(compared((0, 2, "a"), (1, 2, "b")), fold)
    assert finding.severity == "invalid"
    assert "after 2 steps" in finding.reason
    (finding,) = found(compared((0, 2, "a"), (1, 2, "b")), folded(*BEFORE, restart(2, snapshot)))
    assert finding.severity == "unknown", "the next entry, which may fence who took over something else, is missing"


def test_what_was_found_wrong_is_not_what_the_groups_held() -> None:
    fenced = {"entry": "fence", "group": 1, "incarnation": 0, "reason": "its parameters differ", "discard": True}
    fold = folded(*BEFORE[:3], fenced, restart(2, None))
    held = compared((0, 2, "a")).lines[:1]
    wrong = Line(source="test", at_s=0.0, record=ParamsRecord(group=1, step=2, sha256="x", num_restarts=0))
    for taken_over, num_findings in [("a", 0), ("x", 1)]:
        journal = Journal(lines=(*held, wrong, *compared((1, 2, taken_over)).lines))
        assert len(found(journal, fold)) == num_findings


def test_steps_that_were_undone_are_no_measure() -> None:
    """The third step was done twice, in other bits; the second restart goes back to the second time."""
    fold = folded(*BEFORE, restart(2, 2), commit(2, 5), restart(3, 5))
    held = [(0, 2, "a"), (0, 3, "x"), (1, 2, "a"), (1, 3, "b")]
    assert found(compared(*held, (2, 3, "b")), fold) == []
    assert len(found(compared(*held, (2, 3, "x")), fold)) == 1
    again = folded(*BEFORE, restart(2, 2), commit(2, 5), restart(2, 2))
    assert found(compared(*held, (2, 2, "a")), again) == []
    assert len(found(compared(*held, (2, 2, "b")), again)) == 1


PAUSING = run_record(4, redundancy=2, num_steps=9, placement="golomb")
LOST = [{"entry": "fence", "group": group, "incarnation": 0} for group in (0, 1)]
COMMIT = {"entry": "commit", "step": 0, "attempt": 0}
PAUSED_RETRY = {"entry": "retry", "step": 1, "attempt": 1, "kept": [2]}
BACK = [[0, 1], [1, 1]]


def resume(admit: list[list[int]], step: int = 1, attempt: int = 2) -> dict[str, Any]:
    return {"entry": "resume", "step": step, "attempt": attempt, "admit": admit}


def folded_pause(*entries: dict[str, Any]) -> Fold:
    return fold_log(dict(enumerate(entries)), PAUSING)


def test_a_pause_ends_with_hosts_and_a_step_that_holds_nothing_of_earlier_attempts() -> None:
    fold = folded_pause(COMMIT, *LOST, PAUSED_RETRY, resume(BACK), COMMIT | {"step": 1, "attempt": 3})
    assert fold.errors == []
    assert fold.groups == {0, 1, 2, 3}
    assert [attempt.attempt for attempt in fold.commits[-1].attempts] == [3]
    assert fold.commits[-1].attempts[0].kept == ()
    assert fold.opened[3] == {0: 1, 1: 1, 2: 0, 3: 0}
    assert fold.resumed == {(0, 1)}


def test_the_journal_says_which_groups_have_come_back_with_fewer_stages() -> None:
    run = replace(PAUSING, ranks_per_group=8, ranks_per_stage=2)
    entries = [COMMIT, *LOST, PAUSED_RETRY, resume(BACK) | {"stages": [4, 3]}]
    assert fold_log(dict(enumerate(entries)), run).stages == {1: 3}
    [error] = fold_log(dict(enumerate([*entries[:-1], resume(BACK) | {"stages": [5, 3]}])), run).errors
    assert "2 members have (5, 3) stages, each at most 4" in error


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ((COMMIT, *LOST, PAUSED_RETRY, resume([])), "no group hosts shards [1]"),
        ((COMMIT, LOST[0], PAUSED_RETRY, resume([[0, 1]])), "every shard had a host"),
        ((COMMIT, *LOST, PAUSED_RETRY, resume(BACK, attempt=1)), "resumes in attempt 2 of step 1"),
        ((COMMIT, *LOST, PAUSED_RETRY, resume([[0, 0], [1, 0]])), "no group hosts shards [1]"),
        ((COMMIT, {"entry": "omen"}), "log entry 1: unknown kind of entry 'omen'"),
    ],
    ids=["without hosts", "without a pause", "another attempt", "fenced incarnations", "an unknown entry"],
)
def test_a_pause_that_did_not_end_so_is_an_error(entries: tuple[dict[str, Any], ...], error: str) -> None:
    [found] = folded_pause(*entries).errors
    assert error in found


def test_a_run_says_that_it_is_paused_and_what_that_has_cost() -> None:
    run_state = RunState()
    run_state.add_line(Line(source="driver", at_s=0.0, record=PAUSING))
    entries = [COMMIT, COMMIT | {"step": 1, "attempt": 1}, COMMIT | {"step": 2, "attempt": 2}, *LOST]
    entries += [PAUSED_RETRY | {"step": 3, "attempt": 3}, resume(BACK, 3, 4), COMMIT | {"step": 3, "attempt": 5}]
    at_s = [1.0, 2.0, 3.0, 3.2, 3.3, 3.4, 60.0, 61.0]
    for index, (entry, time_s) in enumerate(zip(entries, at_s, strict=True)):
        record = EntryRecord(group=2, index=index, entry=entry)
        run_state.add_line(Line(source="group-0002-rank-0", at_s=time_s, record=record))
        is_paused = 4 <= index < 6
        assert run_state.awaited == ((1,) if is_paused else ())
        alarms = overview_of(run_state, 0.0, UNPROVEN, window_s=100.0).alarms
        assert ("paused: no group left hosts shard 1" in alarms) == is_paused
    texts = [event.text for event in run_state.events()]
    assert texts == [
        "no group left hosts shard 1; training waits for one with step 3",
        "training resumes with step 3: groups 0, 1 back",
    ]
    goodput = run_state.goodput(61.0)
    assert goodput is not None
    assert goodput.lost_s["pause"] == pytest.approx(57.0)


FAULTY = run_record(3)


def fence(group: int, incarnation: int = 0) -> dict[str, Any]:
    return {"entry": "fence", "group": group, "incarnation": incarnation}


RETRY = {"entry": "retry", "step": 1, "attempt": 1}


def log(*entries: dict[str, Any]) -> Fold:
    return fold_log(dict(enumerate(entries)), FAULTY)


def planned(step: int, group: int, phase: str = "forward") -> dict[str, Any]:
    return {"step": step, "group": group, "rank": 0, "phase": phase, "kind": "kill"}


def test_a_fault_is_due_when_its_step_was_committed_with_its_group() -> None:
    fold = log(commit(0, 0), fence(1), RETRY, commit(1, 2), commit(2, 3))
    assert is_due(planned(1, 1), fold)
    assert not is_due(planned(2, 1), fold), "the group is lost by then"
    assert not is_due(planned(3, 0), fold), "no group committed that step"


def test_a_pause_is_not_due_where_its_group_was_lost_to_something_else_perhaps_before() -> None:
    fold = log(commit(0, 0), fence(1), RETRY, commit(1, 2), commit(2, 3))
    assert not is_due({**planned(1, 1), "kind": "hang", "costs": []}, fold)
    assert is_due({**planned(1, 1), "costs": [1]}, fold), "the fence may be that of the fault, whose record is missing"
    assert is_due({**planned(1, 0), "kind": "hang", "costs": []}, fold)
    assert is_due({**planned(0, 1), "kind": "hang", "costs": []}, fold), "it was lost in the step after"


@pytest.mark.parametrize(
    ("entries", "rebuild", "patch"),
    [
        ((fence(1), RETRY), True, True),
        ((fence(1),), True, False),  # all survivors had the sum
        ((RETRY,), False, False),  # a broken connection, and no group lost
        ((), False, False),
        ((fence(0), RETRY), False, False),  # the group itself
        ((fence(0), fence(1), RETRY), False, False),  # it was lost before it could recover from the other's loss
        ((fence(1), fence(0), RETRY), True, True),
        ((fence(1, -1), RETRY), False, False),  # a fence of an earlier incarnation has no effect
    ],
)
def test_a_fault_in_a_recovery_is_due_when_another_group_was_lost_in_its_step(
    entries: tuple[dict[str, Any], ...], rebuild: bool, patch: bool
) -> None:
    fold = log(commit(0, 0), *entries, commit(1, 2))
    assert is_due(planned(1, 0, "rebuild"), fold) is rebuild
    assert is_due(planned(1, 0, "patch"), fold) is patch


def test_a_loss_before_the_step_or_after_it_is_no_recovery_in_it() -> None:
    fold = log(fence(1), RETRY, commit(0, 1), commit(1, 2), fence(2), commit(2, 3))
    assert not is_due(planned(1, 0, "rebuild"), fold)
    assert is_due(planned(0, 0, "patch"), fold)
    assert is_due(planned(2, 0, "rebuild"), fold)


COUNTED = run_record(3, name="incarnations")


def fence_of(group: int, **incarnation: int) -> dict[str, Any]:
    return {"entry": "fence", "group": group, "reason": "", "error": "", **incarnation}


def test_a_group_that_comes_back_and_is_lost_again_is_lost_twice() -> None:
    """Groups that rejoined counted by incarnation, those that were lost by number: 1 lost, 2 rejoined."""
    join = {"entry": "join", "group": 1}
    entries = [
        fence_of(1, incarnation=0),
        {**join, "incarnation": 1},
        fence_of(1, incarnation=1),
        fence_of(1, incarnation=1),  # two saw it
        {**join, "incarnation": 2},
        fence_of(2),
    ]
    records = [EntryRecord(group=0, index=index, entry=entry) for index, entry in enumerate(entries)]
    lines = [Line(source="test", at_s=float(at_s), record=record) for at_s, record in enumerate((COUNTED, *records))]
    run_state = RunState()
    for line in lines:
        run_state.add_line(line)
    run_state.settle(is_whole=True)
    assert run_state.damage == []
    assert dict(run_state.figures())["groups_lost"] == summarize(Journal(lines=tuple(lines))).groups_lost == 3


def missing(at_s: float, group: int, num_missing: int, incarnation: int = 0) -> Line:
    record = RedundancyRecord(group=group, step=int(at_s), num_missing=num_missing)
    return Line(source=f"group-{group:04d}-rank-0-life-{incarnation}", at_s=at_s, record=record)


def journal_of(*lines: Line) -> Journal:
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))


def test_a_span_lasts_from_the_first_loss_to_the_last_copy() -> None:
    """Group 1 reports the same, a little later, and misses the rest; its next incarnation sees only the end of it."""
    seen = [(10.0, 3), (12.0, 5), (14.0, 2), (15.5, 0), (40.0, 1), (40.25, 0), (50.0, 4)]
    lines = [missing(at_s, 0, num) for at_s, num in seen]
    lines += [missing(at_s + 0.3, 1, num) for at_s, num in seen[:3]]
    lines += [missing(at_s + 0.3, 1, num, incarnation=1) for at_s, num in seen[4:6]]
    assert full_redundancy_s(journal_of(*lines)) == pytest.approx((5.5, 0.25))


def test_a_run_without_partitions_has_none() -> None:
    assert full_redundancy_s(journal_of()) == ()


def test_the_summary_counts_the_copies() -> None:
    repair = RepairRecord(group=2, step=7, slice=3, donor=0, num_bytes=100, repair_s=0.5)
    lines = [missing(1.0, 0, 1), missing(2.0, 0, 0), Line(source="group-0002-rank-0", at_s=1.5, record=repair)]
    assert [decode_line(encode_line(line)) for line in lines] == lines
    summary = summarize(journal_of(*lines))
    assert summary.slices_repaired == 1
    assert summary.full_redundancy_s == (1.0,)


def test_a_member_must_have_voted_on_audits_and_a_group_that_was_lost_before_its_vote_need_not() -> None:
    contributions = [
        ContributionRecord(group=group, step=3, attempt=4, epoch=0, members=[0, 1, 2], microbatches={}, kept=[])
        for group in range(3)
    ]
    found = [AuditRecord(group=group, step=3, attempt=4, digests=[], num_added=0) for group in (1, 2)]
    assert list(_missing(found, contributions, {1, 2})) == []
    assert list(_missing(found, contributions, {0, 1, 2})) == [
        ("unknown", "the journal lacks what group 0 has voted about audits")
    ]
