"""Assigns the demand of shards to hosts at least capacity, then least cost: the one transport problem of every reorder.

Shard s has `demand[s]` units, each placed on one of its surviving hosts; no host takes more than `capacity`. On a pair
(s, h) the first `free[s, h]` units cost 0 (they stay), every further one 1 (it moves). Primal-dual minimum-cost flow
(Ford and Fulkerson 1962; Ahuja, Magnanti, Orlin, Network Flows, section 9.8). Proof: docs/protocol.md.
"""

from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from spare_megatron.stacking.placement import BoolArray, IntArray, Placement

_FAR = np.iinfo(np.int64).max // 4
_SOURCE, _SINK, _FIRST_NODE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpreadProblem:
    """Units of demand to place on surviving hosts. Arrays of pairs are flat: shard * redundancy + column.

    Attributes:
        free: For each pair, how many units cost nothing there. 0 where the host is lost.
        start: For each pair, the units placed there at first; at most `free`, and per shard at most its demand.
    """

    placement: Placement
    is_alive: BoolArray
    demand: IntArray
    free: IntArray
    start: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """A placement of all units at least cost.

    Attributes:
        num_phases: Distinct lengths of displacement chains that were needed; 0 if the start was complete.
        shard_potential: For each shard, and `host_potential` for each group, its distance from the unplaced units.
    """

    flow: IntArray
    capacity: int
    cost: int
    num_phases: int
    shard_potential: IntArray
    host_potential: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Proof that a capacity is too small: units of shards that have only `num_hosts` surviving hosts in total."""

    demand: int
    num_hosts: int

    @property
    def least_capacity(self) -> int:
        """The least capacity at which these shards fit; larger than the one that failed."""
        return -(-self.demand // self.num_hosts)


def capacity_bound(problem: SpreadProblem) -> int:
    """A lower bound on the feasible capacity: from all groups together, each shard and each sole host. Cost: O(N r)."""
    placement, demand = problem.placement, problem.demand
    is_alive = problem.is_alive[placement.host_array]
    num_hosts = is_alive.sum(axis=1)
    asked = np.zeros(placement.num_groups, dtype=np.bool_)
    asked[placement.host_array[demand > 0]] = True
    per_group = -(-int(demand.sum()) // max(int((asked & problem.is_alive).sum()), 1))
    per_shard = -(-demand // np.maximum(num_hosts, 1))
    alone = is_alive & (num_hosts == 1)[:, None]
    sole_host, its_shards = placement.host_array[alone], np.nonzero(alone)[0]
    per_sole_host = np.bincount(sole_host, weights=demand[its_shards], minlength=1)
    return max(per_group, int(per_shard.max()), int(per_sole_host.max()))


def least_spread(problem: SpreadProblem) -> Spread:
    """The spread of least capacity and then least cost; each failure raises the proven bound (Hall's condition)."""
    capacity = capacity_bound(problem)
    while True:
        result = cheapest_spread(problem, capacity)
        if isinstance(result, Spread):
            return result
        capacity = result.least_capacity


def cheapest_spread(problem: SpreadProblem, capacity: int) -> Spread | Bottleneck:
    """The spread of least cost under a capacity, or the bottleneck that proves there is none.

    Deterministic: nodes and arcs are numbered by ascending ids. Cost: per phase O(number of pairs) and a maximum flow.
    """
    residual = _Residual(problem, capacity)
    num_phases = 0
    while residual.is_incomplete():
        distances = residual.distances()
        if isinstance(distances, Bottleneck):
            return distances
        residual.augment(*distances)
        num_phases += 1
    return Spread(
        flow=residual.flow,
        capacity=capacity,
        cost=int(np.maximum(residual.flow - problem.free, 0).sum()),
        num_phases=num_phases,
        shard_potential=residual.shard_potential,
        host_potential=residual.host_potential,
    )


def is_certified(problem: SpreadProblem, spread: Spread) -> bool:
    """Whether the potentials of a spread prove that it is feasible and of least cost.

    Complementary slackness, with gap = potential of host - potential of shard: a pair with a gap below 0 carries
    nothing, with gap 0 at most its free units, with gap 1 at least those; larger gaps do not occur. A surviving host
    below the highest potential is full, and no potential is negative. Cost: O(N r).
    """
    placement, r = problem.placement, problem.placement.redundancy
    hosts = placement.host_array.ravel()
    alive = problem.is_alive[hosts]
    gap = spread.host_potential[hosts] - np.repeat(spread.shard_potential, r)
    load = np.bincount(hosts, weights=spread.flow, minlength=placement.num_groups)
    top = max(int(spread.host_potential.max()), int(spread.shard_potential.max()))
    is_full = load == spread.capacity
    return bool(
        (spread.flow >= 0).all()
        and (spread.flow[~alive] == 0).all()
        and (spread.flow.reshape(-1, r).sum(axis=1) == problem.demand).all()
        and (load <= spread.capacity).all()
        and (gap[alive] <= 1).all()
        and (spread.flow[alive & (gap < 0)] == 0).all()
        and (spread.flow <= problem.free)[alive & (gap == 0)].all()
        and (spread.flow >= problem.free)[alive & (gap == 1)].all()
        and (is_full | (spread.host_potential == top))[problem.is_alive].all()
        and spread.host_potential.min() >= 0
        and spread.shard_potential.min() >= 0
    )


class _Residual:
    """A flow of least cost for the units placed so far, with the potentials that prove it."""

    def __init__(self, problem: SpreadProblem, capacity: int) -> None:
        placement = problem.placement
        self.num_groups, self.redundancy = placement.host_array.shape
        self.hosts = placement.host_array.ravel()
        self.host_array, self.pair_array, self.stack_array = (
            placement.host_array,
            placement.pair_array,
            placement.stack_array,
        )
        self.is_alive = problem.is_alive
        self.free = problem.free
        self.demand = problem.demand
        self.flow = problem.start.copy()
        self.unplaced = problem.demand - self.flow.reshape(self.num_groups, self.redundancy).sum(axis=1)
        load = np.bincount(self.hosts, weights=self.flow, minlength=self.num_groups).astype(np.int64)
        self.spare = np.where(self.is_alive, capacity - load, 0)
        """Units a host can still take; negative where it must give some away."""
        self.shard_potential = np.zeros(self.num_groups, dtype=np.int64)
        self.host_potential = np.zeros(self.num_groups, dtype=np.int64)

    def is_incomplete(self) -> bool:
        return bool((self.unplaced > 0).any() or (self.spare < 0).any())

    def distances(self) -> tuple[IntArray, IntArray, int] | Bottleneck:
        """Reduced distances of shards and hosts from the excess, and that of the nearest host with spare capacity.

        Dial's algorithm; distances beyond that host are upper bounds. A `Bottleneck` if no such host is reachable.
        """
        ahead, back = self._reduced_costs()
        to_shard = np.where(self.unplaced > 0, 0, _FAR)
        to_host = np.where(self.spare < 0, 0, _FAR)
        has_spare = self.spare > 0
        level = 0
        while level < _FAR:
            shards, hosts = np.flatnonzero(to_shard == level), np.flatnonzero(to_host == level)
            while shards.size or hosts.size:
                next_hosts = _relax(to_host, self.host_array[shards], ahead[shards], level)
                shards = _relax(to_shard, self.stack_array[hosts], back[hosts], level)
                hosts = next_hosts
            if has_spare[to_host == level].any():
                return to_shard, to_host, level
            level = min(int(distance[distance > level].min(initial=_FAR)) for distance in (to_shard, to_host))
        return Bottleneck(demand=int(self.demand[to_shard < _FAR].sum()), num_hosts=int((to_host < _FAR).sum()))

    def _reduced_costs(self) -> tuple[IntArray, IntArray]:
        """Reduced costs of one unit more per pair, by shard, and of one unit less, by host; `_FAR` where impossible."""
        gap = self.host_potential[self.host_array] - self.shard_potential[:, None]
        flow, free = self.flow.reshape(gap.shape), self.free.reshape(gap.shape)
        ahead = np.where(self.is_alive[self.host_array], (flow >= free) - gap, _FAR)
        back = np.where(flow > 0, gap - (flow > free), _FAR)
        return ahead, back.ravel()[self.pair_array]

    def augment(self, to_shard: IntArray, to_host: IntArray, level: int) -> None:
        self.shard_potential += np.minimum(to_shard, level)
        self.host_potential += np.minimum(to_host, level)
        near_host = (to_host <= level) & self.is_alive
        shards = np.flatnonzero(to_shard <= level)
        pairs = (shards[:, None] * self.redundancy + np.arange(self.redundancy)).ravel()
        pairs = pairs[near_host[self.hosts[pairs]]]
        gap = self.host_potential[self.hosts[pairs]] - self.shard_potential[pairs // self.redundancy]
        pairs, gap = pairs[gap >= 0], gap[gap >= 0]
        flow, free = self.flow[pairs], self.free[pairs]
        total = int(self.unplaced.sum() + np.maximum(-self.spare, 0).sum())
        ahead = np.where(gap == 0, free - flow, total)
        back = np.where(gap == 0, flow, flow - free)
        change = self._push(pairs, ahead, back, np.where(near_host, self.spare, 0))
        self.flow[pairs] += change
        n = self.num_groups
        self.spare -= np.bincount(self.hosts[pairs], weights=change, minlength=n).astype(np.int64)
        self.unplaced -= np.bincount(pairs // self.redundancy, weights=change, minlength=n).astype(np.int64)

    def _push(self, pairs: IntArray, ahead: IntArray, back: IntArray, spare: IntArray) -> IntArray:
        """Maximum flow from excess to spare capacity over some pairs: units that each pair gains (negative: loses)."""
        shard_node = np.full(self.num_groups, -1, dtype=np.int64)
        host_node = np.full(self.num_groups, -1, dtype=np.int64)
        shards, hosts = pairs // self.redundancy, self.hosts[pairs]
        is_shard = np.bincount(shards, minlength=self.num_groups) > 0
        is_host = np.bincount(hosts, minlength=self.num_groups) > 0
        num_shards = int(is_shard.sum())
        shard_node[is_shard] = _FIRST_NODE + np.arange(num_shards)
        host_node[is_host] = _FIRST_NODE + num_shards + np.arange(int(is_host.sum()))

        can_go, can_return = np.flatnonzero(ahead > 0), np.flatnonzero(back > 0)
        waiting = np.flatnonzero(is_shard & (self.unplaced > 0))
        giving, taking = np.flatnonzero(is_host & (spare < 0)), np.flatnonzero(is_host & (spare > 0))
        tails = (
            shard_node[shards[can_go]],
            host_node[hosts[can_return]],
            np.full(waiting.size + giving.size, _SOURCE),
            host_node[taking],
        )
        heads = (
            host_node[hosts[can_go]],
            shard_node[shards[can_return]],
            shard_node[waiting],
            host_node[giving],
            np.full(taking.size, _SINK),
        )
        limits = (ahead[can_go], back[can_return], self.unplaced[waiting], -spare[giving], spare[taking])
        solver = max_flow.SimpleMaxFlow()
        arcs = solver.add_arcs_with_capacity(np.concatenate(tails), np.concatenate(heads), np.concatenate(limits))
        status = solver.solve(_SOURCE, _SINK)
        assert status == max_flow.SimpleMaxFlow.OPTIMAL, status
        flows = solver.flows(arcs[: can_go.size + can_return.size])
        change = np.zeros(pairs.size, dtype=np.int64)
        change[can_go] += flows[: can_go.size]
        change[can_return] -= flows[can_go.size :]
        return change


def _relax(distance: IntArray, heads: IntArray, cost: IntArray, level: int) -> IntArray:
    """Lowers distances in place along arcs that leave a level; returns the nodes that now are at that level, too."""
    better = cost < distance[heads] - level
    heads, cost = heads[better], cost[better]
    np.minimum.at(distance, heads, cost + level)
    is_next = np.zeros(distance.size, dtype=np.bool_)
    is_next[heads[cost == 0]] = True
    return np.flatnonzero(is_next)
