"""Owners after losses, microbatch by microbatch."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from benchmarks.reorder import least_load
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.matching import SpreadProblem, cheapest_spread, least_spread, makespan_bound
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import Placement, WipeOut, make_placement
from spare_megatron.stacking.plans import Microbatch, Work
from spare_megatron.stacking.reorder import (
    Owners,
    Reorder,
    even_owners,
    patch_work,
    reorder_microbatches,
)

Alive = frozenset[GroupId]
RING = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))


def brute_force(placement: Placement, alive: Alive, owners: Owners) -> tuple[int, int]:
    """Least makespan and, at it, fewest moves, by trying all owners."""
    num_microbatches = owners.shape[1]
    choices = [[g for g in row if g in alive] for row in placement.hosts for _ in range(num_microbatches)]
    present = owners.ravel().tolist()
    return min(
        (max(trial.count(g) for g in alive), sum(a != b for a, b in zip(trial, present, strict=True)))
        for trial in product(*choices)
    )


def check_is_valid(placement: Placement, alive: Alive, before: Owners, result: Reorder) -> None:
    assert result.owners.shape == before.shape
    assert result.owners.dtype == np.int32
    assert not result.owners.flags.writeable
    for shard, row in enumerate(result.owners.tolist()):
        assert set(row) <= set(placement.hosts[shard]) & alive
    loads = np.bincount(result.owners.ravel(), minlength=placement.num_groups)
    assert loads.max() == result.makespan
    assert int((result.owners != before).sum()) == result.num_moves


def random_sequence(
    placement: Placement, num_microbatches: int, rng: np.random.Generator
) -> Iterator[tuple[Alive, Owners, Reorder]]:
    """Reorders after one loss each, in random order, until wipe-out: (alive, owners before, result)."""
    owners = home_owners(placement, num_microbatches)
    alive = set(range(placement.num_groups))
    for group in rng.permutation(placement.num_groups).tolist():
        alive.discard(group)
        if placement.uncovered(frozenset(alive)):
            return
        result = reorder_microbatches(placement, frozenset(alive), owners)
        yield frozenset(alive), owners, result
        owners = result.owners


def home_owners(placement: Placement, num_microbatches: int) -> Owners:
    return np.repeat(placement.host_array[:, :1], num_microbatches, axis=1).astype(np.int32)


def test_at_first_every_group_has_equal_parts_of_all_its_shards() -> None:
    assert even_owners(RING, 3).tolist() == [[0, 3, 0], [1, 0, 1], [2, 1, 2], [3, 2, 3]]
    with pytest.raises(ValueError, match="0 microbatches"):
        even_owners(RING, 0)
    for num_groups, redundancy, num_microbatches in ((13, 4, 16), (31, 6, 7), (9, 1, 4), (40, 5, 2)):
        placement = make_placement("golomb", num_groups, redundancy)
        owners = even_owners(placement, num_microbatches)
        assert (Work(owners).loads == num_microbatches).all()
        of_group = Work(owners).of(GroupId(0))
        assert len({item.shard for item in of_group}) == min(redundancy, num_microbatches)
        assert all(0 in placement.hosts[item.shard] for item in of_group)


@pytest.mark.parametrize("seed", range(20))
def test_what_groups_that_are_away_had_goes_to_the_other_hosts_in_equal_parts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement, num_microbatches = make_placement("golomb", 31, 6), int(rng.integers(1, 40))
    alive = frozenset(np.flatnonzero(rng.random(31) < 0.6).tolist())
    first, owners = even_owners(placement, num_microbatches), even_owners(placement, num_microbatches, alive)
    for hosts, before, after in zip(placement.hosts, first, owners, strict=True):
        if not alive.intersection(hosts):
            assert np.array_equal(after, before)
            continue
        is_orphan = ~np.isin(before, list(alive))
        assert np.array_equal(after[~is_orphan], before[~is_orphan])
        taken = [int((after[is_orphan] == host).sum()) for host in hosts if host in alive]
        assert sum(taken) == is_orphan.sum()
        assert max(taken) - min(taken) <= 1


def test_the_patch_of_a_lost_group_goes_to_the_hosts_of_all_its_shards() -> None:
    """A twelfth of its work for each, where three hosts of one shard would take a third."""
    for num_microbatches, longest in ((16, 2), (64, 6), (4, 1), (1, 1)):
        order = initial_order(make_placement("golomb", 40, 4), num_microbatches, "microbatch")
        alive = frozenset(map(GroupId, range(1, 40)))
        assert order.patch(alive, order.work.of(GroupId(0))).makespan == longest


def test_owners_do_not_depend_on_what_happened_before() -> None:
    placement, rng = make_placement("golomb", 40, 4), np.random.default_rng(3)
    order = first = initial_order(placement, 16, "microbatch")
    for _ in range(20):
        alive = frozenset(np.flatnonzero(rng.random(40) < 0.9).tolist())
        if not placement.uncovered(alive):
            order = order.for_groups(alive)
            assert order.work.digest == first.for_groups(alive).work.digest
    assert order.for_groups(frozenset(range(40))).work.digest == first.work.digest


def test_nothing_moves_when_nothing_is_lost() -> None:
    result = reorder_microbatches(RING, frozenset(range(4)), home_owners(RING, 3))
    assert (result.makespan, result.num_moves, result.path) == (3, 0, "unchanged")


def test_losing_a_group_of_a_ring_passes_a_share_all_the_way_round() -> None:
    # Group 0 is lost; only group 3 hosts its shard. Each of the three survivors ends with 4 of 12 microbatches.
    result = reorder_microbatches(RING, frozenset({1, 2, 3}), home_owners(RING, 3))
    assert result.owners.tolist() == [[3, 3, 3], [1, 1, 1], [2, 2, 1], [3, 2, 2]]
    assert (result.makespan, result.num_moves, result.path) == (4, 6, "chains")


def test_only_orphans_move_where_their_hosts_have_room() -> None:
    everywhere = make_placement("golomb", 3, 3)
    result = reorder_microbatches(everywhere, frozenset({0, 2}), home_owners(everywhere, 2))
    assert result.owners.tolist() == [[0, 0], [0, 2], [2, 2]]
    assert (result.makespan, result.num_moves, result.path) == (3, 2, "orphans")


def test_a_group_that_came_back_relieves_the_others_with_the_fewest_moves() -> None:
    lost = reorder_microbatches(RING, frozenset({1, 2, 3}), home_owners(RING, 3))
    back = reorder_microbatches(RING, frozenset(range(4)), lost.owners)
    assert back.makespan == 3
    assert (back.makespan, back.num_moves) == brute_force(RING, frozenset(range(4)), lost.owners)


def test_a_shard_without_hosts_is_a_wipe_out_that_names_it() -> None:
    with pytest.raises(WipeOut) as caught:
        reorder_microbatches(RING, frozenset({2}), home_owners(RING, 2))
    assert caught.value.shards == (0, 1)


def test_owners_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 4 shards"):
        reorder_microbatches(RING, frozenset(range(4)), np.zeros((3, 2), dtype=np.int32))


@pytest.mark.parametrize("seed", range(120))
def test_makespan_and_moves_are_the_least_of_all_owners(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, redundancy, num_microbatches = [(3, 2, 3), (4, 3, 2), (5, 2, 2), (4, 2, 3), (3, 3, 2)][seed % 5]
    placement = make_placement("golomb", num_groups, redundancy)
    # Any owners at all: of lost groups, of groups that do not even host the shard, unbalanced.
    owners = rng.integers(0, num_groups, (num_groups, num_microbatches)).astype(np.int32)
    while placement.uncovered(alive := frozenset(np.flatnonzero(rng.random(num_groups) < 0.7).tolist())):
        pass
    result = reorder_microbatches(placement, alive, owners)
    check_is_valid(placement, alive, owners, result)
    assert (result.makespan, result.num_moves) == brute_force(placement, alive, owners)


@pytest.mark.parametrize("seed", range(10))
def test_sequences_of_losses_stay_optimal_until_wipe_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, redundancy = [(40, 4), (60, 5), (90, 6), (31, 6), (57, 8)][seed % 5]
    placement = make_placement("golomb", num_groups, redundancy)
    num_microbatches = int(rng.choice([1, 4, 16]))
    num_steps = 0
    for alive, before, result in random_sequence(placement, num_microbatches, rng):
        num_steps += 1
        check_is_valid(placement, alive, before, result)
        owned = [(before == placement.host_array[:, [j]]).sum(axis=1) for j in range(redundancy)]
        kept = np.where(placement.alive_mask(alive)[placement.host_array], np.stack(owned, axis=1), 0).ravel()
        problem = SpreadProblem(
            placement=placement,
            is_alive=placement.alive_mask(alive),
            demand=np.full(num_groups, num_microbatches),
            free=kept,
        )
        proof = least_spread(problem)
        assert (proof.makespan, proof.num_moves) == (result.makespan, result.num_moves)
        if result.makespan > makespan_bound(problem):
            assert not hasattr(cheapest_spread(problem, result.makespan - 1), "flow")
    assert num_steps > num_groups // 4


def test_several_losses_at_once_give_the_same_makespan_as_one_after_another() -> None:
    placement = make_placement("golomb", 50, 6)
    *_, (alive, _, last) = list(random_sequence(placement, 8, np.random.default_rng(5)))[:15]
    at_once = reorder_microbatches(placement, alive, home_owners(placement, 8))
    assert at_once.makespan == last.makespan
    assert at_once.num_moves <= (last.owners != home_owners(placement, 8)).sum()


def test_a_host_keeps_its_lowest_microbatches_and_lower_ids_get_lower_ones() -> None:
    result = reorder_microbatches(RING, frozenset({1, 2, 3}), home_owners(RING, 6))
    assert result.owners[2].tolist() == [2] * 4 + [1] * 2
    everywhere = make_placement("golomb", 3, 3)
    taken = reorder_microbatches(everywhere, frozenset({1, 2}), home_owners(everywhere, 4))
    assert taken.owners[0].tolist() == [1, 1, 2, 2]


def test_the_order_in_which_groups_were_named_changes_nothing() -> None:
    placement = make_placement("golomb", 200, 9)
    ids = [g for g in range(200) if g % 7]
    first = reorder_microbatches(placement, frozenset(ids), home_owners(placement, 16))
    second = reorder_microbatches(placement, frozenset(reversed(ids)), home_owners(placement, 16))
    assert np.array_equal(first.owners, second.owners)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [200, 600, 1000])
def test_random_states_before_wipe_out_reach_the_least_load(num_groups: int) -> None:
    # What exceeds it are the last states before wipe-out, where one group is the last host of two shards.
    num_states = num_least = num_explained = 0
    for redundancy in (8, 9, 10):
        placement = make_placement("golomb", num_groups, redundancy)
        for alive, _, result in random_sequence(placement, 16, np.random.default_rng(redundancy)):
            survivors = placement.alive_mask(alive)[placement.host_array]
            sole_host = placement.host_array[survivors & (survivors.sum(axis=1) == 1)[:, None]]
            least = least_load(num_groups, len(alive), 16)
            num_states += 1
            num_least += result.makespan == least
            num_explained += result.makespan == max(least, 16 * int(np.bincount(sole_host, minlength=1).max()))
    assert num_states > num_groups
    assert num_least / num_states > 0.97
    assert num_explained / num_states > 0.999


def test_consecutive_hosts_miss_the_least_load_far_more_often() -> None:
    shares = {}
    for kind in ("golomb", "consecutive"):
        placement = make_placement(kind, 200, 8)
        reached = [
            result.makespan == least_load(200, len(alive), 16)
            for seed in range(3)
            for alive, _, result in random_sequence(placement, 16, np.random.default_rng(seed))
        ]
        shares[kind] = np.mean(reached)
    assert shares["golomb"] > 0.98
    assert shares["consecutive"] < 0.5


# --------------------------------------------------------------------------------------------------------- patch


def test_a_patch_spreads_the_orphans_of_a_shard_evenly_and_lowest_ids_get_lowest_indices() -> None:
    everywhere = make_placement("golomb", 3, 3)
    orphans = [Microbatch(0, index) for index in (3, 1, 2, 0)]
    assert patch_work(everywhere, frozenset({1, 2}), orphans) == {
        1: (Microbatch(0, 0), Microbatch(0, 1)),
        2: (Microbatch(0, 2), Microbatch(0, 3)),
    }


def test_a_patch_without_orphans_is_empty() -> None:
    assert patch_work(RING, frozenset({1, 2, 3}), []) == {}


def test_a_patch_of_shards_that_kept_a_host_ignores_shards_that_are_gone() -> None:
    assert patch_work(RING, frozenset({3}), [Microbatch(0, 1)]) == {3: (Microbatch(0, 1),)}
    with pytest.raises(WipeOut) as caught:
        patch_work(RING, frozenset({3}), [Microbatch(2, 0), Microbatch(1, 0), Microbatch(0, 0)])
    assert caught.value.shards == (1, 2)


def test_a_microbatch_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        patch_work(RING, frozenset({1, 2, 3}), [Microbatch(0, 0), Microbatch(0, 0)])


@pytest.mark.parametrize("seed", range(60))
def test_a_patch_has_the_least_makespan_of_all_spreads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = make_placement("golomb", 7, 3)
    while placement.uncovered(alive := frozenset(np.flatnonzero(rng.random(7) < 0.7).tolist())):
        pass
    everything = [Microbatch(shard, index) for shard in range(7) for index in range(2)]
    orphans = [everything[i] for i in rng.choice(14, size=int(rng.integers(1, 8)), replace=False)]
    work = patch_work(placement, alive, orphans)
    assert list(work) == sorted(work)
    assert sorted(item for items in work.values() for item in items) == sorted(orphans)
    for group, items in work.items():
        assert group in alive
        assert all(group in placement.hosts[item.shard] for item in items)
        assert list(items) == sorted(items)
        assert items
    choices = [[g for g in placement.hosts[item.shard] if g in alive] for item in orphans]
    best = min(max(trial.count(g) for g in trial) for trial in product(*choices))
    assert max(map(len, work.values())) == best
    assert work == patch_work(placement, alive, orphans[::-1])
