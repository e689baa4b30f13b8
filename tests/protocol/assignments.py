"""What must hold of the list of assignments, and of what machines do by it: read without the code under test."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

from tests.protocol.violation import Violation


class Assignments:
    """The list as it is written. `trains` says whether a group of this number takes part in training now."""

    def __init__(
        self, num_places: int, num_groups: int, trains: Callable[[int], bool], hosts: Sequence[Sequence[int]]
    ) -> None:
        self._num_places, self._size, self._trains = num_places, num_places // num_groups, trains
        self._hosts = hosts  # of each shard
        self._num_entries = 0
        self._machine_in = {place: place for place in range(num_places)}
        self._incarnations = Counter[int]()
        self.counts = Counter[str]()
        self.quarantined: dict[int, str] = {}  # cause, by what a machine and those that replace it have in common
        self.sick: set[int] = set()
        """Likewise, what computes wrongly."""

    def written(self, index: int, text: str) -> None:
        holdings, places, idle, shards, quarantined, released, _ = json.loads(text).values()
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
        """As many groups are made whole as there are machines for, of groups that do not train. Of all such sets they
        leave fewest of the shards without a host, by the fewest moves.
        """
        self.counts["re-forming"] += 1
        groups = {place // self._size for place in places}
        if training := [group for group in groups if self._trains(group)]:
            raise Violation(f"groups {training} are re-formed, and train")
        missing = Counter(dict.fromkeys(groups, 0))
        missing.update(place // self._size for place, machine in places.items() if machine is None)
        num_machines = sum(machine is not None for machine in places.values()) + len(idle)
        filled = Counter(place // self._size for _, place, _ in holdings)
        if any(number != missing[group] for group, number in filled.items()):
            raise Violation(f"groups {sorted(filled)} get {dict(filled)} machines, and lack {dict(missing)}")
        num_whole = min(len(groups), num_machines // self._size)
        best = min(self._score(chosen, missing, shards) for chosen in combinations(sorted(groups), num_whole))
        whole = [group for group in groups if missing[group] == filled[group]]
        if len(whole) != num_whole or self._score(whole, missing, shards) != best:
            raise Violation(f"groups {whole} are made whole, and not the best {num_whole} of {dict(missing)}")
        self.counts["moved machine"] += len(holdings)
        self.counts["shard without a host"] += len(shards)

    def _score(self, chosen: Collection[int], missing: Mapping[int, int], shards: Collection[int]) -> tuple[int, int]:
        num_left = sum(not {*self._hosts[shard]} & {*chosen} for shard in shards)
        return num_left, sum(missing[group] for group in chosen)

    def admitted(self, group: int, joined: Collection[tuple[int, int]]) -> None:
        """The group takes part again, with these places, each with its machine, that have joined its incarnation."""
        machines = defaultdict[int, set[int]](set)
        for place, machine in joined:
            machines[place].add(machine)
        places = range(group * self._size, (group + 1) * self._size)
        if lacking := [place for place in places if not machines[place]]:
            raise Violation(f"group {group} is admitted without places {lacking}")
        self.counts["admission"] += 1

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
