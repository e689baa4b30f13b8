"""Owners after losses, whole shards at a time."""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.reorder import least_load
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import Placement, WipeOut, make_placement
from spare_megatron.stacking.stack_reorder import StackOrder, StackReorder, initial_order, reorder_stacks

RING = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))
Alive = frozenset[GroupId]


def brute_force(placement: Placement, alive: Alive, order: StackOrder) -> tuple[int, int]:
    """Least depth, and the fewest shards brought within it, by trying every first part of every stack."""
    for depth in range(1, placement.redundancy + 1):
        options = [
            [
                (set(front), len(set(front) - set(order.stacks[group, :depth].tolist())))
                for front in combinations(placement.stack(group), depth)
            ]
            for group in sorted(alive)
        ]
        costs = [
            sum(cost for _, cost in choice)
            for choice in product(*options)
            if len(set().union(*(front for front, _ in choice))) == placement.num_groups
        ]
        if costs:
            return depth, min(costs)
    raise AssertionError("wipe-out")


def check_is_valid(placement: Placement, alive: Alive, before: StackOrder, result: StackReorder) -> None:
    assert np.array_equal(np.sort(result.order.stacks, axis=1), np.sort(before.stacks, axis=1))
    for shard, owner in enumerate(result.owners.tolist()):
        assert owner in alive
        assert shard in result.order.stacks[owner, : result.order.depth]
    assert np.bincount(result.owners).max() <= result.order.depth
    fronts = zip(before.stacks[:, : result.order.depth], result.order.stacks[:, : result.order.depth], strict=True)
    assert sum(len(set(new.tolist()) - set(old.tolist())) for old, new in fronts) == result.num_moves
    # Shards change places in pairs: no more positions differ than two per move.
    assert int((result.order.stacks != before.stacks).sum()) <= 2 * result.num_moves


def random_sequence(placement: Placement, rng: np.random.Generator) -> Iterator[tuple[Alive, StackOrder, StackReorder]]:
    order = initial_order(placement)
    alive = set(range(placement.num_groups))
    for group in rng.permutation(placement.num_groups).tolist():
        alive.discard(group)
        survivors = frozenset(map(GroupId, alive))
        if placement.uncovered(survivors):
            return
        result = reorder_stacks(placement, survivors, order)
        yield survivors, order, result
        order = result.order


def test_without_losses_everyone_computes_its_home_shard() -> None:
    result = reorder_stacks(RING, frozenset(map(GroupId, range(4))), initial_order(RING))
    assert result.owners.tolist() == [0, 1, 2, 3]
    assert (result.order.depth, result.num_moves, result.phase) == (1, 0, 1)


def test_the_first_loss_doubles_the_depth_and_moves_nothing_on_a_ring() -> None:
    survivors = frozenset(map(GroupId, (1, 2, 3)))
    result = reorder_stacks(RING, survivors, initial_order(RING))
    check_is_valid(RING, survivors, initial_order(RING), result)
    assert (result.order.depth, result.num_moves, result.phase) == (2, 0, 3)


def test_the_present_order_serves_a_second_loss_that_it_covers() -> None:
    first = reorder_stacks(RING, frozenset(map(GroupId, (1, 2, 3))), initial_order(RING))
    second = reorder_stacks(RING, frozenset(map(GroupId, (1, 3))), first.order)
    assert second.owners.tolist() == [3, 1, 1, 3]
    assert (second.order.depth, second.num_moves, second.phase) == (2, 0, 1)


def test_a_shard_beyond_the_depth_is_brought_in_by_changing_places() -> None:
    everywhere = Placement(hosts=((0, 2, 1), (1, 0, 2), (2, 1, 0)))
    order = initial_order(everywhere)
    assert order.stacks.tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    result = reorder_stacks(everywhere, frozenset(map(GroupId, (0, 1))), order)
    assert (result.order.depth, result.num_moves) == (2, 0)
    # With the order of group 1 turned round no group has shard 2 within its first two: one of them brings it in.
    turned = StackOrder(stacks=np.array([[0, 1, 2], [1, 0, 2], [2, 0, 1]], dtype=np.int32), depth=2)
    result = reorder_stacks(everywhere, frozenset(map(GroupId, (0, 1))), turned)
    assert (result.order.depth, result.num_moves, result.phase) == (2, 1, 3)
    check_is_valid(everywhere, frozenset(map(GroupId, (0, 1))), turned, result)


def test_the_depth_shrinks_again_when_groups_come_back() -> None:
    lost = reorder_stacks(RING, frozenset(map(GroupId, (1, 2, 3))), initial_order(RING))
    back = reorder_stacks(RING, frozenset(map(GroupId, range(4))), lost.order)
    assert (back.order.depth, back.num_moves) == (1, 0)


def test_a_shard_without_hosts_is_a_wipe_out_that_names_it() -> None:
    with pytest.raises(WipeOut) as caught:
        reorder_stacks(RING, frozenset({GroupId(2)}), initial_order(RING))
    assert caught.value.shards == (0, 1)


def test_an_order_of_other_stacks_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold the stacks"):
        reorder_stacks(RING, frozenset(map(GroupId, range(4))), initial_order(make_placement("golomb", 4, 3)))


@pytest.mark.parametrize("seed", range(80))
def test_depth_and_moves_are_the_least_of_all_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, redundancy = [(4, 3), (5, 3), (6, 2), (6, 3), (4, 4)][seed % 5]
    placement = make_placement("golomb", num_groups, redundancy)
    stacks = rng.permuted(placement.stack_array.astype(np.int32), axis=1)
    order = StackOrder(stacks=stacks, depth=int(rng.integers(1, redundancy + 1)))
    while placement.uncovered(alive := frozenset(map(GroupId, np.flatnonzero(rng.random(num_groups) < 0.7).tolist()))):
        pass
    result = reorder_stacks(placement, alive, order)
    check_is_valid(placement, alive, order, result)
    assert (result.order.depth, result.num_moves) == brute_force(placement, alive, order)


@pytest.mark.parametrize(("num_groups", "redundancy"), [(200, 8), (200, 9), (200, 10), (600, 9), (1000, 9)])
def test_sequences_of_losses_keep_to_the_least_depth_until_wipe_out(num_groups: int, redundancy: int) -> None:
    placement = make_placement("golomb", num_groups, redundancy)
    phases = []
    excess = 0
    for alive, before, result in random_sequence(placement, np.random.default_rng(num_groups + redundancy)):
        check_is_valid(placement, alive, before, result)
        excess += result.order.depth > least_load(num_groups, len(alive), 1)
        phases.append(result.phase)
    assert len(phases) > num_groups // 5
    assert excess <= len(phases) // 100
    assert phases[0] == 3
    assert phases.count(1) > len(phases) // 4
