"""What the journal says of a restart: from what was there, to what the groups held."""

from typing import Any

import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.fold import Finding, Fold, fold_log
from spare_megatron.journal.journal_view import steps_of
from spare_megatron.journal.proofs.check_state import check_restored
from spare_megatron.journal.records import ParamsRecord
from tests.unit.journal_in_memory import JournalInMemory, run_record

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
