"""How often groups were lost: each of their incarnations counts."""

from typing import Any

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import EntryRecord
from spare_megatron.journal.state.run_state import RunState
from tests.unit.journal_in_memory import run_record, summarize

RUN = run_record(3, name="incarnations")


def fence(group: int, **incarnation: int) -> dict[str, Any]:
    return {"entry": "fence", "group": group, "reason": "", "error": "", **incarnation}


def test_a_group_that_comes_back_and_is_lost_again_is_lost_twice() -> None:
    """Groups that rejoined counted by incarnation, those that were lost by number: 1 lost, 2 rejoined."""
    join = {"entry": "join", "group": 1}
    entries = [
        fence(1, incarnation=0),
        {**join, "incarnation": 1},
        fence(1, incarnation=1),
        fence(1, incarnation=1),  # two saw it
        {**join, "incarnation": 2},
        fence(2),
    ]
    records = [EntryRecord(group=0, index=index, entry=entry) for index, entry in enumerate(entries)]
    lines = [Line(source="test", at_s=float(at_s), record=record) for at_s, record in enumerate((RUN, *records))]
    run_state = RunState()
    for line in lines:
        run_state.add_line(line)
    run_state.settle(is_whole=True)
    assert run_state.damage == []
    assert dict(run_state.figures())["groups_lost"] == summarize(Journal(lines=tuple(lines))).groups_lost == 3
