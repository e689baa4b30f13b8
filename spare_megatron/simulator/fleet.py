"""Tracks which groups take part, are under repair, or are ready to be admitted."""

import heapq
from collections import Counter
from math import inf

import numpy as np

from spare_megatron.simulator.failures import FailureProcess, Loss
from spare_megatron.simulator.scenario import Scenario
from spare_megatron.stacking.layout import GroupId


class Fleet:
    """The groups of a simulated run. Time only moves forward, as far as the caller says.

    Failed hardware (a group's, or one of its nodes) is repaired into the pool of spares. A lost group reserves what is
    free first: a spare, else the next repaired; groups lost together choose in order of their ids. It then fetches the
    state and waits to be admitted, and cannot be lost meanwhile. Hardware that is never repaired is gone; with no other
    left a lost group stays away until a restart, which brings back all groups and spares. `num_lost`: groups lost so
    far, counting each loss. `max_down`: the most groups down at a time.
    """

    def __init__(self, scenario: Scenario, process: FailureProcess, rng: np.random.Generator) -> None:
        self._scenario, self._process, self._rng = scenario, process, rng
        self.is_up = np.ones(scenario.num_groups, dtype=np.bool_)
        self.num_lost = 0
        self.max_down = 0
        self.losses_by_cause: Counter[str] = Counter()
        self.cause_of: dict[GroupId, str] = {}
        self._hardware_s = [0.0] * scenario.num_spares
        self._ready_s: dict[GroupId, float] = {}
        self._down_s = 0.0  # sum over groups
        self._num_down = 0
        self._changed_s = 0.0

    @property
    def next_loss_s(self) -> float:
        return self._process.next_s()

    def lose(self) -> Loss:
        """Strikes the next loss; it hits no group if all its groups are down already."""
        loss = self._process.strike(self.is_up)
        for group in loss.groups:
            self.is_up[group] = False
            self.cause_of[group] = loss.cause
            self._repair(group, loss)
        self.num_lost += len(loss.groups)
        self.losses_by_cause[loss.cause] += len(loss.groups)
        self._count(loss.at_s, self._num_down + len(loss.groups))
        return loss

    def lose_until(self, now_s: float) -> list[Loss]:
        losses = []
        while self._process.next_s() <= now_s:
            losses.append(self.lose())
        return losses

    def ready(self, now_s: float) -> tuple[GroupId, ...]:
        """The groups that wait to be admitted, ascending."""
        if not self._ready_s:
            return ()
        return tuple(sorted(group for group, ready_s in self._ready_s.items() if ready_s <= now_s))

    def ready_s(self, group: GroupId) -> float:
        """When a lost group can be admitted; infinite if only a restart brings it back."""
        return self._ready_s.get(group, inf)

    def ready_from(self, group: GroupId, at_s: float) -> None:
        """Makes a lost group ready to be admitted at `at_s`."""
        self._ready_s[group] = at_s

    def take_in(self, now_s: float, groups: tuple[GroupId, ...]) -> None:
        for group in groups:
            del self._ready_s[group]
            self.is_up[group] = True
        self._count(now_s, self._num_down - len(groups))
        self._process.came_back(now_s, groups, self.is_up)

    def restart(self, began_s: float, now_s: float) -> None:
        """Brings back all groups and all spares."""
        came_back = tuple(GroupId(group) for group in np.flatnonzero(~self.is_up).tolist())
        self._count(began_s, 0)
        self._changed_s = now_s
        self.is_up[:] = True
        self._ready_s.clear()
        self._hardware_s = [now_s] * self._scenario.num_spares
        self._process.restarted(began_s, now_s, came_back)

    def mean_down(self, now_s: float, restarting_s: float) -> float:
        """Mean number of groups down over the time outside restarts."""
        self._count(now_s, self._num_down)
        return self._down_s / (now_s - restarting_s) if now_s > restarting_s else 0.0

    def _repair(self, group: GroupId, loss: Loss) -> None:
        repair_s = self._repair_time(loss)
        if repair_s < inf:
            heapq.heappush(self._hardware_s, loss.at_s + repair_s)
        if self._hardware_s:
            free_s = heapq.heappop(self._hardware_s)
            self._ready_s[group] = max(free_s, loss.at_s) + self._scenario.costs.state_transfer_s

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
