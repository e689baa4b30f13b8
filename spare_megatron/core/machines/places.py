"""Which machine holds which place, which is in quarantine, and how many pipeline stages groups have: the fold of a list
of assignments, each written once in the control store.

At first machine i holds place i. Machine i + k x num_places replaces machine i for the k-th time, so that at most
num_places machines are in the run. A place that its machine has left is vacant until an assignment names it. A machine
that replaces one in quarantine is in quarantine, too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from spare_megatron.core.machines.reforming import Machine, reform
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member, PlaceId, ShardId
from spare_megatron.stacking.paces import PipelineTimes


class Holding(NamedTuple):
    """A machine, the place that it holds, and the incarnation of that place's supervisor."""

    machine: MachineId
    place: PlaceId
    incarnation: int = 0


QuarantineCause = Literal["outvoted", "slow"]


class Quarantine(NamedTuple):
    """A machine that gets no place, and starts no group, before an examination of it passes."""

    machine: MachineId
    place: PlaceId
    """That it held when this was found."""
    cause: QuarantineCause
    """`outvoted`: it has computed wrongly. `slow`: it holds the run back, and its groups are to leave the run."""
    reason: str
    """For people."""
    member: Member | None = None
    """The incarnation that was outvoted. It puts one machine in each place into quarantine, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An entry of the list."""

    holdings: tuple[Holding, ...]
    """The holdings that begin."""
    places: tuple[tuple[PlaceId, MachineId | None], ...] = ()
    """What `reform` was given: all places of broken groups, each with its machine, None if empty. Absent if it did not
    choose: a machine replaces another one, or makes no group whole."""
    idle: tuple[MachineId, ...] = ()
    """Likewise, machines without a place, or with one that its group does without."""
    shards: tuple[ShardId, ...] = ()
    """Likewise, shards without a host."""
    quarantined: tuple[Quarantine, ...] = ()
    """The quarantines that begin; one of a machine that is in quarantine changes nothing."""
    released: tuple[MachineId, ...] = ()
    """The machines whose quarantine ends, before its holdings begin."""
    stages: tuple[tuple[GroupId, int], ...] = ()
    """Pipeline stages of the groups that it makes or lets grow, where they change. A group that trains has them once it
    comes back."""


