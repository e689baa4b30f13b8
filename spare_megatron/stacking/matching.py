"""Assigns the units of shards to groups in the least makespan, at least cost: the transport problem of every reorder.

Shard s has `demand[s]` units. Each is hosted, that is placed on a surviving host of the shard, or cold: placed on any
survivor, by way of the commons node. Within the makespan T a group that takes p per round has T // p rounds, of them
(T - fetch) // p for cold units; `stacking.paces.Rounds` says how many units fit, one each by default. On a pair (s, h)
the first `free[s, h]` units stay at no cost, every other unit moves at cost 1, and a cold one costs more than all moves
together. docs/protocol_dealing.md has the rules.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow, min_cost_flow
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from spare_megatron.stacking.paces import ONE_BY_ONE, Rounds
from spare_megatron.stacking.placement import BoolArray, IntArray, Placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpreadProblem:
    """Units of demand to place on surviving groups. Arrays of pairs are flat: shard * redundancy + column."""

    placement: Placement
    is_alive: BoolArray
    """For each group; groups beyond those of the placement host nothing and take only cold units."""
    demand: IntArray
    free: IntArray
    """For each pair, how many units are no moves there. 0 where the host is lost."""
    rank: IntArray | int = 0
    """For each pair, or all: among spreads with as few moves the least sum over free units is the cheapest."""
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
    def move_cost(self) -> int:
        """More than all units cost if they stay."""
        return int(self.demand.sum()) * int(np.max(self.rank)) + 1

    @property
    def cold_cost(self) -> int:
        """More than all units cost if they move to hosts: cold units are as few as possible, whatever moves instead."""
        return (int(self.demand.sum()) + 1) * self.move_cost

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

    Deterministic: nodes and arcs are numbered by ascending ids. Cost: a minimum-cost flow over the pairs of the shards
    that lack units or, if not all free units can stay, of all shards.
    """
    network = _Network(problem, makespan)
    return network.with_all_free_units() or network.cheapest() or network.bottleneck()


_Arcs = tuple[IntArray | int, IntArray | int, IntArray | int, IntArray | int]
"""Tails, heads, capacities and the cost of a unit."""


class _Network:
    """Demand, pairs and room within a makespan. Nodes: shards, groups, the commons, and the two ends of the flow."""

    def __init__(self, problem: SpreadProblem, makespan: int) -> None:
        self._problem, self._makespan = problem, makespan
        self._num_shards, self._redundancy = problem.placement.host_array.shape
        self._hosts = problem.placement.host_array.ravel()
        self._groups = self._num_shards + np.arange(problem.is_alive.size)
        self._commons = self._num_shards + problem.is_alive.size
        self._sink, self._source = self._commons + 1, self._commons + 2
        self._room, self._most_lent = problem.capacities(makespan)
        self._pairs = np.flatnonzero(problem.is_alive[self._hosts])

    def with_all_free_units(self) -> Spread | None:
        """A spread in which they all stay, and no unit is cold: no other moves fewer. None if there is none."""
        problem = self._problem
        left = problem.demand - problem.free.reshape(-1, self._redundancy).sum(axis=1)
        room = self._room - np.bincount(self._hosts, problem.free, self._room.size).astype(np.int64)
        if min(left.min(), room.min()) < 0:
            return None
        pairs = self._pairs[left[self._pairs // self._redundancy] > 0]
        return self._solved(left, self._arcs_of_pairs(left, room, pairs), pairs, problem.free)

    def cheapest(self) -> Spread | None:
        """The spread of least cost; None if demand exceeds the room of its hosts."""
        return self._solved(self._problem.demand, self._arcs(), self._pairs, np.zeros_like(self._problem.free))

    def bottleneck(self) -> Bottleneck:
        """What stands on the side of the source of a minimum cut, if demand exceeds the room of its hosts."""
        demand, solver = self._problem.demand, max_flow.SimpleMaxFlow()
        solver.add_arcs_with_capacity(self._source, np.arange(self._num_shards), demand)
        for tails, heads, most, _ in self._arcs():
            solver.add_arcs_with_capacity(tails, heads, most)
        status = solver.solve(self._source, self._sink)
        assert status == solver.OPTIMAL, status
        is_near = np.zeros(self._source + 1, dtype=np.bool_)
        is_near[solver.get_source_side_min_cut()] = True
        is_host = is_near[self._groups]
        is_lender = self._problem.is_alive & ~is_host & is_near[self._commons]
        return Bottleneck(demand=int(demand[is_near[: self._num_shards]].sum()), is_host=is_host, is_lender=is_lender)

    def _arcs(self) -> list[_Arcs]:
        """All arcs. Free units are arcs of their own, and those through the commons come last."""
        problem, shards = self._problem, np.arange(self._num_shards)
        arcs = self._arcs_of_pairs(problem.demand, self._room, self._pairs, problem.free[self._pairs])
        if problem.fetch is not None:
            arcs.append((shards, self._commons, problem.demand, problem.cold_cost))
            arcs.append((self._commons, self._groups, self._most_lent, 0))
        return arcs

    def _arcs_of_pairs(
        self, demand: IntArray, room: IntArray, pairs: IntArray, free: IntArray | int = 0
    ) -> list[_Arcs]:
        shards, groups = pairs // self._redundancy, self._groups[self._hosts[pairs]]
        ranks = np.broadcast_to(self._problem.rank, self._hosts.shape)[pairs]
        return [
            (self._groups, self._sink, room, 0),
            (shards, groups, demand[shards], self._problem.move_cost),
            (shards, groups, free, ranks),
        ]

    def _solved(self, demand: IntArray, arcs: list[_Arcs], pairs: IntArray, start: IntArray) -> Spread | None:
        """The cheapest flow of this demand, beside the units of `start`; None if there is no flow of all of it."""
        solver = min_cost_flow.SimpleMinCostFlow()
        numbers = [solver.add_arcs_with_capacity_and_unit_cost(*of_kind) for of_kind in arcs]
        solver.set_nodes_supplies(np.arange(self._num_shards), demand)
        solver.set_node_supply(self._sink, -int(demand.sum()))
        if (status := solver.solve()) == solver.INFEASIBLE:
            return None
        assert status == solver.OPTIMAL, status
        _, moved, stayed, *through_commons = (solver.flows(of_kind) for of_kind in numbers)
        nothing = np.zeros_like(demand), np.zeros_like(self._room)
        cold, lent = through_commons or nothing
        flow = start.copy()
        flow[pairs] += moved + stayed
        return Spread(
            flow=flow,
            cold=cold,
            lent=lent,
            makespan=self._makespan,
            num_moves=int(np.maximum(flow - self._problem.free, 0).sum() + cold.sum()),
        )


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
