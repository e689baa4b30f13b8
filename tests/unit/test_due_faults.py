"""Which faults had to strike, from hand-drawn logs."""

from typing import Any

import pytest

from spare_megatron.journal.fold import Fold, fold_log
from spare_megatron.journal.proofs.proof import is_due
from tests.unit.journal_in_memory import run_record

RUN = run_record(3)


def commit(step: int, attempt: int) -> dict[str, Any]:
    return {"entry": "commit", "step": step, "attempt": attempt}


def fence(group: int, incarnation: int = 0) -> dict[str, Any]:
    return {"entry": "fence", "group": group, "incarnation": incarnation}


RETRY = {"entry": "retry", "step": 1, "attempt": 1}


def log(*entries: dict[str, Any]) -> Fold:
    return fold_log(dict(enumerate(entries)), RUN)


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
