"""Has machines of broken groups take empty places of others, through the list of assignments in the control store. The
lowest machine of a broken group writes an entry, which binds: a machine that loses its place, or gets another, ends its
ranks. The list also says which machines are in quarantine: their places are empty.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.failure_detector import ENDED
from spare_megatron.core.machines.places import Assignment, Holding, Places, Quarantine
from spare_megatron.formats.codec import decode, encode
from spare_megatron.journal.records import PlacesRecord
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member, PlaceId, ShardId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.supervisor.places.group_rendezvous import present_members

BEATS_PER_INCARNATION = 1 << 32
"""Heartbeats are counted from a multiple of this, so that those of two supervisors of a place never equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """An assignment and its index in the list."""

    index: int
    assignment: Assignment

    def record(self, layout: Layout) -> PlacesRecord:
        assignment = self.assignment
        return PlacesRecord(
            index=self.index,
            num_places=layout.num_nodes,
            holdings=[list(holding) for holding in assignment.holdings],
            places=[list(place) for place in assignment.places],
            idle=list(assignment.idle),
            shards=list(assignment.shards),
            quarantined=[[one.machine, one.cause, one.reason] for one in assignment.quarantined],
            released=list(assignment.released),
            stages=[list(one) for one in assignment.stages],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTaken:
    """The machine holds this place from now on, by this assignment."""

    holding: Holding
    by: Assigned


class AssignmentList:
    """The list of assignments over one store connection, as far as it was read."""

    def __init__(self, store: ControlStore, layout: Layout) -> None:
        self._store = store
        self._layout = layout
        self._entries: list[Assignment] = []
        self.places = Places(layout)

    def read(self) -> Places:
        """Reads what is new in the list."""
        while (text := self._store.get([keys.assignment(len(self._entries))])[0]) is not None:
            self._entries.append(decode(text, Assignment))
            self.places.apply(self._entries[-1])
        return self.places

    def append(self, assignment: Assignment) -> Assigned | None:
        """Writes the assignment after those that were read; None if another one was written there."""
        index, text = len(self._entries), encode(assignment)
        after = keys.assignment(index - 1) if index else None
        is_written = self._store.put_if_absent(keys.assignment(index), text, after) == text
        self.read()
        if not is_written:
            return None
        for holding in assignment.holdings:
            # Without a beat of its own the place would count as empty until the machine has come.
            self._store.put(keys.beat(holding.place), str(holding.incarnation * BEATS_PER_INCARNATION))
        return Assigned(index=index, assignment=assignment)

    def poll(self) -> Places:
        """Reads what is new in the list, if anything is, in one request."""
        return self.read() if self._store.exists(keys.assignment(len(self._entries))) else self.places

    def quarantine(self, quarantine: Quarantine) -> Assigned | None:
        """Puts the machine into quarantine; None if it is in one, or was for the same reason."""
        while self.read().is_new(quarantine):
            if (assigned := self.append(Assignment(holdings=(), quarantined=(quarantine,)))) is not None:
                return assigned
        return None

    def release(self, machine: MachineId) -> Assigned | None:
        """Ends the machine's quarantine; None if it is in none."""
        while self.read().quarantine_of(machine) is not None:
            if (assigned := self.append(Assignment(holdings=(), released=(machine,)))) is not None:
                return assigned
        return None

    def beginning_of(self, quarantine: Quarantine) -> Assigned:
        """The entry by which this quarantine began."""
        index = next(i for i, one in reversed(list(enumerate(self._entries))) if quarantine in one.quarantined)
        return Assigned(index=index, assignment=self._entries[index])

    def last_of(self, holding: Holding) -> PlaceTaken:
        """How this holding began."""
        index = next(i for i, one in reversed(list(enumerate(self._entries))) if holding in one.holdings)
        return PlaceTaken(holding=holding, by=Assigned(index=index, assignment=self._entries[index]))


class GroupReforming:
    """One machine's part in re-forming groups, while its own is broken. For the thread that calls the store.
    `left_out`: groups that have left the run or are asked to, which are not re-formed.
    """

    def __init__(
        self, config: RunConfig, machine: MachineId, left_out: Callable[[], frozenset[GroupId]] = frozenset
    ) -> None:
        self._layout = config.parallel
        self._machine = machine
        self._groups_per_domain = config.spare.groups_per_domain
        self._times = config.pipeline_times
        self._after_s = reform_after_s(config)
        self._left_out = left_out
        # Shards that all groups can read need no host.
        self._placement = None if config.data.access == "shared" else config.placement
        self._has_begun = False  # training
        self._broken_since_s: dict[Member, float] = {}

    def poll(self, store: ControlStore, assignments: AssignmentList, place: PlaceId) -> Assigned | None:
        """Assigns places if groups have lacked a machine for long enough, and this is the machine to do it. If its
        group does without it, it lets the group grow.
        """
        self._has_begun = self._has_begun or store.exists(keys.ALL_GROUPS_READY)
        (group,) = self._layout.groups_on(place)
        places = assignments.places
        lacking = self._empty_of(store, places, [group])
        if place in places.beyond(group) and place not in lacking:  # it is in no quarantine
            grown = places.advance(self._machine, place, lacking)
            if grown.holdings or grown.stages:
                return assignments.append(grown)
        if not self._has_begun or not self._is_lowest(places, [group], lacking):
            return None
        empty = {member: self._empty_of(store, places, [member.group]) for member in self._broken(store)}
        now_s = time.monotonic()
        self._broken_since_s = {
            member: self._broken_since_s.get(member, now_s)
            for member, lacking in empty.items()
            if not places.suffice(member.group, lacking)  # else it may start, and train, at any time
        }
        due = [member for member, since_s in self._broken_since_s.items() if now_s - since_s >= self._after_s]
        found = [place for member in due for place in empty[member]]
        # By the same places: had a machine been lost in between, its place would have to be filled, too.
        if not self._is_lowest(places, [member.group for member in due], found):
            return None
        unhosted = self._unhosted([member.group for member in empty])
        idle = self._idle(store, places, places.smaller_groups - {member.group for member in empty})
        assignment = places.reform(found, self._groups_per_domain, unhosted, idle, self._times)
        return assignments.append(assignment) if assignment.holdings or assignment.stages else None

    def take_place(self, store: ControlStore, assignments: AssignmentList) -> PlaceTaken:
        """Takes a place for the machine, and ends its quarantine. ValueError: it was replaced itself."""
        while True:
            places = assignments.read()
            broken = [] if places.held_by(self._machine) else [member.group for member in self._broken(store)]
            groups = {*broken, *places.smaller_groups} - self._left_out()
            empty = {group: self._empty_of(store, places, [group]) for group in groups}
            lacking, further = list[PlaceId](), list[PlaceId]()
            for group, of_group in empty.items():
                is_lacking = group in broken and not places.suffice(group, of_group)
                (lacking if is_lacking else further).extend(of_group)
            unhosted = self._unhosted(broken)
            chosen = places.replace(
                self._machine, lacking, self._groups_per_domain, unhosted, self._times, of_smaller=further
            )
            if places.quarantine_of(self._machine) is not None:
                chosen = replace(chosen, released=(self._machine,))
            assigned = assignments.append(chosen)
            held = assignments.places.held_by(self._machine)
            if assigned is not None and held is not None:
                return PlaceTaken(holding=held, by=assigned)

    def _broken(self, store: ControlStore) -> list[Member]:
        """The groups whose present incarnation is fenced or has left the run, but for those that are left out."""
        left_out = self._left_out()
        groups = [GroupId(group) for group in range(self._layout.num_groups) if group not in left_out]
        present = present_members(store, groups)
        fenced = store.get([keys.part_fenced(member) for member in present])
        # A node that has not published that is alive, or its silence has had the member fenced.
        left = store.get([keys.has_left(member, self._layout.nodes_of(member.group)[0]) for member in present])
        return [member for member, *texts in zip(present, fenced, left, strict=True) if texts != [None, None]]

    def _unhosted(self, broken: Iterable[GroupId]) -> dict[ShardId, Collection[GroupId]]:
        """The shards that no group hosts besides the broken ones and those that are left out, and their hosts."""
        if self._placement is None:
            return {}
        alive = frozenset(map(GroupId, range(self._placement.num_groups))) - self._left_out() - {*broken}
        return {shard: self._placement.hosts[shard] for shard in self._placement.uncovered(alive)}

    def _empty_of(self, store: ControlStore, places: Places, groups: Iterable[GroupId]) -> list[PlaceId]:
        return empty_places(store, places, [PlaceId(node) for group in groups for node in self._layout.nodes_of(group)])

    def _idle(self, store: ControlStore, places: Places, groups: Iterable[GroupId]) -> tuple[MachineId, ...]:
        """The machines that these groups do without."""
        beyond = [place for group in groups for place in places.beyond(group)]
        there = set(beyond).difference(empty_places(store, places, beyond))
        return tuple(sorted(machine for place in there if (machine := places.holder_of(place)) is not None))

    def _is_lowest(self, places: Places, groups: Sequence[GroupId], empty: Sequence[PlaceId]) -> bool:
        """Whether these groups lack a machine in the places `empty`, and this one is the lowest that they have."""
        held = {PlaceId(node) for group in groups for node in self._layout.nodes_of(group)} - set(empty)
        machines = [machine for place in held if (machine := places.holder_of(place)) is not None]
        return bool(empty) and min(machines, default=None) == self._machine


def empty_places(store: ControlStore, places: Places, of_groups: Sequence[PlaceId]) -> list[PlaceId]:
    """Those that no machine holds, or one that has ended, is silent, in quarantine or gave its place up."""
    if not of_groups:
        return []
    beats = store.get([keys.beat(place) for place in of_groups])
    last = store.get([keys.last_beat(place) for place in of_groups])
    holders = [places.holder_of(place) for place in of_groups]
    given_up = store.get([keys.given_up(-1 if machine is None else machine) for machine in holders])
    return [
        place
        for place, beat, last_beat, text in zip(of_groups, beats, last, given_up, strict=True)
        if places.is_empty(place) or beat in (None, ENDED, last_beat) or text is not None
    ]


def reform_after_s(config: RunConfig) -> float:
    """`spare.reform_after_s`, or how long the replacements of a job with spare nodes take to come."""
    if config.spare.reform_after_s is not None:
        return config.spare.reform_after_s
    return 60.0 if config.cluster.launcher == "srun" and config.slurm.num_spare_nodes else 0.0
