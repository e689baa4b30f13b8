"""Reorders whole shards: the least depth, then the fewest changes of stack order (SPARe, arXiv 2603.00357).

The depth is the least S at which every shard has an owner among the surviving groups that hold it within the first S of
their stack; a step takes S x m microbatches. Where groups differ in pace, each has a depth of its own: the shards that
it completes within the least time in which all shards are.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.matching import Spread, SpreadProblem, cheapest_spread, least_spread
from spare_megatron.stacking.paces import EVEN, Paces
from spare_megatron.stacking.placement import BoolArray, IntArray, Placement, read_only

StackArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackOrder:
    """Each group computes some of the first `depth` shards of its row of `stacks`, shape (num_groups, redundancy); with
    paces, `depth` is the largest of any group.
    """

    stacks: StackArray
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackReorder:
    """Stack order and owners after a reorder."""

    owners: StackArray
    """Read-only; for each shard, the surviving group whose gradient counts, within the first `depth` of its stack."""
    order: StackOrder
    num_moves: int
    """Shards swapped into the first `depth` of a stack for one that its group does not own."""
    phase: Literal[1, 3]
    """1 if the present order was valid at its depth; 3 if the depth came from a matching (phase 2)."""


def initial_order(placement: Placement) -> StackOrder:
    """Every stack in the order of the offsets at depth 1: each group computes its home shard."""
    return StackOrder(stacks=read_only(placement.stack_array.astype(np.int32)), depth=1)


def reorder_stacks(
    placement: Placement, alive: frozenset[GroupId], order: StackOrder, *, paces: Paces = EVEN
) -> StackReorder:
    """The least depth for the surviving groups and, at that depth, the fewest changes of the present order.

    A move swaps a shard from beyond the first S of a group's stack with one within it. The order may come from any
    earlier state. The unit of `paces` is a shard. Raises WipeOut.

    Phase 1 keeps the order at depth S if every shard is covered and no lesser depth is possible; coverage replaces the
    paper's Hopcroft-Karp matching, as no choice of owners overloads a group. Phase 2: the least depth, or time where
    paces differ, of any owners (`stacking.matching.least_spread`). Phase 3: `cheapest_spread` within it, where hosts
    are free for the shards within their first S. Ties: hosts that have shards earliest, in phase 1 then the lowest id;
    shards move by id to the earliest positions not owned.
    """
    placement.require_hosts(alive)
    is_alive = placement.alive_mask(alive)
    position = _positions(placement, order)
    nothing, ones = np.zeros(placement.host_array.size, dtype=np.int64), np.ones(placement.num_groups, dtype=np.int64)
    problem = SpreadProblem(placement=placement, is_alive=is_alive, demand=ones, free=nothing)
    unlike = paces.among(is_alive)
    if unlike is not None:
        problem = replace(problem, pace=unlike[0], rounds=paces.rounds, lacking=unlike[1])
    makespan = least_spread(problem).makespan
    is_covered = (is_alive[placement.host_array] & (position < order.depth)).any(axis=1).all()
    if unlike is None and is_covered and makespan == order.depth:
        owners = _earliest_host(placement, is_alive, position)
        return StackReorder(owners=owners, order=order, num_moves=0, phase=1)
    return _fewest_moves(problem, order, position, makespan)


def _fewest_moves(problem: SpreadProblem, order: StackOrder, position: IntArray, makespan: int) -> StackReorder:
    """Phase 3 within a time that is known to be feasible."""
    placement = problem.placement
    depths, _ = problem.capacities(makespan)
    free = (position < depths[placement.host_array]).astype(np.int64)
    spread = cheapest_spread(replace(problem, free=free.ravel(), rank=position.ravel()), makespan)
    assert isinstance(spread, Spread), spread
    is_owner = spread.flow.reshape(free.shape) > 0
    return StackReorder(
        owners=read_only(placement.host_array[is_owner].astype(np.int32)),
        order=StackOrder(stacks=_bring_in(placement, order, is_owner, position, depths), depth=int(depths.max())),
        num_moves=spread.num_moves,
        phase=3,
    )


def _positions(placement: Placement, order: StackOrder) -> IntArray:
    """For each shard and each of its hosts, the position of the shard in the host's stack order."""
    by_shard = np.argsort(order.stacks, axis=1)
    home = placement.stack_array
    home_by_shard = np.argsort(home, axis=1)
    if order.stacks.shape != home.shape or not np.array_equal(np.sort(order.stacks, axis=1), np.sort(home, axis=1)):
        raise ValueError("the stack order does not hold the stacks of this placement")
    position = np.empty(placement.host_array.size, dtype=np.int64)
    position[np.take_along_axis(placement.pair_array, home_by_shard, axis=1)] = by_shard
    return position.reshape(placement.host_array.shape)


def _earliest_host(placement: Placement, is_alive: BoolArray, position: IntArray) -> StackArray:
    """For each shard, the surviving host that has it earliest; lowest id on ties."""
    n = placement.num_groups
    key = np.where(is_alive[placement.host_array], position * n + placement.host_array, np.iinfo(np.int64).max)
    return read_only((key.min(axis=1) % n).astype(np.int32))


def _bring_in(
    placement: Placement, order: StackOrder, is_owner: BoolArray, position: IntArray, depths: IntArray
) -> StackArray:
    """The order after every owned shard beyond its owner's depth has swapped places with one that is not owned."""
    stacks = order.stacks.copy()
    shards, columns = np.nonzero(is_owner & (position >= depths[placement.host_array]))
    owned = np.zeros(stacks.shape, dtype=np.bool_)
    owned[placement.host_array[is_owner], position[is_owner]] = True
    for shard, column in zip(shards.tolist(), columns.tolist(), strict=True):
        group, old = placement.host_array[shard, column], position[shard, column]
        new = int(owned[group, : depths[group]].argmin())
        stacks[group, [old, new]] = stacks[group, [new, old]]
        owned[group, new] = True
    return read_only(stacks)