class Places:
    """Who holds each place after the assignments applied so far."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        places = [PlaceId(place) for place in range(layout.num_nodes)]
        self._held = {int(place): Holding(MachineId(place), place) for place in places}  # by `_seat`
        self._seats = {place: int(place) for place in places}
        self._incarnations = dict.fromkeys(places, 0)
        self._newest = {int(place): MachineId(place) for place in places}  # by `_seat`
        self._quarantines: dict[int, Quarantine] = {}  # by `_seat`
        self._outvoted: set[tuple[Member | None, PlaceId]] = set()
        self._stages: dict[GroupId, int] = {}

    def _seat(self, machine: MachineId) -> int:
        """What a machine and those that replace it have in common."""
        return machine % self._layout.num_nodes

    def apply(self, assignment: Assignment) -> None:
        for quarantine in assignment.quarantined:
            self._quarantines.setdefault(self._seat(quarantine.machine), quarantine)
            self._outvoted.add((quarantine.member, quarantine.place))
        for machine in assignment.released:
            self._quarantines.pop(self._seat(machine), None)
        for holding in assignment.holdings:
            former = self._held.pop(self._seat(holding.machine), None)
            if former is not None:
                del self._seats[former.place]
            if (taken_from := self._seats.get(holding.place)) is not None:
                del self._held[taken_from]
            self._held[self._seat(holding.machine)] = holding
            self._seats[holding.place] = self._seat(holding.machine)
            self._incarnations[holding.place] = holding.incarnation
            self._newest[self._seat(holding.machine)] = holding.machine
        self._stages |= dict(assignment.stages)

    def has_replaced(self, machine: MachineId) -> bool:
        """Whether another machine has replaced this one."""
        return self._newest[self._seat(machine)] > machine

    def held_by(self, machine: MachineId) -> Holding | None:
        """What the machine or the one that it replaces holds; None if another has taken its place."""
        return self._held.get(self._seat(machine))

    def holder_of(self, place: PlaceId) -> MachineId | None:
        """None if the place is vacant. The machine may be lost."""
        seat = self._seats.get(place)
        return None if seat is None else self._held[seat].machine

    def quarantine_of(self, machine: MachineId) -> Quarantine | None:
        """The quarantine of the machine, or of the one that it replaces."""
        return self._quarantines.get(self._seat(machine))

    def is_new(self, quarantine: Quarantine) -> bool:
        """Whether the machine is in no quarantine, and none has begun for the same reason in its place."""
        is_known = quarantine.member is not None and (quarantine.member, quarantine.place) in self._outvoted
        return not is_known and self.quarantine_of(quarantine.machine) is None

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """In the order in which they have begun, on which all who read the list agree."""
        return tuple(self._quarantines.values())

    @property
    def holders(self) -> tuple[Holding, ...]:
        """What machines hold that are in no quarantine, by place."""
        held = [holding for seat, holding in self._held.items() if seat not in self._quarantines]
        return tuple(sorted(held, key=lambda holding: holding.place))

    def is_empty(self, place: PlaceId) -> bool:
        """Whether no machine holds the place, or one that is in quarantine."""
        holder = self.holder_of(place)
        return holder is None or self.quarantine_of(holder) is not None

    def incarnation_of(self, place: PlaceId) -> int:
        """The latest incarnation of the place's supervisor."""
        return self._incarnations[place]

    def stages_of(self, group: GroupId) -> int:
        """The pipeline stages that the group has whenever it starts."""
        return self._stages.get(group, self._layout.pipeline_parallel)

    @property
    def smaller_groups(self) -> frozenset[GroupId]:
        """Those that have fewer stages than the whole pipeline."""
        return frozenset(group for group, stages in self._stages.items() if stages < self._layout.pipeline_parallel)

    def beyond(self, group: GroupId) -> list[PlaceId]:
        """The places that the group does without."""
        needed = self._layout.nodes_of(group, self.stages_of(group))
        return [PlaceId(place) for place in self._layout.nodes_of(group) if place not in needed]

    def suffice(self, group: GroupId, empty: Collection[PlaceId]) -> bool:
        """Whether the group has the machines for its stages where these places of it are empty."""
        return {*empty} <= {*self.beyond(group)}

    def growth(self, group: GroupId, empty: Collection[PlaceId]) -> tuple[tuple[GroupId, int], ...]:
        """`Assignment.stages` if the group has machines for more where these places are empty."""
        lengths = (one for one in self._layout.lengths if not {*empty} & {*self._layout.nodes_of(group, one)})
        return ((group, most),) if (most := next(lengths, 0)) > self.stages_of(group) else ()

    def advance(self, machine: MachineId, place: PlaceId, empty: Collection[PlaceId]) -> Assignment:
        """The assignment by which a machine has its group grow that does without it, where these places of the group
        are empty: from the lowest place that it does without. It assigns nothing if there is none for it.
        """
        (group,) = self._layout.groups_on(place)
        lowest = min({place, *empty}.intersection(self.beyond(group)), default=place)
        holdings = () if lowest == place else (self._next(machine, lowest),)
        return Assignment(holdings=holdings, stages=self.growth(group, {place, *empty} - {lowest}))

    def replace(
        self,
        machine: MachineId,
        empty: Collection[PlaceId],
        groups_per_domain: int,
        unhosted: Mapping[ShardId, Collection[GroupId]],
        times: PipelineTimes | None = None,
        *,
        of_smaller: Collection[PlaceId] = (),
    ) -> Assignment:
        """The assignment of a place to a machine without one, where these places of broken groups are empty, and
        `of_smaller` groups: that of the machine it replaces, else one with which a broken group starts, else the lowest
        that a smaller one does without, else the lowest vacant one. ValueError: another one has replaced it.
        """
        if self.has_replaced(machine):
            raise ValueError(f"node {self._seat(machine)}: another supervisor has replaced this one, which ends")
        place = None if (held := self.held_by(machine)) is None else held.place
        if place is None:
            chosen = self.reform(empty, groups_per_domain, unhosted, (machine,), times)
            if machine in {holding.machine for holding in chosen.holdings}:
                return chosen
            further = {place for group in self.smaller_groups for place in self.beyond(group) if place in of_smaller}
            # As many places are vacant as machines are without one.
            vacant = (place for place in self._incarnations if place not in self._seats)
            place = min(further or vacant)
        left = {*of_smaller} - {place}
        grown = (stages for group in self._layout.groups_on(place) for stages in self.growth(group, left))
        return Assignment(holdings=(self._next(machine, place),), stages=tuple(grown))

    def reform(
        self,
        empty: Collection[PlaceId],
        groups_per_domain: int,
        unhosted: Mapping[ShardId, Collection[GroupId]],
        idle: tuple[MachineId, ...] = (),
        times: PipelineTimes | None = None,
    ) -> Assignment:
        """The moves of `reform` where these places of broken groups are empty, and all others of them are not;
        `unhosted`: shards without a host, and who could host them. `times`: if pipelines may have several lengths.
        """
        groups = {group for place in empty for group in self._layout.groups_on(place)}
        of_groups = sorted(PlaceId(place) for group in groups for place in self._layout.nodes_of(group))
        places = {place: None if place in empty else self.holder_of(place) for place in of_groups}
        machines = {machine: Machine("placed", place) for place, machine in places.items() if machine is not None}
        machines |= dict.fromkeys(idle, Machine("idle"))
        others = set(map(GroupId, range(self._layout.num_home_groups))) - groups
        moves, stages = reform(
            self._layout,
            machines,
            groups,
            groups_per_domain=groups_per_domain,
            unhosted=unhosted.values(),
            times=times,
            others=[self.stages_of(group) for group in others],
        )
        return Assignment(
            holdings=tuple(self._next(move.machine, move.place) for move in moves),
            places=tuple(places.items()),
            idle=idle,
            shards=tuple(unhosted),
            stages=tuple((group, number) for group, number in stages.items() if number != self.stages_of(group)),
        )

    def _next(self, machine: MachineId, place: PlaceId) -> Holding:
        return Holding(machine, place, self._incarnations[place] + 1)
