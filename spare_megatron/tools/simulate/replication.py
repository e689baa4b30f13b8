"""Simulates the baseline policy: each shard is on several groups, which all compute it in every step."""

from collections.abc import Callable

import numpy as np

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import BoolArray
from spare_megatron.tools.simulate.compute_fit import finish_times
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.world import World

IsWhole = Callable[[BoolArray], bool]
"""Whether every shard has a group that is up, given which groups are up."""


def disjoint_sets(scenario: Scenario) -> IsWhole:
    """Disjoint sets of `redundancy` groups with the same shards; groups left over join sets at no cost in time."""
    num_sets = scenario.num_sets
    set_of = np.arange(scenario.num_groups) % num_sets
    return lambda is_up: bool(np.bincount(set_of[is_up], minlength=num_sets).all())


def run_replication(world: World, is_whole: IsWhole) -> None:
    """Trains to the end; every step takes `redundancy` shards of compute. While its shards have another group a loss
    costs nothing; otherwise survivors finish their compute, detect it as under the policy spare, and all groups
    restart.
    """
    scenario = world.scenario
    cadence_s, last_save_s, step = scenario.save_cadence_s(), 0.0, 0
    while step < scenario.num_steps:
        m = scenario.microbatches_per_shard
        loads = np.full(int(world.fleet.is_up.sum()), scenario.redundancy * m)
        world.compute(step, float(finish_times(loads, m, scenario.costs).max(initial=0.0)))
        world.lost_meanwhile()
        if is_whole(world.fleet.is_up) and _reduce(world, is_whole):
            step += 1
            world.update(int(world.fleet.is_up.sum()))
            if world.now_s - last_save_s >= cadence_s:
                last_save_s = world.now_s
                world.save(step)
            if (ready := world.fleet.ready(world.now_s)) and step < scenario.num_steps:
                world.take_in(ready)
        else:
            world.notice(())
            world.restart()
            step, last_save_s = world.saved_step, world.now_s
    world.ledger.mark_saved()


def _reduce(world: World, is_whole: IsWhole) -> bool:
    """Whether every shard kept a group until the reduction was complete."""
    groups = [GroupId(group) for group in np.flatnonzero(world.fleet.is_up).tolist()]
    end_s = world.now_s + world.reduce_s(groups)
    while world.wait((("reduce", end_s - world.now_s),)):
        if not is_whole(world.fleet.is_up):
            return False
    return True
