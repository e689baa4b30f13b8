"""The baseline: disjoint sets of groups, each group computing all shards of its set in every step."""

import numpy as np

from spare_megatron.core.placement import IntArray
from spare_megatron.simulator.world import World


def run_replication(world: World) -> None:
    """Trains to the end.

    Every step takes `redundancy` shards of compute. A loss costs nothing while its set has another group; when a set
    is dead, the survivors finish their compute and find out as they do under the policy spare, and all restart. Groups
    that do not fill a set of their own join others: they add hosts, and no step is taken to be longer for it.
    """
    scenario = world.scenario
    set_of = np.arange(scenario.num_groups) % scenario.num_sets
    cadence_s, last_save_s, step = scenario.save_cadence_s(), 0.0, 0
    while step < scenario.num_steps:
        world.compute(step, scenario.redundancy)
        world.lost_meanwhile()
        if _is_whole(world, set_of) and _reduce(world, set_of):
            step += 1
            if world.now_s - last_save_s >= cadence_s:
                last_save_s = world.now_s
                world.save(step)
            if (ready := world.fleet.ready(world.now_s)) and step < scenario.num_steps:
                world.take_in(ready)
        else:
            world.notice(())
            world.restart()
            step, last_save_s = world.saved_step, world.now_s


def _reduce(world: World, set_of: IntArray) -> bool:
    """Whether no set died before the reduction was complete."""
    end_s = world.now_s + world.scenario.costs.reduce_s
    while world.wait((("reduce", end_s - world.now_s),)):
        if not _is_whole(world, set_of):
            return False
    return True


def _is_whole(world: World, set_of: IntArray) -> bool:
    """Whether every set has a group that is up."""
    return bool(np.bincount(set_of[world.fleet.is_up], minlength=world.scenario.num_sets).all())
