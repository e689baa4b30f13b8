"""Least makespan and least cost, against an independent solver."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from spare_megatron.stacking.matching import (
    Bottleneck,
    Spread,
    SpreadProblem,
    cheapest_spread,
    least_spread,
    makespan_bound,
)
from spare_megatron.stacking.paces import Rounds
from spare_megatron.stacking.placement import Placement, make_placement

COLD_COST = 10**6


def units_within(time: int, pace: int, rounds: Rounds, lacking: int) -> int:
    """The most units whose time is no longer, counted up one by one."""
    units = 0
    while True:
        passes = -(-(units + 1) * rounds.size // rounds.lanes)
        passes += -passes % rounds.multiple
        if (passes + rounds.fill - lacking) * pace > time:
            return units
        units += 1


def oracle_cost(problem: SpreadProblem, makespan: int) -> int | None:
    """Cost by linear programming with a variable for each arc; None where there is no spread."""
    placement, n, m = problem.placement, problem.placement.num_groups, problem.is_alive.size
    hosts, r = placement.host_array.ravel(), placement.redundancy
    pairs, alive = np.flatnonzero(problem.is_alive[hosts]), np.flatnonzero(problem.is_alive)
    pace, lacking = (np.broadcast_to(of_groups, m)[alive].tolist() for of_groups in (problem.pace, problem.lacking))
    most = [units_within(makespan, p, problem.rounds, k) for p, k in zip(pace, lacking, strict=True)]
    left = makespan - (makespan + 1 if problem.fetch is None else problem.fetch)
    most_cold = [units_within(left, p, problem.rounds, k) for p, k in zip(pace, lacking, strict=True)]
    commons = n + m
    tails = np.concatenate([pairs // r, pairs // r, n + alive, np.arange(n), np.full(alive.size, commons)])
    heads = [n + hosts[pairs], n + hosts[pairs], np.full(alive.size, commons + 1), np.full(n, commons), n + alive]
    total = int(problem.demand.sum())
    limits = [problem.free[pairs], np.full(pairs.size, total), most, problem.demand, most_cold]
    costs = np.repeat([0, 1, 0, COLD_COST, 0], [len(one) for one in limits])
    arcs = np.arange(tails.size)
    balance = np.zeros((commons + 2, tails.size))
    np.add.at(balance, (tails, arcs), 1)
    np.add.at(balance, (np.concatenate(heads), arcs), -1)
    supplies = np.concatenate([problem.demand, np.zeros(m + 1), [-total]])
    bounds = np.column_stack([np.zeros(tails.size), np.concatenate(limits)])
    found = linprog(costs, A_eq=balance, b_eq=supplies, bounds=bounds, method="highs")
    assert found.status in (0, 2), found.message
    return round(found.fun) if found.status == 0 else None


def cost_of(problem: SpreadProblem, spread: Spread) -> int:
    hosted = int(np.maximum(spread.flow - problem.free, 0).sum())
    num_cold = int(spread.cold.sum())
    assert spread.num_moves == hosted + num_cold
    return hosted + COLD_COST * num_cold


def random_problem(rng: np.random.Generator, *, may_stay: bool) -> SpreadProblem:
    n = int(rng.integers(3, 14))
    r = int(rng.integers(1, min(n, 5) + 1))
    placement = make_placement("golomb" if rng.random() < 0.7 else "consecutive", n, r)
    is_alive = rng.random(n) < rng.uniform(0.4, 1)
    is_alive[placement.host_array[~is_alive[placement.host_array].any(axis=1), 0]] = True
    demand = rng.integers(0, 6, n)
    free = np.where(is_alive[placement.host_array], rng.integers(0, 4, (n, r)), 0)
    if may_stay:
        over = np.cumsum(free, axis=1) - demand[:, None]
        free = np.clip(free - np.maximum(over, 0), 0, None)
    return SpreadProblem(placement=placement, is_alive=is_alive, demand=demand, free=free.ravel())


def with_rounds(problem: SpreadProblem, rng: np.random.Generator) -> SpreadProblem:
    size, lanes, multiple = rng.integers(1, 4, 3).tolist()
    rounds = Rounds(size=size, lanes=lanes, multiple=multiple, fill=int(rng.integers(0, 3)))
    return replace(problem, rounds=rounds, lacking=rng.integers(0, rounds.fill + 1, problem.is_alive.size))


def two_shards_on_one_pair() -> SpreadProblem:
    """Shard 0 on groups 0 and 1, shard 1 on groups 1 and 0; both units of both shards lie on group 0."""
    return SpreadProblem(
        placement=Placement(hosts=((0, 1), (1, 0))),
        is_alive=np.array([True, True]),
        demand=np.array([2, 2]),
        free=np.array([2, 0, 0, 2]),
    )


def with_commons(problem: SpreadProblem, rng: np.random.Generator, *, is_even: bool) -> SpreadProblem:
    """Further groups that host nothing, shards that may have lost all hosts, and paces of the groups unless even."""
    n = problem.placement.num_groups
    is_alive = np.append(rng.random(n) < rng.uniform(0, 1), rng.random(rng.integers(0, 4)) < 0.7)
    is_alive[rng.integers(n)] = True
    free = np.where(is_alive[problem.placement.host_array].ravel(), problem.free, 0)
    return replace(
        problem,
        is_alive=is_alive,
        free=free,
        pace=3 if is_even else rng.integers(1, 5, is_alive.size),
        fetch=int(rng.choice([0, 1, 2, 3, 7, 20])),
    )


def test_an_overloaded_host_gives_away_just_its_surplus() -> None:
    spread = least_spread(two_shards_on_one_pair())
    assert (spread.makespan, spread.num_moves) == (2, 2)
    assert np.bincount([0, 1, 1, 0], weights=spread.flow).tolist() == [2, 2]


def test_what_fits_as_it_lies_is_left_alone() -> None:
    spread = cheapest_spread(two_shards_on_one_pair(), 4)
    assert isinstance(spread, Spread)
    assert spread.flow.tolist() == [2, 0, 0, 2]
    assert spread.num_moves == 0


def test_too_small_a_capacity_yields_shards_that_prove_it() -> None:
    result = cheapest_spread(two_shards_on_one_pair(), 1)
    assert isinstance(result, Bottleneck)
    assert (result.demand, result.is_host.tolist(), result.is_lender.tolist()) == (4, [True, True], [False, False])
    assert result.least_makespan(two_shards_on_one_pair()) == 2


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
    )
    spread = least_spread(problem)
    # 12 units on 3 groups: group 3 takes 3, hands on 2, of which group 2 hands on 1.
    assert (spread.makespan, spread.num_moves) == (4, 6)
    assert spread.flow.reshape(4, 2).tolist() == [[0, 3], [3, 0], [2, 1], [1, 2]]


def check_is_placed(problem: SpreadProblem, spread: Spread) -> None:
    """All demand is placed, on survivors that have the time for it."""
    hosts, m = problem.placement.host_array, problem.is_alive.size
    by_shard = spread.flow.reshape(hosts.shape)
    assert min(spread.flow.min(), spread.cold.min(), spread.lent.min()) >= 0
    assert (by_shard.sum(axis=1) + spread.cold).tolist() == problem.demand.tolist()
    assert spread.lent.sum() == spread.cold.sum()
    hosted = np.bincount(hosts.ravel(), spread.flow, m).astype(int)
    left = spread.makespan - (problem.fetch or 0)
    for group, (p, k) in enumerate(
        zip(*(np.broadcast_to(one, m) for one in (problem.pace, problem.lacking)), strict=True)
    ):
        most = units_within(spread.makespan, p, problem.rounds, k) if problem.is_alive[group] else 0
        assert hosted[group] + spread.lent[group] <= most
        assert not spread.lent[group] or spread.lent[group] <= units_within(left, p, problem.rounds, k)


def check_against_oracle(problem: SpreadProblem, slack: int) -> Spread:
    """The least spread, after comparing it, a longer one and a shorter one with the oracle."""
    spread = least_spread(problem)
    assert cost_of(problem, spread) == oracle_cost(problem, spread.makespan)
    assert makespan_bound(problem) <= spread.makespan
    check_is_placed(problem, spread)
    roomy = cheapest_spread(problem, spread.makespan + slack)
    assert isinstance(roomy, Spread)
    check_is_placed(problem, roomy)
    assert cost_of(problem, roomy) == oracle_cost(problem, roomy.makespan)
    if spread.makespan:
        assert oracle_cost(problem, spread.makespan - 1) is None
        tight = cheapest_spread(problem, spread.makespan - 1)
        assert isinstance(tight, Bottleneck)
        assert spread.makespan - 1 < tight.least_makespan(problem) <= spread.makespan
    return spread


@pytest.mark.parametrize("may_stay", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_makespan_and_cost_agree_with_a_general_solver(seed: int, may_stay: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, may_stay=may_stay)
    spread = check_against_oracle(problem, int(rng.integers(1, 4)))
    assert not spread.cold.any()
    paces = replace(problem, pace=rng.integers(1, 5, problem.is_alive.size))
    check_against_oracle(paces, int(rng.integers(1, 9)))
    check_against_oracle(with_rounds(paces, rng), int(rng.integers(1, 9)))


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_makespan_and_cost_with_a_commons_agree_with_a_general_solver(seed: int, is_even: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = with_commons(random_problem(rng, may_stay=seed % 3 > 0), rng, is_even=is_even)
    spread = check_against_oracle(problem, int(rng.integers(1, 9)))
    load = np.bincount(problem.placement.host_array.ravel(), spread.flow, problem.is_alive.size) + spread.lent
    pace = np.broadcast_to(problem.pace, load.shape)
    assert problem.fetch is not None
    ends = np.maximum(load * pace, np.where(spread.lent > 0, problem.fetch + spread.lent * pace, 0))
    assert ends.max(initial=0) == spread.makespan, "the last group ends when the spread says"
    check_against_oracle(with_rounds(problem, rng), int(rng.integers(1, 9)))


def test_cold_units_are_taken_only_for_a_shorter_makespan_and_by_any_survivor() -> None:
    # A ring of 4 with group 0 lost, group 5 come in, which hosts nothing; group 3 alone hosts shard 0.
    ring = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))
    nothing = np.zeros(8, dtype=np.int64)
    problem = SpreadProblem(
        placement=ring,
        is_alive=np.array([False, True, True, True, False, True]),
        demand=np.array([4, 0, 0, 0]),
        free=nothing,
        pace=10,
    )
    at_host, at_once, later, too_late = (least_spread(replace(problem, fetch=fetch)) for fetch in (None, 0, 12, 30))
    assert (at_host.makespan, at_host.flow[1], at_host.lent.sum()) == (40, 4, 0)
    assert (at_once.makespan, at_once.flow[1], at_once.lent.tolist()) == (10, 1, [0, 1, 1, 0, 0, 1])
    assert (later.makespan, later.flow[1], later.lent.sum()) == (22, 2, 2), "its host computes two meanwhile"
    assert (too_late.makespan, too_late.flow[1], too_late.lent.sum()) == (40, 4, 0)
