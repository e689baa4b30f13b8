"""Machines in random histories: lost, cut off and replaced between any two requests, while they re-form groups."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.core.machines import reforming
from spare_megatron.core.machines.places import Assignment, Places, Quarantine
from spare_megatron.core.machines.reforming import lengths_to_make
from spare_megatron.core.slow_machines import examination_rules
from spare_megatron.formats.codec import encode
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member, PlaceId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.supervisor import store_watch
from spare_megatron.supervisor.places import group_reforming
from spare_megatron.supervisor.places.group_reforming import Assigned, AssignmentList, GroupReforming
from spare_megatron.supervisor.places.group_rendezvous import GroupRendezvous
from spare_megatron.supervisor.restarts import GroupRestarts
from spare_megatron.supervisor.store_watch import StoreLink
from tests.protocol import machines
from tests.protocol.machines import World, clocked, config_of, found_in, settle
from tests.protocol.violation import Violation

NUM_HISTORIES = 15
MAX_SEEDS = 30


@contextmanager
def planted(classes: Mapping[Any, Mapping[str, object]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, names in classes.items():
            for name, value in names.items():
                patch.setattr(module, name, value)
        yield


class AnyoneWrites(GroupReforming):
    """All machines of broken groups assign places, not the lowest alone."""

    def _is_lowest(self, places: Places, groups: Sequence[GroupId], empty: Sequence[PlaceId]) -> bool:
        return bool(empty)


def run_history(seed: int, *, has_lengths: bool = False, **changes: Any) -> World:
    """Faults strike for a while; then as many groups have to train as there are machines for. Raises Violation.
    `has_lengths`: groups that lack machines may have fewer stages.
    """
    num_groups, size = ((4, 2), (3, 3), (4, 3))[seed % 3]
    least = None
    if has_lengths:
        num_groups, size, least = ((4, 3, 2), (3, 4, 3), (3, 4, 2))[seed % 3]
    with clocked() as clock:
        world = World(clock, seed, config_of(num_groups, size, least), slowness=(0.0, 0.01, 0.1, 0.3)[seed % 4])
        for name, value in changes.items():
            setattr(world, name, value)
        try:
            world.tick(4)
            world.fault_rate = (0.12, 0.2)[seed % 2] / (8 * num_groups * size)
            world.faults = [
                World.lose_rank, World.lose_machine, World.lose_machine, World.replace_machine, World.suspend_machine,
                World.resume_machine, World.resume_machine, World.outvote_machine, World.call_slow, World.cure_machines,
            ]  # fmt: skip
            world.tick(150)
            world.faults = []
            world.cure_machines()
            while world.suspended:
                world.resume_machine()
            settle(world)
            world.tick(8)
            if found := found_in(world):
                raise Violation("; ".join(found))
        finally:
            world.close()
    return world


def run_histories(seeds: Iterable[int], **changes: Any) -> Counter[str]:
    """What happened in them."""
    counts = Counter[str]()
    for seed in seeds:
        world = run_history(seed, **changes)
        counts += world.assignments.counts
        counts["place left"] += world.num_moves
    return counts


@pytest.mark.parametrize("reforming_type", [GroupReforming, AnyoneWrites])
def test_no_history_of_machines_violates_an_invariant(reforming_type: type[GroupReforming]) -> None:
    with planted({group_reforming: {"GroupReforming": reforming_type}}):
        counts = run_histories(range(NUM_HISTORIES))
    least = {"assignment": 30, "re-forming": 15, "moved machine": 15, "admission": 30, "place left": 20}
    least |= {"shard without a host": 5, "quarantine, outvoted": 5, "quarantine, slow": 5, "release": 10}
    assert {what: counts[what] for what in least if counts[what] < least[what]} == {}


def test_no_history_of_groups_with_fewer_stages_violates_an_invariant() -> None:
    counts = run_histories(range(NUM_HISTORIES), has_lengths=True)
    least = {"re-forming": 40, "smaller group": 25, "admission of a smaller group": 25, "growth": 10}
    least |= {"machine that a group does without": 10, "shard without a host": 20, "quarantine, outvoted": 10}
    assert {what: counts[what] for what in least if counts[what] < least[what]} == {}


def lose_third(world: World) -> None:
    if len(world.machines) > 29:
        world.lose_machine()


@pytest.mark.parametrize("seed", range(3))
def test_three_dead_machines_of_8_groups_of_4_leave_7_groups(seed: int) -> None:
    """The third dies in the middle of the re-forming for the first two, after any request of any machine."""
    with clocked() as clock:
        world = World(clock, seed, config_of(8, 4))
        try:
            world.tick(4)
            world.lose_machine(0)
            world.lose_machine(5)
            while not world.assignments.counts["re-forming"]:
                world.tick()
            world.faults, world.fault_rate = [lose_third], 0.02
            while len(world.machines) > 29:
                world.tick()
            settle(world)
            assert len(world.whole()) == len(world.training) == 7
            assert len(world.machines) == 29
            assert found_in(world) == []
        finally:
            world.close()


# ------------------------------------------------------------------------------------------------------ planted bugs


class KeepsFormerPlaces(Places):
    """Takes a machine that has moved for the holder of its former place, too."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._last = {PlaceId(place): MachineId(place) for place in range(layout.num_nodes)}

    def apply(self, assignment: Assignment) -> None:
        super().apply(assignment)
        self._last |= {holding.place: holding.machine for holding in assignment.holdings}

    def holder_of(self, place: PlaceId) -> MachineId | None:
        return self._last[place]


