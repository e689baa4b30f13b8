"""Where all groups can read all data: cold microbatches, computed by groups that do not host their shards."""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import Placement, WipeOut, make_placement
from spare_megatron.stacking.plans import NO_OWNER, Microbatch, Owners
from spare_megatron.stacking.reorder import initial_owners, least_load, patch_work, reorder_microbatches

RING = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))


def groups(*ids: int) -> frozenset[GroupId]:
    return frozenset(map(GroupId, ids))


def ends_at(placement: Placement, items: Sequence[Microbatch], owners: Sequence[int], fetch: int) -> tuple[int, int]:
    """When the last group has computed its microbatches, in thousandths of a microbatch, and the cold ones of all."""
    cold = [g for item, g in zip(items, owners, strict=True) if g not in placement.hosts[item.shard]]
    counts, num_cold = Counter(owners), Counter(cold)
    late = [fetch + 1000 * num_cold[g] for g in num_cold]
    return max([1000 * count for count in counts.values()] + late), len(cold)


def brute_force(
    placement: Placement, alive: frozenset[GroupId], before: dict[Microbatch, int], fetch: int
) -> tuple[int, int, int]:
    """Least end, then least cold work, then fewest moves, by trying all owners."""
    items = list(before)
    found = []
    for trial in product(sorted(alive), repeat=len(items)):
        stays = sum(g == before[i] and g in placement.hosts[i.shard] for i, g in zip(items, trial, strict=True))
        found.append((*ends_at(placement, items, trial, fetch), len(items) - stays))
    return min(found)


def items_of(owners: Owners) -> dict[Microbatch, int]:
    return {Microbatch(s, k): int(owners[s, k]) for s, k in np.argwhere(owners != NO_OWNER).tolist()}


def random_survivors(rng: np.random.Generator, num_groups: int) -> frozenset[GroupId]:
    """At least one, of whom up to two host nothing; shards without hosts are likely."""
    chosen = rng.choice(num_groups + 2, rng.integers(1, num_groups + 1), replace=False)
    return groups(*chosen.tolist())


