"""Hosts of last resort: where all groups can read the data, a shard without a host goes to any survivors."""

from collections import Counter

import numpy as np
import pytest

from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import NO_OWNER, Microbatch
from spare_megatron.stacking.reorder import assign_to_least_loaded, least_load
from spare_megatron.stacking.wipe_out import WipeOut


def groups(*ids: int) -> frozenset[GroupId]:
    return frozenset(map(GroupId, ids))


def test_lent_microbatches_level_the_loads_and_ties_go_to_the_lowest_group() -> None:
    owners = np.array([[0, 0], [1, 1], [2, 2]], dtype=np.int32)
    changed = assign_to_least_loaded(owners, [Microbatch(ShardId(1), k) for k in (1, 0)], groups(0, 2))
    assert changed.tolist() == [[0, 0], [0, 2], [2, 2]]
    assert owners[1].tolist() == [1, 1]
    nothing = np.full((3, 2), NO_OWNER, dtype=np.int32)
    assert assign_to_least_loaded(nothing, [Microbatch(ShardId(2), 1)], groups(1, 2)).tolist() == [
        [-1, -1],
        [-1, -1],
        [-1, 1],
    ]


def test_a_shard_without_a_host_is_planned_and_patched_by_any_survivors() -> None:
    order = initial_order(make_placement("golomb", 4, 1), 4, "microbatch", last_resort=True)
    alive = groups(0, 2, 3)
    patch = order.patch(alive, order.work.of(GroupId(1)))
    assert patch.loads.tolist() == [2, 0, 1, 1]
    work = order.for_groups(alive).work
    assert Counter(work.owners.ravel().tolist()) == {0: 6, 2: 5, 3: 5}
    assert (work.owners[[0, 2, 3]] == np.array([[0], [2], [3]])).all()


def test_hosts_get_their_shards_back_when_they_return() -> None:
    order = initial_order(make_placement("golomb", 5, 2), 4, "microbatch", last_resort=True)
    alone = order.for_groups(groups(3))
    assert set(alone.work.owners.ravel().tolist()) == {3}
    assert (alone.for_groups(groups(0, 1, 2, 3, 4)).work.loads == 4).all()


@pytest.mark.parametrize("seed", range(20))
def test_after_any_losses_the_makespan_is_the_least_possible_or_that_of_the_shards_with_hosts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = make_placement("golomb", 13, 2)
    order = initial_order(placement, 3, "microbatch", last_resort=True)
    for num_alive in range(12, 0, -1):
        alive = groups(*rng.choice(13, num_alive, replace=False).tolist())
        lost = placement.uncovered(alive)
        order = order.for_groups(alive)
        owners = order.work.owners
        assert set(owners.ravel().tolist()) <= alive
        hosted = [shard for shard in range(13) if shard not in lost]
        assert all(owner in placement.hosts[shard] for shard in hosted for owner in owners[shard].tolist())
        covered = int(np.bincount(owners[hosted].ravel(), minlength=13).max()) if hosted else 0
        assert order.work.makespan == max(least_load(13, num_alive, 3), covered)


def test_without_a_last_resort_and_without_any_survivor_it_is_a_wipe_out() -> None:
    placement = make_placement("golomb", 4, 1)
    with pytest.raises(WipeOut):
        initial_order(placement, 4, "microbatch").for_groups(groups(0, 1))
    with pytest.raises(WipeOut):
        initial_order(placement, 4, "microbatch", last_resort=True).for_groups(frozenset())


def test_whole_shards_have_no_last_resort() -> None:
    with pytest.raises(ValueError, match="set the granularity to microbatch"):
        initial_order(make_placement("golomb", 4, 1), 4, "stack", last_resort=True)
