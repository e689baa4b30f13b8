"""Tracks the machines of broken groups and the idle ones, which `core.machines.reforming` moves in virtual time."""

import heapq
from copy import deepcopy
from math import inf

from spare_megatron.core.machines.reforming import Machine, reform
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.simulate.scenario import Scenario


class Machines:
    """The machines that are idle or in broken groups; those of other groups have no ids here.

    A loss takes one machine of its group. Repaired machines and spares are idle. A broken group that gets its last
    machine is whole from then on; it cannot be lost until it is admitted. Times rise from call to call.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._size, self._per_domain = scenario.machines_per_group, scenario.placed_groups_per_domain
        n = scenario.max_groups
        self._layout = Layout(num_groups=n, pipeline_parallel=self._size, num_nodes=n * self._size)
        self._num_spares = scenario.num_spares
        self._placement = (
            None
            if scenario.last_resort
            else make_placement(scenario.placement, scenario.num_groups, scenario.hosts_per_shard, self._per_domain)
        )
        self.restart()

    def restart(self) -> None:
        """Brings back all machines and all spares."""
        self._num_seen = 0
        self._machines: dict[MachineId, Machine] = {}
        self._broken: set[GroupId] = set()
        self._repaired: list[tuple[float, int]] = []  # when, and the domain
        for _ in range(self._num_spares):
            self._add(Machine("idle"))

    def lose(self, groups: tuple[GroupId, ...], repaired_at_s: list[float]) -> list[GroupId]:
        """Each group loses a machine, repaired at that time or never; returns the groups that are whole at once."""
        self._broken |= set(groups)
        for group, at_s in zip(groups, repaired_at_s, strict=True):
            first = group * self._size
            for place in range(first + 1, first + self._size):  # which place is lost makes no difference
                self._add(Machine("placed", PlaceId(place)))
            if at_s < inf:
                heapq.heappush(self._repaired, (at_s, group // self._per_domain))
        return self._reform()

    def return_until(self, now_s: float) -> list[tuple[GroupId, float]]:
        """The groups that became whole as machines were repaired, and when."""
        found = []
        while self._repaired and self._repaired[0][0] <= now_s:
            at_s, domain = heapq.heappop(self._repaired)
            self._add(Machine("idle", domain=domain))
            found += [(group, at_s) for group in self._reform()]
        return found

    def whole_by(self, until_s: float) -> list[tuple[GroupId, float]]:
        """What `return_until` will return if no further machine is lost."""
        return deepcopy(self).return_until(until_s)

    def _add(self, machine: Machine) -> None:
        self._machines[MachineId(self._num_seen)] = machine
        self._num_seen += 1

    def _reform(self) -> list[GroupId]:
        """Moves machines; returns the groups that are whole by that, and forgets their machines."""
        unhosted = []
        if self._placement is not None:
            alive = frozenset(map(GroupId, range(self._placement.num_groups))) - self._broken
            unhosted = [self._placement.hosts[shard] for shard in self._placement.uncovered(alive)]
        moves = reform(
            self._layout, self._machines, self._broken, groups_per_domain=self._per_domain, unhosted=unhosted
        )
        for move in moves:
            self._machines[move.machine] = Machine("placed", move.place)
        # All moves make groups whole, and a group that is whole already was forgotten.
        whole = sorted({GroupId(move.place // self._size) for move in moves})
        self._broken -= set(whole)
        places = {place for group in whole for place in range(group * self._size, (group + 1) * self._size)}
        self._machines = {machine: held for machine, held in self._machines.items() if held.place not in places}
        return whole