@pytest.mark.parametrize("fetch", [0, 300, 1000, 2500])
@pytest.mark.parametrize("seed", range(12))
def test_end_cold_work_and_moves_are_the_least_of_all_owners(seed: int, fetch: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, redundancy, num_microbatches = [(3, 2, 2), (4, 1, 1), (5, 2, 1), (4, 2, 1), (3, 1, 2)][seed % 5]
    placement = make_placement("golomb", num_groups, redundancy)
    alive = random_survivors(rng, num_groups)
    before = rng.integers(0, num_groups + 2, (num_groups, num_microbatches)).astype(np.int32)
    result = reorder_microbatches(placement, alive, before, fetch=fetch)
    after = items_of(result.owners)
    assert set(after.values()) <= alive
    end, num_cold = ends_at(placement, list(after), list(after.values()), fetch)
    assert (end, num_cold, result.num_moves) == brute_force(placement, alive, items_of(before), fetch)
    assert result.makespan == max(Counter(after.values()).values())


@pytest.mark.parametrize("fetch", [0, 300, 1000, 2500])
@pytest.mark.parametrize("seed", range(12))
def test_a_patch_ends_as_early_as_any_with_the_least_cold_work(seed: int, fetch: int) -> None:
    rng = np.random.default_rng(seed)
    placement = make_placement("golomb", 4, 2)
    alive = random_survivors(rng, 4)
    everything = [Microbatch(shard, index) for shard in range(4) for index in range(3)]
    orphans = [everything[i] for i in rng.choice(12, size=int(rng.integers(1, 6)), replace=False)]
    work = patch_work(placement, alive, orphans, fetch=fetch)
    dealt = {item: int(group) for group, items in work.items() for item in items}
    assert sorted(dealt) == sorted(orphans)
    assert sum(map(len, work.values())) == len(orphans)
    least = brute_force(placement, alive, dict.fromkeys(orphans, NO_OWNER), fetch)
    assert ends_at(placement, list(dealt), list(dealt.values()), fetch) == least[:2]
    assert work == patch_work(placement, alive, orphans[::-1], fetch=fetch)


def test_a_patch_goes_to_all_groups_unless_the_data_arrive_too_late() -> None:
    placement, survivors = make_placement("golomb", 40, 4), groups(*range(1, 40))
    orphans = [Microbatch(0, index) for index in range(16)]
    at_hosts = patch_work(placement, survivors, orphans)
    assert max(map(len, at_hosts.values())) == 6  # three hosts are left
    everywhere = patch_work(placement, survivors, orphans, fetch=300)
    assert {len(items) for items in everywhere.values()} == {1}
    assert set(placement.hosts[0]) - {0} <= set(everywhere), "hosts take what they can"
    assert patch_work(placement, survivors, orphans, fetch=6000) == at_hosts


def test_a_shard_without_a_host_is_planned_and_patched_by_any_survivors() -> None:
    order = initial_order(make_placement("golomb", 4, 1), 4, "microbatch", fetch=0)
    alive = groups(0, 2, 3)
    patch = order.patch(alive, order.work.of(GroupId(1)))
    assert (patch.makespan, patch.num_microbatches) == (2, 4)
    work = order.for_groups(alive).work
    assert (work.makespan, work.num_microbatches) == (6, 16)
    assert (work.owners[[0, 2, 3]] == np.array([[0], [2], [3]])).all()


def test_cold_microbatches_go_in_ascending_order_to_groups_in_ascending_order() -> None:
    alone = make_placement("golomb", 3, 1)
    work = patch_work(alone, groups(1, 2), [Microbatch(0, index) for index in (3, 1, 2, 0)], fetch=0)
    assert work == {1: (Microbatch(0, 0), Microbatch(0, 1)), 2: (Microbatch(0, 2), Microbatch(0, 3))}
    # Two shards without a host, three microbatches each, and one group that hosts shard 2 and nothing else.
    owners = reorder_microbatches(alone, groups(2), initial_owners(alone, 3), fetch=0).owners
    assert owners.tolist() == [[2] * 3] * 3


def test_groups_that_host_nothing_relieve_the_others() -> None:
    order = initial_order(make_placement("golomb", 4, 2), 6, "microbatch", fetch=0)
    grown = order.for_groups(groups(*range(6)))
    assert grown.work.loads.tolist() == [4] * 6
    assert grown.patch(groups(0, 1, 2, 3, 4), grown.work.of(GroupId(5))).makespan == 1
    assert grown.for_groups(groups(*range(4))).work.loads.tolist() == [6] * 4
    only_grown = order.for_groups(groups(4, 5))
    assert only_grown.work.loads.tolist() == [0, 0, 0, 0, 12, 12]
    with pytest.raises(WipeOut):
        initial_order(make_placement("golomb", 4, 2), 6, "microbatch").for_groups(groups(4, 5))


def test_hosts_get_their_shards_back_when_they_return() -> None:
    order = initial_order(make_placement("golomb", 5, 2), 4, "microbatch", fetch=0)
    alone = order.for_groups(groups(3))
    assert set(alone.work.owners.ravel().tolist()) == {3}
    back = alone.for_groups(groups(0, 1, 2, 3, 4)).work
    assert (back.loads == 4).all()
    assert ends_at(make_placement("golomb", 5, 2), *zip(*items_of(back.owners).items(), strict=True), 0)[1] == 0


@pytest.mark.parametrize("seed", range(20))
def test_after_any_losses_the_makespan_is_the_least_load_and_work_is_cold_only_for_that(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = make_placement("golomb", 13, 2)
    order = initial_order(placement, 3, "microbatch", fetch=0)
    for num_alive in range(12, 0, -1):
        alive = groups(*rng.choice(13, num_alive, replace=False).tolist())
        hosted = None if placement.uncovered(alive) else reorder_microbatches(placement, alive, order.work.owners)
        order = order.for_groups(alive)
        assert set(order.work.owners.ravel().tolist()) <= alive
        assert order.work.makespan == least_load(13, num_alive, 3)
        if hosted and hosted.makespan == order.work.makespan:
            assert np.array_equal(hosted.owners, order.work.owners)


def test_without_shared_data_and_without_any_survivor_it_is_a_wipe_out() -> None:
    placement = make_placement("golomb", 4, 1)
    with pytest.raises(WipeOut):
        initial_order(placement, 4, "microbatch").for_groups(groups(0, 1))
    shared = initial_order(placement, 4, "microbatch", fetch=0)
    with pytest.raises(WipeOut):
        shared.for_groups(frozenset())
    with pytest.raises(WipeOut):
        shared.patch(frozenset(), [Microbatch(0, 0)])


def test_whole_shards_are_never_cold() -> None:
    with pytest.raises(ValueError, match="set the granularity to microbatch"):
        initial_order(make_placement("golomb", 4, 1), 4, "stack", fetch=0)


def test_a_thousand_groups_are_dealt_cold_work_in_little_time() -> None:
    placement, rng = make_placement("golomb", 1000, 4), np.random.default_rng(0)
    order, alive = initial_order(placement, 64, "microbatch", fetch=300), set(range(1000))
    order.for_groups(groups(*range(1, 1000)))  # warms up
    times_s = []
    for group in rng.permutation(1000)[:40].tolist():
        orphans = order.work.of(GroupId(group))
        alive.discard(group)
        began_s = time.thread_time()
        patch = order.patch(frozenset(alive), orphans)
        order = order.for_groups(frozenset(alive))
        times_s.append(time.thread_time() - began_s)
        assert patch.makespan == 1
    assert np.median(times_s) < 0.1, "processor time, on a machine that others use"
