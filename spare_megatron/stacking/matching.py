"""Assigns the units of shards to groups in the least makespan, at least cost: the transport problem of every reorder.

Shard s has `demand[s]` units. Each is hosted, that is placed on a surviving host of the shard, or cold: placed on any
survivor, by way of the commons node. Within the makespan T a group that takes p per round has T // p rounds, of them
(T - fetch) // p for cold units; `stacking.paces.Rounds` says how many units fit, one each by default. On a pair (s, h)
the first `free[s, h]` units stay at no cost, every other unit moves at cost 1, and a cold one costs more than all moves
together. Primal-dual minimum-cost flow (Ford and Fulkerson 1962; Ahuja, Magnanti, Orlin, Network Flows, section 9.8).
Proof: docs/protocol_dealing.md.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from spare_megatron.stacking.paces import ONE_BY_ONE, Rounds
from spare_megatron.stacking.placement import BoolArray, IntArray, Placement

_FAR = np.iinfo(np.int64).max // 4
_SOURCE, _SINK, _FIRST_NODE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpreadProblem:
    """Units of demand to place on surviving groups. Arrays of pairs are flat: shard * redundancy + column."""

    placement: Placement
    is_alive: BoolArray
    """For each group; groups beyond those of the placement host nothing and take only cold units."""
    demand: IntArray
    free: IntArray
    """For each pair, how many units cost nothing there. 0 where the host is lost."""
    start: IntArray
    """For each pair, the units placed there at first; at most `free`, and per shard at most its demand."""
    pace: IntArray | int = 1
    """Time per round, at least 1, of all groups or of each."""
    rounds: Rounds = ONE_BY_ONE
    """The rounds that units take."""
    lacking: IntArray | int = 0
    """By how many of these rounds the pipeline fills sooner, of all groups or of each."""
    fetch: int | None = None
    """Time before a group can begin a cold unit, in the same unit of time; None if it never can."""

    def capacities(self, makespan: int) -> tuple[IntArray, IntArray]:
        """Units, and cold units, that each group can take within a makespan."""
        alive = self.is_alive.astype(np.int64)
        if self.fetch is None:
            return self._units(makespan) * alive, np.zeros_like(alive)
        return self._units(makespan) * alive, self._units(max(makespan - self.fetch, 0)) * alive

    def least_time(self, units: int) -> int:
        """The time that the fastest group needs for so many units."""
        return int(np.min(self._times(units)))

    def most_time(self, units: int) -> int:
        """The time in which every group is done with so many units, cold or not."""
        return int(np.max(self._times(units))) + (self.fetch or 0)

    @property
    def cold_cost(self) -> int:
        """More than all units cost if they move to hosts: cold units are as few as possible, whatever moves instead."""
        return int(self.demand.sum()) + 1

    def _units(self, time: int) -> IntArray:
        return self.rounds.num_units(np.asarray(time // self.pace + self.lacking, dtype=np.int64))

    def _times(self, units: int) -> IntArray:
        return np.asarray(self.pace * np.maximum(self.rounds.num_rounds(units) - self.lacking, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """A placement of all units at least cost."""

    flow: IntArray
    """For each pair, the hosted units."""
    cold: IntArray
    """For each shard, its cold units."""
    lent: IntArray
    """For each group, the cold units that it takes, of any shards."""
    makespan: int
    num_moves: int
    """Units beyond the free ones, cold units included."""
    num_phases: int
    """Distinct lengths of displacement chains that were needed; 0 if the start was complete."""
    shard_potential: IntArray
    """For each shard, its distance from the unplaced units."""
    host_potential: IntArray
    """For each group, likewise."""
    commons_potential: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bottleneck:
    """Proof that a makespan is too short: units with only some hosts, and cold capacity of some other groups."""

    demand: int
    is_host: BoolArray
    is_lender: BoolArray

    def least_makespan(self, problem: SpreadProblem) -> int:
        """The least makespan in which these groups have room for these units; longer than the one that failed."""

        def has_room(makespan: int) -> bool:
            total, cold = problem.capacities(makespan)
            return int(total[self.is_host].sum() + cold[self.is_lender].sum()) >= self.demand

        num_groups = int(self.is_host.sum() + self.is_lender.sum())
        each = -(-self.demand // num_groups)
        return bisect_left(range(problem.most_time(each)), True, lo=problem.least_time(each), key=has_room)


def makespan_bound(problem: SpreadProblem) -> int:
    """A lower bound from all groups together, and from shards without a host or from single ones. Cost: O(N r)."""
    placement, demand = problem.placement, problem.demand
    is_alive = problem.is_alive[placement.host_array]
    num_hosts = is_alive.sum(axis=1)
    nothing = np.zeros_like(problem.is_alive)
    if problem.fetch is not None:
        together = Bottleneck(demand=int(demand.sum()), is_host=problem.is_alive, is_lender=nothing)
        lost = Bottleneck(demand=int(demand[num_hosts == 0].sum()), is_host=nothing, is_lender=problem.is_alive)
        return max(together.least_makespan(problem), lost.least_makespan(problem) if lost.demand else 0)
    asked = nothing.copy()
    asked[placement.host_array[demand > 0]] = True
    asked &= problem.is_alive
    if not asked.any():
        return 0
    together = Bottleneck(demand=int(demand.sum()), is_host=asked, is_lender=nothing)
    per_shard = -(-demand // np.maximum(num_hosts, 1))
    alone = is_alive & (num_hosts == 1)[:, None]
    sole_host, its_shards = placement.host_array[alone], np.nonzero(alone)[0]
    per_sole_host = np.bincount(sole_host, weights=demand[its_shards], minlength=1)
    most = max(int(per_shard.max()), int(per_sole_host.max()))
    return max(together.least_makespan(problem), problem.least_time(most))


def least_spread(problem: SpreadProblem) -> Spread:
    """The spread of least makespan and then least cost; each failure raises the proven bound (Hall's condition)."""
    makespan = makespan_bound(problem)
    while True:
        result = cheapest_spread(problem, makespan)
        if isinstance(result, Spread):
            return result
        makespan = result.least_makespan(problem)


def cheapest_spread(problem: SpreadProblem, makespan: int) -> Spread | Bottleneck:
    """The spread of least cost within a makespan, or the bottleneck that proves there is none.

    Deterministic: nodes and arcs are numbered by ascending ids. Cost: per phase O(number of pairs) and a maximum flow.
    """
    residual = _Residual(problem, makespan)
    num_phases = 0
    while residual.is_incomplete():
        distances = residual.distances()
        if isinstance(distances, Bottleneck):
            return distances
        residual.augment(distances)
        num_phases += 1
    return Spread(
        flow=residual.flow,
        cold=residual.cold,
        lent=residual.lent,
        makespan=makespan,
        num_moves=int(np.maximum(residual.flow - problem.free, 0).sum() + residual.cold.sum()),
        num_phases=num_phases,
        shard_potential=residual.shard_potential,
        host_potential=residual.host_potential,
        commons_potential=residual.commons_potential,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Distances:
    """Reduced distances from the excess; `nearest` is that of the nearest host with spare capacity."""

    to_shard: IntArray
    to_host: IntArray
    to_commons: int
    nearest: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """Arcs between nodes of the network: how many more units each can carry, and how many it can give back."""

    tails: IntArray
    heads: IntArray
    ahead: IntArray
    back: IntArray


class _Residual:
    """A flow of least cost for the units placed so far, with the potentials that prove it."""

    def __init__(self, problem: SpreadProblem, makespan: int) -> None:
        placement = problem.placement
        self.problem = problem
        self.num_shards, self.redundancy = placement.host_array.shape
        self.num_groups = problem.is_alive.size
        self.hosts = placement.host_array.ravel()
        self.host_array, self.pair_array = placement.host_array, placement.pair_array
        self.stack_array = placement.stack_array
        self.is_alive = problem.is_alive
        self.free = problem.free
        self.flow = problem.start.copy()
        self.unplaced = problem.demand - self.flow.reshape(self.num_shards, self.redundancy).sum(axis=1)
        load = np.bincount(self.hosts, weights=self.flow, minlength=self.num_groups).astype(np.int64)
        total, self.most_lent = problem.capacities(makespan)
        self.spare = np.where(self.is_alive, total - load, 0)
        """Units a host can still take; negative where it must give some away."""
        self.cold = np.zeros(self.num_shards, dtype=np.int64)
        self.lent = np.zeros(self.num_groups, dtype=np.int64)
        self.cold_cost = problem.cold_cost
        self.shard_potential = np.zeros(self.num_shards, dtype=np.int64)
        self.host_potential = np.zeros(self.num_groups, dtype=np.int64)
        self.commons_potential = 0

    def is_incomplete(self) -> bool:
        return bool((self.unplaced > 0).any() or (self.spare < 0).any())

    def distances(self) -> _Distances | Bottleneck:
        """Dial's algorithm; upper bounds beyond the nearest host with spare capacity. `Bottleneck`: there is none."""
        ahead, back = self._reduced_costs()
        from_shard, from_host, on_to_shard, on_to_host = self._commons_costs()
        to_shard, to_commons = np.where(self.unplaced > 0, 0, _FAR), _FAR
        to_host = np.where(self.spare < 0, 0, _FAR)
        has_spare = self.spare > 0
        level = 0
        while level < _FAR:
            shards, hosts = np.flatnonzero(to_shard == level), np.flatnonzero(to_host == level)
            is_commons_left = to_commons >= level
            while shards.size or hosts.size or (is_commons_left and to_commons == level):
                if not (shards.size or hosts.size):
                    is_commons_left = False
                    hosts = _relax(to_host, np.arange(self.num_groups), on_to_host, level)
                    shards = _relax(to_shard, np.arange(self.num_shards), on_to_shard, level)
                    continue
                entry = min(from_shard[shards].min(initial=_FAR), from_host[hosts].min(initial=_FAR))
                to_commons = min(to_commons, level + int(entry))
                next_hosts = _relax(to_host, self.host_array[shards], ahead[shards], level)
                hosting = hosts[hosts < self.num_shards]
                shards = _relax(to_shard, self.stack_array[hosting], back[hosting], level)
                hosts = next_hosts
            if has_spare[to_host == level].any():
                return _Distances(to_shard=to_shard, to_host=to_host, to_commons=to_commons, nearest=level)
            further = [int(distance[distance > level].min(initial=_FAR)) for distance in (to_shard, to_host)]
            level = min(*further, to_commons if to_commons > level else _FAR)
        is_lender = self.is_alive & (to_host >= _FAR) & (to_commons < _FAR)
        demand = int(self.problem.demand[to_shard < _FAR].sum())
        return Bottleneck(demand=demand, is_host=to_host < _FAR, is_lender=is_lender)

    def _reduced_costs(self) -> tuple[IntArray, IntArray]:
        """Reduced costs of one unit more per pair, by shard, and of one unit less, by host; `_FAR` where impossible."""
        gap = self.host_potential[self.host_array] - self.shard_potential[:, None]
        flow, free = self.flow.reshape(gap.shape), self.free.reshape(gap.shape)
        ahead = np.where(self.is_alive[self.host_array], (flow >= free) - gap, _FAR)
        back = np.where(flow > 0, gap - (flow > free), _FAR)
        return ahead, back.ravel()[self.pair_array]

    def _commons_costs(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Reduced costs into the commons from each shard and host, and out of it to each; `_FAR` where impossible."""
        gap = self.commons_potential - self.shard_potential
        beyond = self.host_potential - self.commons_potential
        is_open = self.problem.fetch is not None
        return (
            np.where(is_open, self.cold_cost - gap, _FAR),
            np.where(self.lent > 0, beyond, _FAR),
            np.where(self.cold > 0, gap - self.cold_cost, _FAR),
            np.where(self.lent < self.most_lent, -beyond, _FAR),
        )

    def augment(self, distances: _Distances) -> None:
        level = distances.nearest
        self.shard_potential += np.minimum(distances.to_shard, level)
        self.host_potential += np.minimum(distances.to_host, level)
        self.commons_potential += min(distances.to_commons, level)
        near_host = (distances.to_host <= level) & self.is_alive
        near_shard = distances.to_shard <= level
        shards = np.flatnonzero(near_shard)
        pairs = (shards[:, None] * self.redundancy + np.arange(self.redundancy)).ravel()
        pairs = pairs[near_host[self.hosts[pairs]]]
        gap = self.host_potential[self.hosts[pairs]] - self.shard_potential[pairs // self.redundancy]
        pairs, gap = pairs[gap >= 0], gap[gap >= 0]
        is_near = distances.to_commons <= level
        lacking = np.flatnonzero(
            is_near & near_shard & (self.commons_potential - self.shard_potential == self.cold_cost)
        )
        lenders = np.flatnonzero(is_near & near_host & (self.host_potential == self.commons_potential))
        changes = self._push(pairs, gap, lacking, lenders, np.where(near_host, self.spare, 0))
        placed, cold, lent = changes
        self.flow[pairs] += placed
        self.cold[lacking] += cold
        self.lent[lenders] += lent
        n, m = self.num_shards, self.num_groups
        self.spare -= np.bincount(self.hosts[pairs], weights=placed, minlength=m).astype(np.int64)
        self.spare[lenders] -= lent
        self.unplaced -= np.bincount(pairs // self.redundancy, weights=placed, minlength=n).astype(np.int64)
        self.unplaced[lacking] -= cold

    def _push(
        self, pairs: IntArray, gap: IntArray, lacking: IntArray, lenders: IntArray, spare: IntArray
    ) -> list[IntArray]:
        """Maximum flow from excess to spare capacity over some pairs, and over the commons from some shards to some
        hosts: units that each of the three gains (negative: loses).
        """
        shards, hosts = pairs // self.redundancy, self.hosts[pairs]
        is_shard = np.bincount(shards, minlength=self.num_shards) > 0
        is_host = np.bincount(hosts, minlength=self.num_groups) > 0
        is_shard[lacking] = is_host[lenders] = True
        shard_node = _FIRST_NODE + np.cumsum(is_shard) - 1
        host_node = _FIRST_NODE + int(is_shard.sum()) + np.cumsum(is_host) - 1
        commons = int(host_node[-1]) + 1
        flow, free = self.flow[pairs], self.free[pairs]
        total = int(self.unplaced.sum() + np.maximum(-self.spare, 0).sum())
        links = [
            _Link(
                tails=shard_node[shards],
                heads=host_node[hosts],
                ahead=np.where(gap == 0, free - flow, total),
                back=np.where(gap == 0, flow, flow - free),
            ),
            _Link(
                tails=shard_node[lacking],
                heads=np.full(lacking.size, commons),
                ahead=np.full(lacking.size, total),
                back=self.cold[lacking],
            ),
            _Link(
                tails=np.full(lenders.size, commons),
                heads=host_node[lenders],
                ahead=(self.most_lent - self.lent)[lenders],
                back=self.lent[lenders],
            ),
        ]
        waiting = np.flatnonzero(is_shard & (self.unplaced > 0))
        giving, taking = np.flatnonzero(is_host & (spare < 0)), np.flatnonzero(is_host & (spare > 0))
        sources = (np.concatenate((shard_node[waiting], host_node[giving])), host_node[taking])
        limits = (np.concatenate((self.unplaced[waiting], -spare[giving])), spare[taking])
        return _changes_by_maximum_flow(links, sources, limits)


def match_slots(rows: IntArray, hosts: IntArray, num_rows: int, num_slots: int) -> IntArray | None:
    """For each row one of the hosts that it is paired with, none more often than `num_slots` times; None if there is no
    such choice. Pairs are in ascending order of rows. Hopcroft-Karp.
    """
    slots = (hosts[:, None] * num_slots + np.arange(num_slots)).ravel()
    ends = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=num_rows)) * num_slots))
    graph = csr_array(
        (np.ones(slots.size, dtype=np.int8), slots.astype(np.int32), ends.astype(np.int32)),
        shape=(num_rows, num_slots * (int(hosts.max(initial=0)) + 1)),
    )
    found = maximum_bipartite_matching(graph, perm_type="column")
    return None if (found < 0).any() else found.astype(np.int64) // num_slots


def _changes_by_maximum_flow(
    links: list[_Link], ends: tuple[IntArray, IntArray], limits: tuple[IntArray, IntArray]
) -> list[IntArray]:
    """Units that each arc of the links gains under a maximum flow from the first ends to the second, within limits."""
    can_go = [np.flatnonzero(link.ahead > 0) for link in links]
    can_return = [np.flatnonzero(link.back > 0) for link in links]
    tails, heads, most = [], [], []
    for link, go, back in zip(links, can_go, can_return, strict=True):
        tails += [link.tails[go], link.heads[back]]
        heads += [link.heads[go], link.tails[back]]
        most += [link.ahead[go], link.back[back]]
    tails += [np.full(ends[0].size, _SOURCE), ends[1]]
    heads += [ends[0], np.full(ends[1].size, _SINK)]
    solver = max_flow.SimpleMaxFlow()
    arcs = solver.add_arcs_with_capacity(*map(np.concatenate, (tails, heads, [*most, *limits])))
    status = solver.solve(_SOURCE, _SINK)
    assert status == max_flow.SimpleMaxFlow.OPTIMAL, status
    flows = solver.flows(arcs)
    changes = []
    for link, go, back in zip(links, can_go, can_return, strict=True):
        change = np.zeros(link.tails.size, dtype=np.int64)
        change[go] += flows[: go.size]
        change[back] -= flows[go.size : go.size + back.size]
        flows = flows[go.size + back.size :]
        changes.append(change)
    return changes


def _relax(distance: IntArray, heads: IntArray, cost: IntArray, level: int) -> IntArray:
    """Lowers distances in place along arcs that leave a level; returns the nodes that now are at that level, too."""
    better = cost < distance[heads] - level
    heads, cost = heads[better], cost[better]
    np.minimum.at(distance, heads, cost + level)
    is_next = np.zeros(distance.size, dtype=np.bool_)
    is_next[heads[cost == 0]] = True
    return np.flatnonzero(is_next)
