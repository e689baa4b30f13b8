"""Checks a spread without the solver: what its potentials prove."""

import numpy as np

from spare_megatron.stacking.matching import Spread, SpreadProblem


def is_certified(problem: SpreadProblem, spread: Spread) -> bool:
    """Whether the potentials of a spread prove that it is feasible and of least cost.

    Complementary slackness, with gap = potential of host - potential of shard: a pair with a gap below 0 carries
    nothing, with gap 0 at most its free units, with gap 1 at least those; larger gaps do not occur. A surviving host
    below the highest potential is full, and no potential is negative. For cold units `_is_commons_certified`. Cost:
    O(N r).
    """
    placement, r = problem.placement, problem.placement.redundancy
    hosts = placement.host_array.ravel()
    alive = problem.is_alive[hosts]
    gap = spread.host_potential[hosts] - np.repeat(spread.shard_potential, r)
    load = np.bincount(hosts, weights=spread.flow, minlength=problem.is_alive.size) + spread.lent
    top = max(int(spread.host_potential.max()), int(spread.shard_potential.max()), spread.commons_potential)
    total, _ = problem.capacities(spread.makespan)
    return bool(
        (spread.flow >= 0).all()
        and (spread.flow[~alive] == 0).all()
        and (spread.flow.reshape(-1, r).sum(axis=1) + spread.cold == problem.demand).all()
        and (load <= total).all()
        and (gap[alive] <= 1).all()
        and (spread.flow[alive & (gap < 0)] == 0).all()
        and (spread.flow <= problem.free)[alive & (gap == 0)].all()
        and (spread.flow >= problem.free)[alive & (gap == 1)].all()
        and ((load == total) | (spread.host_potential == top))[problem.is_alive].all()
        and spread.host_potential.min() >= 0
        and spread.shard_potential.min() >= 0
        and _is_commons_certified(problem, spread)
    )


def _is_commons_certified(problem: SpreadProblem, spread: Spread) -> bool:
    """The same for the commons: no shard lies more than the cost of a cold unit below it, and one that has cold units
    lies exactly that much below. A survivor above the commons takes all cold units that it can, one below takes none.
    """
    _, capacity = problem.capacities(spread.makespan)
    if problem.fetch is None:
        return not spread.cold.any() and not spread.lent.any()
    gap = spread.commons_potential - spread.shard_potential
    beyond = spread.host_potential - spread.commons_potential
    return bool(
        (spread.cold >= 0).all()
        and (spread.lent >= 0).all()
        and (spread.lent <= capacity).all()
        and spread.cold.sum() == spread.lent.sum()
        and (gap <= problem.cold_cost).all()
        and (gap == problem.cold_cost)[spread.cold > 0].all()
        and (spread.lent == capacity)[problem.is_alive & (beyond > 0)].all()
        and (spread.lent[beyond < 0] == 0).all()
        and spread.commons_potential >= 0
    )
