"""Tracks which groups take part, are under repair, or are ready to be admitted, and machines of broken groups, which
`core.machines.reforming` moves in virtual time.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from math import inf

import numpy as np
import numpy.typing as npt

from spare_megatron.core.machines.reforming import Machine, reform
from spare_megatron.stacking.layout import GroupId, MachineId, PlaceId
from spare_megatron.stacking.placement import BoolArray, make_placement
from spare_megatron.tools.simulate.failures import FailureProcess, Loss
from spare_megatron.tools.simulate.scenario import Scenario


class Fleet:
    """The groups of a simulated run, in virtual time that only moves forward.

    Failed hardware is repaired into a pool of spares. A lost group reserves what is free first, a spare or the next
    repaired, fetches the state and waits to be admitted; groups lost together choose in order of their ids. If there is
    none, it stays away until a restart, which brings back all groups and spares. With re-forming a loss takes one
    machine, nothing is reserved, and `core.machines.reforming` decides which groups are whole again, or go on with
    fewer machines until others come. A group with a notice of its loss may leave before. `num_lost` counts each loss;
    `max_down`: the most groups down at a time.
    """

    def __init__(self, scenario: Scenario, process: FailureProcess, rng: np.random.Generator) -> None:
        self._scenario, self._process, self._rng = scenario, process, rng
        self.is_up = np.ones(scenario.max_groups, dtype=np.bool_)
        self.num_lost = self.num_drained = 0
        self.max_down = 0
        self.losses_by_cause: Counter[str] = Counter()
        self.cause_of: dict[GroupId, str] = {}
        self._hardware_s = [0.0] * scenario.num_spares
        self._machines = None if scenario.reform_s is None else Machines(scenario, rng)
        self._sizes = np.full(scenario.max_groups, scenario.machines_per_group)
        self._noticed: list[Loss] = []  # in the future, with the groups that were up
        further = range(scenario.num_groups, scenario.max_groups)
        self.is_up[further.start :] = False
        self._ready_s = dict.fromkeys(map(GroupId, further), 0.0)
        if scenario.history_s:
            self._pass_history()
        self._down_s = 0.0  # sum over groups
        self._num_down = int((~self.is_up).sum())
        self._changed_s = 0.0

    def _pass_history(self) -> None:
        """Losses and repairs before the start say which machines are away at it. Only the number of groups that the
        others make matters to later losses: each but that of a domain takes any machine that is there.
        """
        assert self._machines is not None, "only machines have a history"
        scenario, process, end_s = self._scenario, self._process, self._scenario.history_s
        away: dict[MachineId, float] = {}
        due: list[tuple[float, MachineId]] = []
        is_whole = np.ones_like(self.is_up)
        drawn = iter(lambda: int(self._rng.integers(scenario.num_machines)), None)
        while process.next_s() <= end_s:
            loss = process.strike(is_whole)
            while due and due[0][0] <= loss.at_s:
                del away[heapq.heappop(due)[1]]
            lost = loss.domain or (next(machine for machine in drawn if machine not in away),)
            for machine in map(MachineId, lost):
                if machine not in away:
                    away[machine] = loss.at_s + self._repair_time(loss)
                    heapq.heappush(due, (away[machine], machine))
            is_whole[:] = np.arange(is_whole.size) < (scenario.num_machines - len(away)) // scenario.machines_per_group
            process.came_back(loss.at_s, (), is_whole)
        process.restarted(end_s, 0.0, ())
        made = self._machines.restart({machine: at_s - end_s for machine, at_s in away.items() if at_s > end_s})
        for group in (*self._machines.broken, *made):
            self.is_up[group] = False
            self._ready_s.pop(group, None)
        process.came_back(0.0, (), self.is_up)
        self._note_whole((group, 0.0) for group in made)

    @property
    def paces(self) -> npt.NDArray[np.float64]:
        """The time of a microbatch in each group that is not slow, in times that of a whole one."""
        return self._scenario.machines_per_group / self._sizes

    @property
    def fills(self) -> npt.NDArray[np.float64]:
        """The pipeline fill of each group, in microbatches of its own."""
        fill = self._scenario.costs.pipeline_fill
        return np.maximum(fill - (fill + 1) * (1 - 1 / self.paces), 0.0)

    @property
    def smaller(self) -> dict[GroupId, int]:
        """The machines of groups that have fewer than others when they are next admitted."""
        return {} if self._machines is None else self._machines.smaller

    @property
    def next_loss_s(self) -> float:
        return self._noticed[0].at_s if self._noticed else self._process.next_s()

    def noticed(self, now_s: float) -> set[GroupId]:
        """The groups that take part and know by now that they will be lost, or have got machines to grow."""
        while self._scenario.notice_s and self._process.next_s() <= now_s + self._scenario.notice_s:
            is_safe = self.is_up.copy()
            is_safe[[group for loss in self._noticed for group in loss.groups]] = False
            if not is_safe.any():
                break
            self._noticed.append(self._process.strike(is_safe))
        leaving = {group for loss in self._noticed for group in loss.groups}
        if self._machines is not None:
            leaving |= self._machines.growing
        return {group for group in leaving if self.is_up[group]}

    def drain(self, now_s: float, groups: Iterable[GroupId]) -> None:
        """These groups leave, to come back larger; or they are lost when they are due all the same."""
        for group in groups:
            self.is_up[group] = False
            self._count(now_s, self._num_down + 1)
            if self._machines is not None and group in self._machines.growing:
                self._note_whole([(group, now_s)])
            else:
                self.num_drained += 1

    def lose(self, among: BoolArray | bool = True) -> Loss:
        """Strikes the next loss, and returns it with those groups that took part. `among`: whom single losses take."""
        loss = self._noticed.pop(0) if self._noticed else self._process.strike(self.is_up & among)
        if self._machines is not None:
            self._return_until(loss.at_s)
            loss = self._machines.located(loss)
        hit = tuple(group for group in loss.groups if self.is_up[group])
        for group in loss.groups:
            self.is_up[group] = False
            self.cause_of[group] = loss.cause
        if loss.domain is not None:  # a single loss slows its clock by itself
            self._process.came_back(loss.at_s, (), self.is_up & among)
        if self._machines is None:
            for group in loss.groups:
                self.reserve(group, loss.at_s, loss.at_s + self._repair_time(loss))
        else:
            for group in loss.groups:
                self._ready_s.pop(group, None)
            lost = [(machine, loss.at_s + self._repair_time(loss)) for machine in self._machines.lost_by(loss)]
            self._note_whole((group, loss.at_s) for group in self._machines.lose(loss.groups, lost))
        self.num_lost += len(loss.groups)
        self.losses_by_cause[loss.cause] += len(loss.groups)
        self._count(loss.at_s, int((~(self.is_up & among)).sum()))
        return replace(loss, groups=hit)

    def lose_until(self, now_s: float, among: BoolArray | bool = True) -> list[Loss]:
        losses = []
        while self.next_loss_s <= now_s:
            losses.append(self.lose(among))
        return losses

    def ready(self, now_s: float) -> tuple[GroupId, ...]:
        """The groups that wait to be admitted, ascending."""
        self._return_until(now_s)
        if not self._ready_s:
            return ()
        return tuple(sorted(group for group, ready_s in self._ready_s.items() if ready_s <= now_s))

    def ready_by(self, until_s: float) -> dict[GroupId, float]:
        """When each lost group can be admitted, of those that are whole by then if no further machine is lost."""
        coming = [] if self._machines is None else deepcopy(self._machines).return_until(until_s)
        return self._ready_s | {group: self._formed_s(whole_at_s) for group, whole_at_s in coming}

    def ready_from(self, group: GroupId, at_s: float) -> None:
        """Makes a lost group ready to be admitted at `at_s`."""
        self._ready_s[group] = at_s

    def take_in(self, now_s: float, groups: tuple[GroupId, ...]) -> list[Loss]:
        """Admits groups. Losses up to now, which are returned, hit these only by machines: they took no part yet."""
        others = self.is_up.copy()
        for group in groups:
            del self._ready_s[group]
            self.is_up[group] = True
            if self._machines is not None:
                self._sizes[group] = self._machines.admit(group)
        losses = self.lose_until(now_s, others)
        self._count(now_s, int((~self.is_up).sum()))
        self._process.came_back(now_s, groups, self.is_up)
        return losses

    def restart(self, began_s: float, now_s: float) -> None:
        """Brings back all groups and all spares."""
        came_back = tuple(GroupId(group) for group in np.flatnonzero(~self.is_up).tolist())
        self._count(began_s, 0)
        self._changed_s = now_s
        self.is_up[:] = True
        self._ready_s.clear()
        self._sizes[:] = self._scenario.machines_per_group
        self._noticed.clear()  # these machines are replaced like lost ones
        self._hardware_s = [now_s] * self._scenario.num_spares
        if self._machines is not None:
            self._machines.restart()
        self._process.restarted(began_s, now_s, came_back)
        if self._scenario.further_groups:  # beyond all that a process counts after a restart
            self._process.came_back(now_s, (), self.is_up)

    def mean_down(self, now_s: float, restarting_s: float) -> float:
        """Mean number of groups down over the time outside restarts."""
        self._count(now_s, self._num_down)
        return self._down_s / (now_s - restarting_s) if now_s > restarting_s else 0.0

    def has_spare(self, now_s: float) -> bool:
        return bool(self._hardware_s) and self._hardware_s[0] <= now_s

    def reserve(self, group: GroupId, lost_at_s: float, repaired_at_s: float) -> None:
        """Hardware that fails joins the pool once it is repaired; the group takes what is free first."""
        if repaired_at_s < inf:
            heapq.heappush(self._hardware_s, repaired_at_s)
        if self._hardware_s:
            free_s = heapq.heappop(self._hardware_s)
            self._ready_s[group] = max(free_s, lost_at_s) + self._scenario.costs.state_transfer_s

    def _return_until(self, now_s: float) -> None:
        if self._machines is not None:
            self._note_whole(self._machines.return_until(now_s))

    def _note_whole(self, groups: Iterable[tuple[GroupId, float]]) -> None:
        """Groups that have all their machines since some time: their processes start, then they fetch the state."""
        self._ready_s |= {group: self._formed_s(whole_at_s) for group, whole_at_s in groups}

    def _formed_s(self, whole_at_s: float) -> float:
        return whole_at_s + (self._scenario.reform_s or 0.0) + self._scenario.costs.state_transfer_s

    def _repair_time(self, loss: Loss) -> float:
        mean_s = self._scenario.repair_s if loss.repair_s is None else loss.repair_s
        if mean_s is None:
            return inf
        is_fact = self._scenario.failures.kind == "trace" and loss.repair_s is not None
        is_random = self._scenario.repair_is_random and not is_fact
        return float(self._rng.exponential(mean_s)) if is_random else mean_s

    def _count(self, now_s: float, num_down: int) -> None:
        self._down_s += self._num_down * max(now_s - self._changed_s, 0.0)
        self._changed_s = max(now_s, self._changed_s)
        self._num_down = num_down
        self.max_down = max(self.max_down, num_down)


class Machines:
    """The machines of groups, and those that are idle or in broken groups, in the order in which they became so.

    A loss takes one machine of its group, or the machine that a trace names wherever it stands; `rng` draws where those
    stand at first. Repaired machines and spares are idle. A broken group that gets its last machine is whole from then
    on. `smaller`: the machines of groups that go on with fewer; `growing`: groups that have got one since they were
    admitted. Times rise from call to call.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._size, self._per_domain = scenario.machines_per_group, scenario.placed_groups_per_domain
        self._layout, self._times = scenario.layout, scenario.pipeline_times
        self._num_spares = scenario.num_spares
        self._rng, self._is_mixed = rng, bool(scenario.failures.domains)
        self._placement = (
            None
            if scenario.last_resort
            else make_placement(scenario.placement, scenario.num_groups, scenario.hosts_per_shard, self._per_domain)
        )
        names = scenario.failures.machine_names
        drawn = rng.permutation(scenario.num_machines).tolist() if names else ()
        self._named = {name: MachineId(number) for name, number in zip(names, drawn, strict=False)}
        self.restart()

    def restart(self, away: Mapping[MachineId, float] | None = None) -> list[GroupId]:
        """Brings back all machines and all spares, but for those away until these times. They make whole groups, and
        those groups that are returned.
        """
        self._repaired = [(at_s, -1, machine) for machine, at_s in (away or {}).items()]
        heapq.heapify(self._repaired)  # when, and the domain, of idle ones below 0
        num_machines = self._layout.num_groups * self._size + self._num_spares
        machines = [machine for machine in map(MachineId, range(num_machines)) if machine not in (away or {})]
        num_whole = min(self._layout.num_groups, len(machines) // self._size)
        self._members = {
            GroupId(group): machines[group * self._size : (group + 1) * self._size] for group in range(num_whole)
        }
        self._free = dict.fromkeys(machines[num_whole * self._size :], Machine("idle"))
        self.smaller: dict[GroupId, int] = {}
        self.growing: set[GroupId] = set()
        return self._reform()

    @property
    def broken(self) -> list[GroupId]:
        return [group for group in map(GroupId, range(self._layout.num_groups)) if group not in self._members]

    def located(self, loss: Loss) -> Loss:
        """Adds the groups that the loss of a named machine, or of a domain, breaks."""
        if loss.machine is None and loss.domain is None:
            return loss
        lost = set(self.lost_by(loss))
        return replace(loss, groups=tuple(g for g, members in self._members.items() if not lost.isdisjoint(members)))

    def lost_by(self, loss: Loss) -> list[MachineId]:
        """The machines of a domain, the named one, or one of each group."""
        if loss.domain is not None:
            return list(map(MachineId, loss.domain))
        if loss.machine is not None:
            return [self._named[loss.machine]]
        return [self._members[group][self._rng.integers(self._size) if self._is_mixed else 0] for group in loss.groups]

    def lose(self, groups: Iterable[GroupId], lost: Iterable[tuple[MachineId, float]]) -> list[GroupId]:
        """Loses machines of these groups, or of none, until those times; returns the groups that are whole at once. A
        machine that is away already changes nothing.
        """
        for group in groups:
            self.smaller.pop(group, None)
            self.growing.discard(group)
            for place, machine in enumerate(self._members.pop(group), group * self._size):
                self._free[machine] = Machine("placed", PlaceId(place))
        for machine, at_s in lost:
            held = self._free.pop(machine, None)
            if held is not None and at_s < inf:
                domain = held.domain if held.place is None else held.place // self._size // self._per_domain
                heapq.heappush(self._repaired, (at_s, -1 if domain is None else domain, machine))
        return self._reform()

    def return_until(self, now_s: float) -> list[tuple[GroupId, float]]:
        """The groups that became whole as machines were repaired, and when."""
        found = []
        while self._repaired and self._repaired[0][0] <= now_s:
            at_s, domain, machine = heapq.heappop(self._repaired)
            self._free[machine] = Machine("idle", domain=domain)
            found += [(group, at_s) for group in self._reform()]
            self._grow(machine)
        return found

    def admit(self, group: GroupId) -> int:
        """The machines with which the group takes part from now on."""
        self.growing.discard(group)
        return len(self._members[group])

    def _reform(self) -> list[GroupId]:
        """Moves machines; returns the groups that go on by that."""
        broken = self.broken
        unhosted = []
        if self._placement is not None:
            alive = frozenset(group for group in self._members if group < self._placement.num_groups)
            unhosted = [self._placement.hosts[shard] for shard in self._placement.uncovered(alive)]
        free = list(self._free)
        made = reform(
            self._layout,
            dict(zip(map(MachineId, range(len(free))), self._free.values(), strict=True)),
            broken,
            groups_per_domain=self._per_domain,
            unhosted=unhosted,
            times=self._times,
            others=list(map(len, self._members.values())),
        )
        for move in made.moves:
            self._free[free[move.machine]] = Machine("placed", move.place)
        self.smaller |= {group: size for group, size in made.stages.items() if size < self._size}
        placed = [(held.place, machine) for machine, held in self._free.items() if held.place is not None]
        for place, machine in sorted(placed):
            if (group := GroupId(place // self._size)) in made.stages:
                self._members.setdefault(group, []).append(machine)
                del self._free[machine]
        return sorted(made.stages)

    def _grow(self, newest: MachineId) -> None:
        """The machine that came last takes, if it is idle, the lowest empty place of a smaller group, which leaves for
        that at the next commit.
        """
        if self.smaller and newest in self._free:
            del self._free[newest]
            group = min(self.smaller)
            self.growing.add(group)
            self._members[group].append(newest)
            if (size := self.smaller.pop(group) + 1) < self._size:
                self.smaller[group] = size
