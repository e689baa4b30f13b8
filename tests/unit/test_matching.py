"""Least capacity and least cost, against an independent solver."""

import numpy as np
import pytest
from ortools.graph.python import min_cost_flow

from spare_megatron.stacking.matching import (
    Bottleneck,
    Spread,
    SpreadProblem,
    capacity_bound,
    cheapest_spread,
    is_certified,
    least_spread,
)
from spare_megatron.stacking.placement import Placement, make_placement


def oracle_cost(problem: SpreadProblem, capacity: int) -> int | None:
    """Cost by cost scaling on the whole network with every pair as two arcs; None where there is no spread."""
    placement, n = problem.placement, problem.placement.num_groups
    hosts, r = placement.host_array.ravel(), placement.redundancy
    pairs = np.flatnonzero(problem.is_alive[hosts])
    shards = pairs // r
    alive = np.flatnonzero(problem.is_alive)
    solver = min_cost_flow.SimpleMinCostFlow()
    total = int(problem.demand.sum())
    add = solver.add_arcs_with_capacity_and_unit_cost
    add(shards, n + hosts[pairs], problem.free[pairs], np.zeros(pairs.size, int))
    add(shards, n + hosts[pairs], np.full(pairs.size, total), np.ones(pairs.size, int))
    add(n + alive, np.full(alive.size, 2 * n), np.full(alive.size, capacity), np.zeros(alive.size, int))
    solver.set_nodes_supplies(np.arange(n), problem.demand)
    solver.set_node_supply(2 * n, -total)
    return int(solver.optimal_cost()) if solver.solve() == solver.OPTIMAL else None


def oracle(problem: SpreadProblem) -> tuple[int, int]:
    capacity = 0
    while (cost := oracle_cost(problem, capacity)) is None:
        capacity += 1
    return capacity, cost


def random_problem(rng: np.random.Generator, *, start_is_free: bool) -> SpreadProblem:
    n = int(rng.integers(3, 14))
    r = int(rng.integers(1, min(n, 5) + 1))
    placement = make_placement("golomb" if rng.random() < 0.7 else "consecutive", n, r)
    is_alive = rng.random(n) < rng.uniform(0.4, 1)
    is_alive[placement.host_array[~is_alive[placement.host_array].any(axis=1), 0]] = True
    demand = rng.integers(0, 6, n)
    free = np.where(is_alive[placement.host_array], rng.integers(0, 4, (n, r)), 0)
    if start_is_free:
        over = np.cumsum(free, axis=1) - demand[:, None]
        free = np.clip(free - np.maximum(over, 0), 0, None)
    start = free if start_is_free else np.zeros_like(free)
    return SpreadProblem(placement=placement, is_alive=is_alive, demand=demand, free=free.ravel(), start=start.ravel())


def two_shards_on_one_pair() -> SpreadProblem:
    """Shard 0 on groups 0 and 1, shard 1 on groups 1 and 0; both units of both shards lie on group 0."""
    return SpreadProblem(
        placement=Placement(hosts=((0, 1), (1, 0))),
        is_alive=np.array([True, True]),
        demand=np.array([2, 2]),
        free=np.array([2, 0, 0, 2]),
        start=np.array([2, 0, 0, 2]),
    )


def test_an_overloaded_host_gives_away_just_its_surplus() -> None:
    spread = least_spread(two_shards_on_one_pair())
    assert (spread.capacity, spread.cost) == (2, 2)
    assert np.bincount([0, 1, 1, 0], weights=spread.flow).tolist() == [2, 2]


def test_what_fits_as_it_lies_is_left_alone() -> None:
    spread = cheapest_spread(two_shards_on_one_pair(), 4)
    assert isinstance(spread, Spread)
    assert spread.flow.tolist() == [2, 0, 0, 2]
    assert (spread.cost, spread.num_phases) == (0, 0)


def test_too_small_a_capacity_yields_shards_that_prove_it() -> None:
    result = cheapest_spread(two_shards_on_one_pair(), 1)
    assert result == Bottleneck(demand=4, num_hosts=2)
    assert result.least_capacity == 2


def test_a_chain_of_displacements_is_found_where_no_direct_hop_fits() -> None:
    # A ring of 4 with group 0 lost. Shard 0 can go to group 3 only, which is full with shard 3, which can go to group
    # 2, and so on: at capacity 2 with one microbatch everywhere there is room, at 4 units over 3 groups.
    ring = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))
    kept = np.array([[0, 0], [3, 0], [3, 0], [3, 0]])
    problem = SpreadProblem(
        placement=ring,
        is_alive=np.array([False, True, True, True]),
        demand=np.full(4, 3),
        free=kept.ravel(),
        start=kept.ravel(),
    )
    spread = least_spread(problem)
    # 12 units on 3 groups: group 3 takes 3, hands on 2, of which group 2 hands on 1.
    assert (spread.capacity, spread.cost, spread.num_phases) == (4, 6, 3)
    assert spread.flow.reshape(4, 2).tolist() == [[0, 3], [3, 0], [2, 1], [1, 2]]


@pytest.mark.parametrize("start_is_free", [True, False])
@pytest.mark.parametrize("seed", range(150))
def test_capacity_and_cost_agree_with_a_general_solver(seed: int, start_is_free: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, start_is_free=start_is_free)
    spread = least_spread(problem)
    assert (spread.capacity, spread.cost) == oracle(problem)
    assert capacity_bound(problem) <= spread.capacity
    assert is_certified(problem, spread)
    roomy = cheapest_spread(problem, spread.capacity + int(rng.integers(1, 4)))
    assert isinstance(roomy, Spread)
    assert is_certified(problem, roomy)
    assert roomy.cost == oracle_cost(problem, roomy.capacity)
    if spread.capacity:
        tight = cheapest_spread(problem, spread.capacity - 1)
        assert isinstance(tight, Bottleneck)
        assert spread.capacity - 1 < tight.least_capacity <= spread.capacity


def test_the_certificate_rejects_a_spread_that_costs_too_much() -> None:
    problem = two_shards_on_one_pair()
    spread = cheapest_spread(problem, 4)
    assert isinstance(spread, Spread)
    worse = Spread(
        flow=np.array([1, 1, 0, 2]),
        capacity=4,
        cost=1,
        num_phases=1,
        shard_potential=spread.shard_potential,
        host_potential=spread.host_potential,
    )
    assert is_certified(problem, spread)
    assert not is_certified(problem, worse)