class IgnoresShards(Places):
    """Completes the groups that lack fewest machines, whichever shards have no host."""

    def reform(self, empty: Any, groups_per_domain: int, unhosted: Any, *others: Any, **named: Any) -> Assignment:
        chosen = super().reform(empty, groups_per_domain, {}, *others, **named)
        return replace(chosen, shards=tuple(unhosted))


class ForgetsStages(Places):
    """Takes all groups for whole ones."""

    def stages_of(self, group: GroupId) -> int:
        return self._layout.pipeline_parallel


class MakesWholeGroupsAlone(Places):
    """Has machines wait that could make a smaller group."""

    def reform(self, empty: Any, groups_per_domain: int, unhosted: Any, *others: Any, **named: Any) -> Assignment:
        with planted({reforming: {"lengths_to_make": lambda *given: lengths_to_make(*given)[:1]}}):
            return super().reform(empty, groups_per_domain, unhosted, *others, **named)


class DecidesAlone(GroupRendezvous):
    """Starts its part with the stages that the list has by now, whatever the first node has started with."""

    def _stages_if_ready(self, store: Any, member: Member, readiness: Any, read_places: Any) -> int | None:
        begun = super()._stages_if_ready(store, member, readiness, read_places)
        return begun and read_places().stages_of(member.group)


class StaysWhereItWas(StoreLink):
    """Goes on in a place that another machine has been given."""

    def _is_replaced(self) -> bool:
        return False


class GivesEarlierGroupsAway(GroupReforming):
    """Takes a group for broken that was, in an incarnation before the present one."""

    def _broken(self, store: ControlStore) -> list[Member]:
        groups = map(GroupId, range(self._layout.num_groups))
        return [Member(group) for group in groups if store.exists(keys.part_fenced(Member(group)))]


class OverwritesAssignments(AssignmentList):
    """Writes its assignment over the last one that it has read."""

    def append(self, assignment: Assignment) -> Assigned | None:
        self._store.put(keys.assignment(max(0, len(self._entries) - 1)), encode(assignment))
        return super().append(assignment)


class StartsInQuarantine(GroupRestarts):
    """Starts its group again whatever has been found of the machine."""

    def hold(self) -> None:
        pass


class ForgetsWithTheMachine(Places):
    """Takes a supervisor that replaces another one for a machine that nothing is known of."""

    def quarantine_of(self, machine: MachineId) -> Quarantine | None:
        found = super().quarantine_of(machine)
        return found if found is not None and found.machine == machine else None


def has_all_but_one(world: World, member: Member) -> bool:
    return len(world.joined[member]) >= len(world.layout.nodes_of(member.group)) - 1


Planted = tuple[Mapping[Any, Mapping[str, object]], Mapping[str, object], str]
BUGS: dict[str, Planted] = {
    "gives a machine two places": (
        {group_reforming: {"Places": KeepsFormerPlaces}},
        {},
        "counts as in place",
    ),
    "ignores shards without a host": ({group_reforming: {"Places": IgnoresShards}}, {}, "not the best"),
    "stays in a place that another machine has": (
        {store_watch: {"StoreLink": StaysWhereItWas}},
        {},
        "taken by two|no end",
    ),
    "admits a group with a missing place": ({}, {"is_whole": has_all_but_one}, "is admitted without places"),
    "moves machines of groups that train": (
        {group_reforming: {"GroupReforming": GivesEarlierGroupsAway}},
        {},
        "are re-formed, and train",
    ),
    "readmits a machine in quarantine": ({machines: {"GroupRestarts": StartsInQuarantine}}, {}, "in quarantine"),
    "forgets a quarantine with the supervisor": (
        {group_reforming: {"Places": ForgetsWithTheMachine}},
        {},
        "is in quarantine, and gets place",
    ),
    "ends a quarantine though the examination has failed": (
        {examination_rules: {"judge_examination": lambda own, likes: ""}},
        {},
        "and it computes wrongly",
    ),
    "forgets how many stages groups have": (
        {group_reforming: {"Places": ForgetsStages}},
        {"has_lengths": True},
        "stages, and has|no end",
    ),
    "makes whole groups alone": (
        {group_reforming: {"Places": MakesWholeGroupsAlone}},
        {"has_lengths": True},
        "no end",
    ),
    "starts parts of a group with unequal stages": (
        {store_watch: {"GroupRendezvous": DecidesAlone}},
        {"has_lengths": True},
        "stages here, and",
    ),
    "gives a place to two machines": ({store_watch: {"AssignmentList": OverwritesAssignments}}, {}, "written once"),
}


FIRST_SEEDS = {
    "makes whole groups alone": 2,
    "moves machines of groups that train": 20,
    "forgets a quarantine with the supervisor": 40,
    "starts parts of a group with unequal stages": 11,
}
"""Seeds before these find nothing or something else, and take long."""


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_of_machines_finds_a_protocol_that(bug: str) -> None:
    classes, changes, found_as = BUGS[bug]
    first = FIRST_SEEDS.get(bug, 0)
    with planted(classes), pytest.raises(Violation, match=found_as):
        run_histories(range(first, first + MAX_SEEDS), **changes)
