"""What must hold of the list of assignments, and of what machines do by it: read without the code under test."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, permutations
from typing import Any

from spare_megatron.stacking.layout import Layout
from tests.protocol.violation import Violation


class Assignments:
    """The list as it is written. `trains` says whether a group of this number takes part in training now."""

    def __init__(self, layout: Layout, trains: Callable[[int], bool], hosts: Sequence[Sequence[int]]) -> None:
        num_places = layout.num_nodes
        self._num_places, self._size, self._trains = num_places, num_places // layout.num_groups, trains
        self._lengths = layout.lengths  # a stage for each place
        self._stages: dict[int, int] = {}
        self._hosts = hosts  # of each shard
        self._num_entries = 0
        self._machine_in = {place: place for place in range(num_places)}
        self._incarnations = Counter[int]()
        self.counts = Counter[str]()
        self.quarantined: dict[int, str] = {}  # cause, by what a machine and those that replace it have in common
        self.sick: set[int] = set()
        """Likewise, what computes wrongly."""

    def written(self, index: int, text: str) -> None:
        holdings, places, idle, shards, quarantined, released, stages = json.loads(text).values()
        self._quarantine(quarantined, released)
        for machine, place, _ in holdings:
            if self._seat(machine) in self.quarantined:
                raise Violation(f"machine {machine} is in quarantine, and gets place {place}")
        if index != self._num_entries:
            raise Violation(f"assignment {index} follows {self._num_entries} others")
        for what, numbers in (("machine", [one[0] for one in holdings]), ("place", [one[1] for one in holdings])):
            if len(set(numbers)) < len(numbers):
                raise Violation(f"assignment {index} names a {what} twice: {numbers}")
        for place, machine in places:
            if machine is not None and self._machine_in.get(place) != machine:
                raise Violation(
                    f"machine {machine} counts as in place {place}, which has {self._machine_in.get(place)}"
                )
        for _, place, incarnation in holdings:
            if incarnation != self._incarnations[place] + 1:
                raise Violation(f"place {place} begins {incarnation} after {self._incarnations[place]}: it has two")
        self._change(stages, is_growth=not places)
        if places:
            self._re_forms(holdings, dict(places), idle, shards)
        for machine, place, incarnation in holdings:
            former = [held for held, holder in self._machine_in.items() if self._seat(holder) == self._seat(machine)]
            for held in former:
                del self._machine_in[held]
            self._machine_in[place], self._incarnations[place] = machine, incarnation
        if len(set(self._machine_in.values())) < len(self._machine_in):
            raise Violation(f"a machine has two places: {self._machine_in}")
        self._num_entries += 1
        self.counts["assignment"] += 1

    def stages_of(self, group: int) -> int:
        return self._stages.get(group, self._size)

    def _change(self, stages: Sequence[tuple[int, int]], *, is_growth: bool) -> None:
        for group, number in stages:
            if number not in self._lengths or number == self.stages_of(group):
                raise Violation(f"group {group} gets {number} stages, and has {self.stages_of(group)}")
            if is_growth and number < self.stages_of(group):
                raise Violation(f"group {group} gets {number} stages instead of more than {self.stages_of(group)}")
            self._stages[group] = number
            self.counts["growth"] += is_growth
            self.counts["smaller group"] += number < self._size

    def _quarantine(self, quarantined: Sequence[list[Any]], released: Sequence[int]) -> None:
        for machine, _, cause, *_ in quarantined:
            self.quarantined.setdefault(self._seat(machine), cause)
            self.counts[f"quarantine, {cause}"] += 1
        for machine in released:
            if self._seat(machine) in self.sick:
                raise Violation(f"the quarantine of machine {machine} ends, and it computes wrongly")
            del self.quarantined[self._seat(machine)]
            self.counts["release"] += 1

    def starts(self, machine: int, place: int) -> None:
        """The machine starts its ranks. What the driver finds slow it may not know yet."""
        if self.quarantined.get(self._seat(machine)) == "outvoted":
            raise Violation(f"machine {machine} starts place {place} in quarantine")

    def _re_forms(
        self, holdings: list[list[int]], places: dict[int, int | None], idle: list[int], shards: list[int]
    ) -> None:
        """Groups that do not train are made of all machines that they have use for: whole ones alone, or the most that
        there can be, as even as possible. Of all such sets they leave fewest of the shards without a host, by the
        fewest moves.
        """
        self.counts["re-forming"] += 1
        groups = sorted({place // self._size for place in places})
        if training := [group for group in groups if self._trains(group)]:
            raise Violation(f"groups {training} are re-formed, and train")
        moved = {machine: place for machine, place, _ in holdings}
        num_machines = sum(machine is not None for machine in places.values()) + len(idle)
        held = {place for place, machine in places.items() if machine not in (None, *moved)} | {*moved.values()}
        made = {group: self.stages_of(group) for group in groups if held.issuperset(self._first(group))}
        useful = {place for group in made for place in self._first(group)}
        if not useful.issuperset(moved.values()):
            raise Violation(f"machines move to {holdings}, and the groups {made} have no use for some")
        # A group that is not to be made may have machines for the stages that it has had.
        options = [one for one in self._options(len(groups), num_machines) if not Counter(one) - Counter(made.values())]
        ways = self._ways(groups, max(options, key=len)) if options else iter(())
        best = min((self._score(way, places, shards) for way in ways), default=None)
        if best is None or self._score(made, places, shards) > best:
            raise Violation(f"{made} are made, and not the best of {num_machines} machines in {places}")
        self.counts["moved machine"] += len(holdings)
        self.counts["shard without a host"] += len(shards)

    def _first(self, group: int) -> range:
        """The places that the group needs."""
        return range(group * self._size, group * self._size + self.stages_of(group))

    def _options(self, num_groups: int, num_machines: int) -> list[list[int]]:
        """The stages of whole groups alone, and of the most groups, as even as possible."""
        whole = [self._size] * min(num_groups, num_machines // self._size)
        every = (
            one for number in range(num_groups + 1) for one in combinations_with_replacement(self._lengths, number)
        )
        fitting = [one for one in every if sum(one) <= num_machines]
        most = max(fitting, key=lambda one: (len(one), sum(one), min(one, default=0) - max(one, default=0)))
        return [whole, list(most)]

    @staticmethod
    def _ways(groups: Sequence[int], option: Sequence[int]) -> Iterator[dict[int, int]]:
        for chosen in permutations(groups, len(option)):
            yield dict(zip(chosen, option, strict=True))

    def _score(
        self, chosen: Mapping[int, int], places: Mapping[int, int | None], shards: Collection[int]
    ) -> tuple[int, int]:
        """Shards that these groups leave without a host, and moves."""
        num_left = sum(not {*self._hosts[shard]} & {*chosen} for shard in shards)
        firsts = (group * self._size + number for group, stages in chosen.items() for number in range(stages))
        return num_left, sum(places[place] is None for place in firsts)

    def admitted(self, group: int, places: Sequence[int], joined: Collection[tuple[int, int]]) -> None:
        """The group takes part again, of which it needs these places; those that have joined have a machine each."""
        machines = defaultdict[int, set[int]](set)
        for place, machine in joined:
            machines[place].add(machine)
        if lacking := [place for place in places if not machines[place]]:
            raise Violation(f"group {group} is admitted without places {lacking}")
        self.counts["admission"] += 1
        self.counts["admission of a smaller group"] += len(places) < self._size

    def holder_of(self, place: int) -> int | None:
        return self._machine_in.get(place)

    def runs_on(self, machine: int, place: int, holder: int | None) -> None:
        """The machine goes on with its ranks after it has talked to the store. `holder`: of the place before that.

        The incarnation was fenced before, as the holder does when it comes. Until then both may run it: of two
        processes of a rank one is in its group.
        """
        if holder is not None and holder != machine:
            raise Violation(f"machine {machine} runs place {place}, which machine {holder} has: it is taken by two")

    def _seat(self, machine: int) -> int:
        return machine % self._num_places
