"""What the journal says of a pause: shards without a host, the groups that came back, and sums from zero."""

from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.journal.files import Line
from spare_megatron.journal.fold import Fold, fold_log
from spare_megatron.journal.records import EntryRecord
from spare_megatron.journal.state.overview import UNPROVEN, overview_of
from spare_megatron.journal.state.run_state import RunState
from tests.unit.journal_in_memory import run_record

RUN = run_record(4, redundancy=2, num_steps=9, placement="golomb")
LOST = [{"entry": "fence", "group": group, "incarnation": 0} for group in (0, 1)]
COMMIT = {"entry": "commit", "step": 0, "attempt": 0}
RETRY = {"entry": "retry", "step": 1, "attempt": 1, "kept": [2]}
BACK = [[0, 1], [1, 1]]


def resume(admit: list[list[int]], step: int = 1, attempt: int = 2) -> dict[str, Any]:
    return {"entry": "resume", "step": step, "attempt": attempt, "admit": admit}


def folded(*entries: dict[str, Any]) -> Fold:
    return fold_log(dict(enumerate(entries)), RUN)


def test_a_pause_ends_with_hosts_and_a_step_that_holds_nothing_of_earlier_attempts() -> None:
    fold = folded(COMMIT, *LOST, RETRY, resume(BACK), COMMIT | {"step": 1, "attempt": 3})
    assert fold.errors == []
    assert fold.groups == {0, 1, 2, 3}
    assert [attempt.attempt for attempt in fold.commits[-1].attempts] == [3]
    assert fold.commits[-1].attempts[0].kept == ()
    assert fold.opened[3] == {0: 1, 1: 1, 2: 0, 3: 0}
    assert fold.resumed == {(0, 1)}


def test_the_journal_says_which_groups_have_come_back_with_fewer_stages() -> None:
    run = replace(RUN, ranks_per_group=8, ranks_per_stage=2)
    entries = [COMMIT, *LOST, RETRY, resume(BACK) | {"stages": [4, 3]}]
    assert fold_log(dict(enumerate(entries)), run).stages == {1: 3}
    [error] = fold_log(dict(enumerate([*entries[:-1], resume(BACK) | {"stages": [5, 3]}])), run).errors
    assert "2 members have (5, 3) stages, each at most 4" in error


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ((COMMIT, *LOST, RETRY, resume([])), "no group hosts shards [1]"),
        ((COMMIT, LOST[0], RETRY, resume([[0, 1]])), "every shard had a host"),
        ((COMMIT, *LOST, RETRY, resume(BACK, attempt=1)), "resumes in attempt 2 of step 1"),
        ((COMMIT, *LOST, RETRY, resume([[0, 0], [1, 0]])), "no group hosts shards [1]"),
        ((COMMIT, {"entry": "omen"}), "log entry 1: unknown kind of entry 'omen'"),
    ],
    ids=["without hosts", "without a pause", "another attempt", "fenced incarnations", "an unknown entry"],
)
def test_a_pause_that_did_not_end_so_is_an_error(entries: tuple[dict[str, Any], ...], error: str) -> None:
    [found] = folded(*entries).errors
    assert error in found


def test_a_run_says_that_it_is_paused_and_what_that_has_cost() -> None:
    run_state = RunState()
    run_state.add_line(Line(source="driver", at_s=0.0, record=RUN))
    entries = [COMMIT, COMMIT | {"step": 1, "attempt": 1}, COMMIT | {"step": 2, "attempt": 2}, *LOST]
    entries += [RETRY | {"step": 3, "attempt": 3}, resume(BACK, 3, 4), COMMIT | {"step": 3, "attempt": 5}]
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
