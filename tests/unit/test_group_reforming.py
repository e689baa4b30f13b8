"""Machines of broken groups take places of others: small histories, drawn by hand.

Random ones are in `tests/protocol/test_machines.py`, by the same simulation.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.places import Holding
from spare_megatron.stacking.layout import GroupId, MachineId, Member, PlaceId
from spare_megatron.store import keys
from spare_megatron.supervisor.places.group_reforming import AssignmentList, GroupReforming
from tests.protocol.machines import INTERVAL_S, TICK_S, World, clocked, config_of, found_in, settle
from tests.unit.memory_store import MemoryStore

MakeWorld = Callable[[RunConfig], World]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    worlds: list[World] = []
    with clocked() as clock:

        def make(config: RunConfig) -> World:
            worlds.append(World(clock, 0, config))
            return worlds[-1]

        yield make
        for world in worlds:
            world.close()


def test_machines_of_two_broken_groups_make_one_whole(make_world: MakeWorld) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    world.lose_machine(0)
    world.tick(24)
    assert world.whole() == {1, 2, 3}
    assert world.records == [], "one group alone has no use for its machine"
    world.lose_machine(3)
    lost_at_s = world.clock.now_s
    settle(world)
    assert world.whole() == {0, 2, 3}
    assert world.clock.now_s - lost_at_s <= 4.5 * INTERVAL_S
    (record,) = {record.index: record for record in world.records}.values()
    assert record.holdings == [[2, 0, 1]]
    assert record.places == [[0, None], [1, 1], [2, 2], [3, None]]
    assert found_in(world) == []


def test_a_group_that_is_asked_to_leave_is_not_made_whole_and_gives_no_machine(make_world: MakeWorld) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    world.left_out = frozenset({GroupId(0)})
    for machine in (0, 3):
        world.lose_machine(machine)
    world.tick(24)
    assert world.records == []
    world.lose_machine(5)
    world.tick(24)
    assert world.whole() == {1, 3}
    assert [record.holdings for record in world.records[:1]] == [[[4, 3, 1]]]


def test_machines_of_groups_that_have_left_go_without_a_fence_and_the_groups_are_re_formed_if_asked_for(
    make_world: MakeWorld,
) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    world.drain_group(0)
    world.tick(8)
    world.lose_machine(0)
    world.tick(24)
    world.replace_machine(0)
    world.tick(8)
    assert not world.store.exists(keys.entry(0)), "a fence costs the others a reduction"
    assert world.whole() == {1, 2, 3}
    world.lose_machine(8)
    world.lose_machine(3)
    world.tick(24)
    assert world.whole() == {2, 3}
    world.ask_for_groups()
    settle(world)
    assert world.whole() == {0, 2, 3}
    assert found_in(world) == []


def test_a_machine_that_loses_its_group_again_and_again_leaves_its_place_and_the_others_lose_no_restart(
    make_world: MakeWorld,
) -> None:
    world = make_world(config_of(4, 2, rejoins=2))
    world.tick(8)
    for group, machine in ((0, 0), (1, 3)):
        for num_losses in range(1, 4):
            assert group in world.whole()
            world.machines[machine].lose(is_own=True)
            world.tick(round((4 + 2**num_losses) * INTERVAL_S / TICK_S))
    settle(world)
    world.tick(8)
    assert set(world.machines) == {1, 2, 3, 4, 5, 6, 7}, "machine 2 has the place of machine 0"
    assert len(world.whole()) == 3
    assert found_in(world) == []
    survivors = [world.machines[machine] for machine in (1, 2)]
    for _ in range(2):
        survivors[0].lose(is_own=True)
        settle(world)
    assert len(world.whole()) == 3, "losses that began on the other machine do not count on this one"


def test_a_replacement_is_waited_for_as_long_as_it_may_take(make_world: MakeWorld) -> None:
    world = make_world(config_of(2, 2, reform_after_s=20.0))
    world.tick(8)
    world.lose_machine(0)
    world.lose_machine(3)
    world.tick(round(19.0 / TICK_S))
    assert world.records == []
    world.replace_machine()
    world.tick(round(8.0 / TICK_S))
    assert len(world.whole()) == 1
    assert {len(record.places) for record in world.records} == {0}, "it has its machine's place, and no group moves"


def test_a_machine_that_is_lost_on_its_way_is_replaced_by_another(make_world: MakeWorld) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    for machine in (0, 3, 5):
        world.lose_machine(machine)
    while not world.records:
        world.tick()
    (mover,) = {machine for record in world.records for machine, *_ in record.holdings}
    world.lose_machine(mover)
    settle(world)
    assert world.num_moves > 0
    assert len(world.whole()) == 2
    assert found_in(world) == []


def test_one_that_comes_back_to_a_taken_place_takes_the_one_that_was_left(make_world: MakeWorld) -> None:
    world = make_world(config_of(2, 2))
    world.tick(8)
    world.suspended.add(0)
    world.lose_machine(3)
    settle(world)
    assert world.whole() == {0}
    world.resume_machine()
    world.tick(16)
    assert world.whole() == {0}
    assert {one.place for one in world.active} == {0, 1, 2}
    world.replace_machine()
    settle(world)
    assert world.whole() == {0, 1}
    assert found_in(world) == []


def test_a_group_waits_for_a_machine_until_it_has_come_whatever_the_former_one_of_its_place_published(
    make_world: MakeWorld,
) -> None:
    """The one that left the place was ready for the same incarnation, and the place is given a beat before it comes."""
    world = make_world(config_of(2, 2))
    world.tick(8)
    world.suspended.add(0)
    world.lose_machine(3)
    settle(world)
    world.replace_machine(3)
    world.tick(16)
    assert world.whole() == {0}
    world.resume_machine()
    settle(world)
    assert world.whole() == {0, 1}
    assert {one.member for one in world.active} == {Member(GroupId(0), 1), Member(GroupId(1), 1)}


def test_a_machine_lost_while_places_are_read_is_not_counted_on() -> None:
    """Its successor took it for lost, as whom to leave the assignment to, and for alive, as the holder of a place."""
    config = config_of(4, 2)
    nodes = range(config.parallel.num_nodes)

    class Store(MemoryStore):
        def get(self, wanted: Sequence[str]) -> list[str | None]:
            found = super().get(wanted)
            if len(wanted) > 1 and keys.last_beat(1) in wanted and self.lose_next:
                self.values[keys.last_beat(1)] = self.values[keys.beat(1)]
            return found

        lose_next = False

    store = Store({keys.ALL_GROUPS_READY: "1", **{keys.beat(node): "7" for node in nodes}})
    for node in (0, 3, 5):
        store.put(keys.last_beat(node), "7")
    for group in range(3):
        store.put(keys.part_fenced(Member(GroupId(group), 0)), '[0, 0, ""]')
    assignments = AssignmentList(store, config.parallel)
    reforming = GroupReforming(config, MachineId(2))
    store.lose_next = True
    assert reforming.poll(store, assignments, PlaceId(2)) is None, "by what was read machine 1 is to do it"
    assigned = reforming.poll(store, assignments, PlaceId(2))
    assert assigned is not None
    assert assigned.assignment.holdings == (Holding(MachineId(4), PlaceId(3), 1),)


def sizes_of(world: World) -> dict[int, int]:
    """The stages of the groups that train."""
    return {group: len(world.places_of(member)) for group, member in sorted(world.training.items())}


def test_a_group_goes_on_with_fewer_stages_and_grows_with_the_machine_that_comes(make_world: MakeWorld) -> None:
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.lose_machine(1)
    world.tick(40)
    assert sizes_of(world) == {0: 3, 1: 4, 2: 4}
    world.replace_machine(1)
    settle(world)
    assert sizes_of(world) == {0: 4, 1: 4, 2: 4}
    assert world.training[GroupId(0)].incarnation == 2
    assert [[record.holdings, record.stages] for record in {one.index: one for one in world.records}.values()] == [
        [[[3, 1, 1]], [[0, 3]]],
        [[[13, 3, 1]], [[0, 4]]],
    ]
    assert found_in(world) == []


def test_a_machine_that_was_only_silent_lets_its_group_grow_again(make_world: MakeWorld) -> None:
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.suspended.add(3)
    world.tick(40)
    assert sizes_of(world) == {0: 3, 1: 4, 2: 4}
    world.suspended.clear()
    settle(world)
    assert sizes_of(world) == {0: 4, 1: 4, 2: 4}
    assert found_in(world) == []


def test_a_machine_that_its_group_does_without_takes_a_place_of_a_broken_group(make_world: MakeWorld) -> None:
    """Machine 3 comes back while two machines of group 1 are lost, before either has written anything."""
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.suspended.add(3)
    world.tick(40)
    places = AssignmentList(world.store, world.layout).read()
    reforming = GroupReforming(world.config, MachineId(4))
    world.suspended.clear()
    world.tick(1)
    assert reforming._idle(world.store, places, places.smaller_groups) == (3,)
    assert places.reform([PlaceId(6), PlaceId(7)], 1, {}, (MachineId(3),), world.config.pipeline_times).holdings == (
        Holding(MachineId(3), PlaceId(6), 1),
    )


def test_a_slow_machine_that_its_group_does_without_holds_nobody_up(make_world: MakeWorld) -> None:
    """Its group was asked to leave in each of its incarnations, since a place of it has a slow machine."""
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.call_slow(3)
    world.suspended.add(3)
    world.tick(60)
    assert sizes_of(world) == {0: 3, 1: 4, 2: 4}
    assert world.training[GroupId(0)].incarnation == 1
    assert world.assignments.counts["quarantine, slow"] == 1


def test_a_machine_that_comes_to_a_further_place_moves_to_the_next_one_of_its_group(make_world: MakeWorld) -> None:
    """Machines 6 and 7 are lost, and 7 is replaced: group 1 has three machines, but not in its first places."""
    world = make_world(config_of(3, 4, 2))
    world.tick(8)
    world.lose_machine(6)
    world.lose_machine(7)
    world.tick(60)
    assert sizes_of(world) == {0: 4, 1: 2, 2: 4}
    world.replace_machine(7)
    settle(world)
    assert sizes_of(world) == {0: 4, 1: 3, 2: 4}
    records = {record.index: record for record in world.records}
    assert [record.holdings for record in records.values()] == [[[19, 7, 1]], [[19, 6, 1]]]
    assert found_in(world) == []
