"""What `spare check` and the views of a run make of machines that take places."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.core.machines.places import Assignment, Holding, Places
from spare_megatron.formats.codec import decode, encode
from spare_megatron.journal.event_texts import text_of_places
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.fold import placement_of
from spare_megatron.journal.proofs.check_machines import check_places
from spare_megatron.journal.records import PlacesRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId, ShardId
from spare_megatron.stacking.paces import PipelineTimes
from spare_megatron.tools.report.page import _figures_of
from spare_megatron.tools.report.trace import _marks
from tests.unit.journal_in_memory import run_record
from tests.unit.measured_run import valid_history

RE_FORMED = PlacesRecord(index=0, num_places=8, holdings=[[2, 0, 1]], places=[[0, None], [1, 1], [2, 2], [3, None]])
"""Four groups of two machines each; the first of group 0 and the second of group 1 are lost."""
RUN = replace(run_record(4), redundancy=2, ranks_per_group=6)
CAME_BACK = PlacesRecord(index=1, num_places=8, holdings=[[8, 2, 1]])
"""Another machine in the place of the first takes the place that was left."""


def found(*records: PlacesRecord, run: RunRecord = RUN) -> list[str]:
    view: Any = SimpleNamespace(rare=[SimpleNamespace(record=record) for record in records])
    return [finding.reason for finding in check_places(view, run)]


def changed(record: PlacesRecord, **fields: Any) -> PlacesRecord:
    return PlacesRecord(**{name: getattr(record, name) for name in record.__slots__} | fields)


def test_assignments_that_follow_each_other_are_right_even_if_one_is_missing() -> None:
    assert found(RE_FORMED, CAME_BACK, RE_FORMED) == []
    assert found(changed(CAME_BACK, index=7)) == []


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ((RE_FORMED, changed(RE_FORMED, holdings=[[1, 3, 1]])), "is journaled in two ways"),
        ((changed(RE_FORMED, holdings=[[2, 0, 1], [2, 3, 1]]),), "names machine 2 twice"),
        ((changed(RE_FORMED, holdings=[[2, 0, 1], [1, 0, 1]]),), "names place 0 twice"),
        ((changed(RE_FORMED, holdings=[[4, 0, 1]]),), "has the moves [[4, 0, 1]], and its inputs lead to [[2, 0, 1]]"),
        ((changed(RE_FORMED, holdings=[[2, 1, 1]]),), "has the moves [[2, 1, 1]], and"),
        ((changed(RE_FORMED, holdings=[[1, 3, 1], [2, 0, 1]]),), "its inputs lead to [[2, 0, 1]]"),
        ((RE_FORMED, changed(CAME_BACK, holdings=[[8, 0, 1]])), "begins incarnation 1 of place 0, which has had 1"),
        ((RE_FORMED, CAME_BACK, changed(CAME_BACK, index=2, holdings=[[0, 3, 1]])), "which another one has replaced"),
        ((RE_FORMED, changed(RE_FORMED, index=1, places=[[0, 0], [1, None]], holdings=[[0, 1, 1]])), "that of place 0"),
        ((changed(RE_FORMED, holdings=[]),), "has the moves [], and its inputs lead to [[2, 0, 1]]"),
    ],
)
def test_what_no_list_of_assignments_has_is_found(records: tuple[PlacesRecord, ...], reason: str) -> None:
    assert any(reason in one for one in found(*records)), found(*records)


def test_more_moves_than_it_takes_are_found() -> None:
    """Groups of three: one lacks a machine, two lack two."""
    places: list[list[int | None]] = [[place, None if place in (0, 4, 5, 6, 7) else place] for place in range(9)]
    record = PlacesRecord(index=0, num_places=12, holdings=[[3, 0, 1]], places=places)
    assert found(record) == []
    wasteful = changed(record, holdings=[[1, 4, 1], [2, 5, 1]])
    assert any("its inputs lead to [[3, 0, 1]]" in one for one in found(wasteful))
    hosts = placement_of(RUN).hosts
    for group, reasons in ((1, 0), (0, 1)):
        shard = next(shard for shard, groups in enumerate(hosts) if group in groups and 1 - group not in groups)
        assert len(found(changed(wasteful, shards=[shard]))) == reasons, "group 1 is chosen, by more moves"


SHORTER = replace(RUN, ranks_per_group=4, least_stages=2, num_layers=32, microbatches_per_shard=16, deal_by_pace=True)
"""Groups of four machines, which may have three or two stages."""
SMALLER = PlacesRecord(
    index=0,
    num_places=16,
    holdings=[[6, 0, 1]],
    places=[[place, None if place in (0, 3, 7) else place] for place in range(8)],
    stages=[[0, 3], [1, 2]],
)
GROWN = PlacesRecord(index=1, num_places=16, holdings=[[19, 3, 1]], stages=[[0, 4]])


def test_stages_that_follow_from_the_machines_of_groups_are_right() -> None:
    assert found(SMALLER, GROWN, run=SHORTER) == []
    again = changed(SMALLER, index=1, holdings=[[3, 2, 1]], places=[[0, 6], [1, 1], [2, None], [3, 3]], stages=[])
    assert found(SMALLER, again, run=SHORTER) == [], "three stages as before"
    assert found(GROWN, run=SHORTER) == found(changed(again, index=2, stages=[[0, 2]]), run=SHORTER) == []


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ((changed(SMALLER, stages=[[0, 2], [1, 3]]),), "has the stages [[0, 2], [1, 3]], and its inputs lead to [[0"),
        ((changed(SMALLER, stages=[]),), "has the stages [], and its inputs lead to [[0, 3], [1, 2]]"),
        ((SMALLER, changed(GROWN, stages=[[0, 3]])), "gives group 0 3 stages, which has 3"),
        ((SMALLER, changed(GROWN, stages=[[1, 2]])), "gives group 1 2 stages, which has 2"),
    ],
)
def test_stages_that_no_machines_are_there_for_are_found(records: tuple[PlacesRecord, ...], reason: str) -> None:
    assert any(reason in one for one in found(*records, run=SHORTER)), found(*records, run=SHORTER)


def test_each_assignment_is_one_event_of_the_run_and_in_report_and_timeline() -> None:
    run_state = RunState()
    run_state.add_line(Line(source="driver", at_s=1.0, record=run_record(4)))
    for source in ("supervisor-1", "supervisor-0-life-1"):
        run_state.add_line(Line(source=source, at_s=2.0, record=RE_FORMED))
    run_state.add_line(Line(source="supervisor-2-life-1", at_s=3.0, record=CAME_BACK))
    assert [event.text for event in run_state.events()] == [
        "machine 2 takes place 0 to make a group whole",
        "machine 8 takes place 2",
    ]
    assert ("places that other machines took", "2") in list(_figures_of(valid_history(run_state, 4.0)))
    smaller = PlacesRecord(index=1, num_places=4, holdings=[[3, 2, 1]], places=[[2, None], [3, 3]], stages=[[1, 1]])
    assert text_of_places(smaller) == "machine 3 takes place 2, group 1 is to run with 1 stages"
    journal = Journal(lines=(Line(source="", at_s=2.0, record=RE_FORMED),) * 2)
    trace = _marks(journal, origin_s=1.0, end_us=2_000_000)
    assert [(event["name"], event["ts"]) for event in trace] == [(run_state.events()[0].text, 1_000_000)]


def test_a_place_is_vacant_once_its_machine_has_left_it_and_the_list_is_read_as_it_was_written() -> None:
    places = Places(Layout(num_groups=4, pipeline_parallel=2, num_nodes=8))
    [other] = places.reform([PlaceId(0), PlaceId(3)], 1, {ShardId(2): [GroupId(1)]}).holdings
    assert other == Holding(MachineId(1), PlaceId(3), 1), "shard 2 has no host without group 1"
    chosen = places.reform([PlaceId(0), PlaceId(3)], 1, {ShardId(2): [GroupId(3)]})
    assert chosen.holdings == (Holding(MachineId(2), PlaceId(0), 1),)
    assert chosen.shards == (2,)
    assert decode(encode(chosen), Assignment) == chosen
    places.apply(chosen)
    assert [places.holder_of(PlaceId(place)) for place in range(4)] == [2, 1, None, 3]
    assert places.held_by(MachineId(0)) is None
    back = places.replace(MachineId(8), [], 1, {})
    assert back == Assignment(holdings=(Holding(MachineId(8), PlaceId(2), 1),))
    places.apply(back)
    assert places.has_replaced(MachineId(0))
    with pytest.raises(ValueError, match="node 0: another supervisor has replaced this one"):
        places.replace(MachineId(0), [], 1, {})


def shorter_places() -> tuple[Places, Callable[..., Assignment]]:
    """Four groups of four machines, which may have three or two stages; and `replace` of machine 16 + n."""
    places = Places(Layout(num_groups=4, pipeline_parallel=4, least_pipeline_parallel=2, num_nodes=16))
    times = PipelineTimes(num_layers=32, num_shards=4, num_microbatches=16)

    def replaced(machine: int, *empty: int) -> Assignment:
        """Groups 2 and 3 are broken if they lack a machine."""
        broken, of_smaller = ([PlaceId(place) for place in empty if (place < 8) == is_so] for is_so in (False, True))
        return places.replace(MachineId(machine), broken, 1, {}, times, of_smaller=of_smaller)

    places.apply(places.reform([PlaceId(0), PlaceId(3), PlaceId(7)], 1, {}, times=times))
    return places, replaced


def test_a_list_of_assignments_says_how_many_stages_groups_have() -> None:
    """Machines 0, 3 and 7 are lost: machine 6 takes place 0, so that groups 0 and 1 go on with 3 and 2 stages."""
    places, _ = shorter_places()
    assert [places.stages_of(GroupId(group)) for group in range(4)] == [3, 2, 4, 4]
    assert places.smaller_groups == {0, 1}
    assert [places.holder_of(PlaceId(place)) for place in (0, 3, 6, 7)] == [6, 3, None, 7]


@pytest.mark.parametrize(
    ("machine", "empty", "place", "stages"),
    [
        (19, [3, 6, 7], 3, {0: 4}),  # the place of the machine that it replaces
        (23, [3, 6, 7], 7, {}),  # likewise, and place 6 is empty
        (23, [3, 6, 7, 0], 7, {}),
        (19, [0, 3, 6, 7], 3, {}),  # the group lacks another, too
        (16, [0, 7], 7, {1: 4}),  # none that a group needs: its machine may only just be silent
        (23, [3, 7], 7, {1: 4}),
        (16, [3, 6, 7], 3, {0: 4}),  # that has lost its place: the lowest one of a smaller group
        (16, [6, 7], 6, {1: 3}),
        (16, [3, 6, 7, 13, 14, 15], 13, {3: 2}),  # a broken group comes first
        (16, [3, 6, 7, 12, 13, 14, 15], 3, {0: 4}),  # for which one machine is not enough
        (16, [], 6, {1: 4}),  # the lowest vacant place
    ],
)
def test_a_machine_that_comes_lets_a_group_start_or_grow(
    machine: int, empty: list[int], place: int, stages: dict[int, int]
) -> None:
    places, replaced = shorter_places()
    assignment = replaced(machine, *empty)
    assert [holding[:2] for holding in assignment.holdings] == [(machine, place)]
    assert dict(assignment.stages) == stages
    places.apply(decode(encode(assignment), Assignment))
    assert all(places.stages_of(GroupId(group)) == number for group, number in stages.items())
    assert places.smaller_groups == {0, 1, *stages} - {group for group, number in stages.items() if number == 4}
