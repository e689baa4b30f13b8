"""Drains slow groups of a simulated run, each a machine, where `core.slow_machines.slow_machine_policy` decides so."""

from collections.abc import Collection, Sequence
from functools import lru_cache

from spare_megatron.core.slow_machines import slow_machine_policy as policy
from spare_megatron.core.slow_machines.culprit import Cause
from spare_megatron.stacking.layout import GroupId, MachineId, Member
from spare_megatron.stacking.paces import dealt_stacks
from spare_megatron.tools.plan.slow_group_costs import NAMED_AFTER
from spare_megatron.tools.simulate.compute_fit import FloatArray
from spare_megatron.tools.simulate.world import World

_stacks = lru_cache(maxsize=4096)(dealt_stacks)


class SlowDrains:
    """What holds the run back, and since which step. `hosts`: of each shard."""

    def __init__(self, world: World, hosts: Sequence[Collection[GroupId]]) -> None:
        self._world, self._hosts = world, hosts
        self._named: tuple[GroupId, int] | None = None
        self._passes_at_s: dict[GroupId, float] = {}  # when the machines in quarantine pass their examination
        self._drained_at_s: dict[GroupId, float] = {}

    def leaving(self, step: int, members: Collection[GroupId], factors: FloatArray | None) -> GroupId | None:
        """The group that leaves after this step, if one does. `factors`: of the step, None if no group is slow."""
        slow = [group for group in members if factors is not None and factors[group] > 1.0]
        if factors is None or not slow:
            self._named = None
            return None
        worst = max(slow, key=lambda group: (factors[group], -group))
        if self._named is None or self._named[0] not in slow:
            self._named = worst, step + NAMED_AFTER
        group, since_step = self._named
        if step < since_step:
            return None
        situation = self._situation(step, since_step, group, members, float(factors[group]))
        return group if policy.decide(situation).rule == "drain" else None

    def on_drained(self, members: Sequence[Member]) -> None:
        """They have left: their machines are repaired when they are as fast as before, and what is free takes their
        part.
        """
        world, now_s = self._world, self._world.now_s
        self._named = None
        for group, _ in members:
            self._passes_at_s[group], self._drained_at_s[group] = world.slow.replace(group, now_s), now_s
            world.fleet.reserve(group, now_s, self._passes_at_s[group])

    def _situation(
        self, step: int, since_step: int, group: GroupId, members: Collection[GroupId], factor: float
    ) -> policy.Situation:
        scenario, now_s = self._world.scenario, self._world.now_s
        costs, num_members, drained_at_s = scenario.costs, len(members), self._drained_at_s.get(group)
        others_s = costs.reduce_s + costs.update_s
        is_dealt = scenario.deal_by_pace and scenario.granularity == "microbatch" and num_members > 1
        mended = _stacks(num_members, scenario.microbatches_per_shard, 1, factor) if is_dealt else 0.0
        staying = set(members) - {group}
        return policy.Situation(
            machine=MachineId(group),
            cause=Cause.COMPUTE,
            excess_s=costs.compute_s * (factor - 1),
            mended_ratio=mended,
            step_s=costs.compute_s * (mended or factor) + others_s,
            lost_steps=step - since_step,
            steps_left=scenario.num_steps - step,
            num_members=num_members,
            num_leaving=1,
            least_hosts=None
            if scenario.last_resort
            else min(len(staying.intersection(hosts)) for hosts in self._hosts),
            replacement="machine" if self._world.fleet.has_spare(now_s) else "none",
            admission_s=costs.join_s,
            since_drain_s=None if drained_at_s is None else now_s - drained_at_s,
            under_way=any(at_s > now_s for at_s in self._passes_at_s.values()),
        )
