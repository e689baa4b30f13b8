"""Placement and the offsets behind it."""

import pickle
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from spare_megatron.stacking.golomb import _SHORTEST_RULERS, difference_counts, golomb_offsets
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import Placement, PlacementKind, WipeOut, make_placement


def brute_shared_hosts(placement: Placement) -> int:
    return max((len(set(a) & set(b)) for a, b in combinations(placement.hosts, 2)), default=0)


def test_a_hand_drawn_ring_knows_its_stacks() -> None:
    ring = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))
    assert [ring.stack(group) for group in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert (ring.num_groups, ring.redundancy, ring.max_shared_hosts) == (4, 2, 1)


def test_a_shard_is_hosted_by_the_groups_that_lie_the_offsets_before_it() -> None:
    placement = make_placement("golomb", 13, 4)
    offsets = golomb_offsets(13, 4)
    for shard in range(13):
        assert placement.hosts[shard] == tuple((shard - o) % 13 for o in offsets)
    for group in range(13):
        assert placement.stack(group) == tuple((group + o) % 13 for o in offsets)
    assert (placement.stack_array == [placement.stack(group) for group in range(13)]).all()


def test_pairs_point_at_the_places_where_a_group_stands() -> None:
    placement = make_placement("golomb", 31, 5)
    at = placement.host_array.ravel()[placement.pair_array]
    assert (at == np.arange(31)[:, None]).all()
    assert not placement.host_array.flags.writeable
    assert not placement.pair_array.flags.writeable


@pytest.mark.parametrize(
    ("kind", "num_groups", "redundancy"), [("golomb", 40, 5), ("golomb", 9, 5), ("consecutive", 9, 4)]
)
def test_shared_hosts_are_counted_as_by_comparing_all_pairs(
    kind: PlacementKind, num_groups: int, redundancy: int
) -> None:
    placement = make_placement(kind, num_groups, redundancy)
    assert placement.max_shared_hosts == brute_shared_hosts(placement)


def test_shared_hosts_of_an_irregular_placement_are_counted_too() -> None:
    placement = Placement(hosts=((0, 1, 2), (1, 0, 2), (2, 3, 4), (3, 4, 0), (4, 3, 1)))
    assert placement.max_shared_hosts == brute_shared_hosts(placement) == 3


def test_one_host_per_shard_shares_nothing() -> None:
    assert make_placement("golomb", 5, 1).max_shared_hosts == 0


def test_every_shard_on_every_group_shares_all() -> None:
    assert make_placement("golomb", 6, 6).max_shared_hosts == 6
    assert make_placement("golomb", 1, 1).hosts == ((0,),)


def test_redundancy_beyond_the_groups_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match=r"spare\.redundancy=5 exceeds the 4 data-parallel groups"):
        make_placement("golomb", 4, 5)
    with pytest.raises(ValueError, match=r"spare\.redundancy=0 is below 1"):
        make_placement("consecutive", 4, 0)
    with pytest.raises(ValueError, match=r"spare\.redundancy=5 exceeds"):
        golomb_offsets(4, 5)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'ring' is unknown"):
        make_placement("ring", 4, 2)


@pytest.mark.parametrize(
    "hosts",
    [
        ((0, 1), (1,)),
        ((), ()),
        ((0, 1), (0, 1)),
        ((0, 0), (1, 1)),
        ((0, 1), (1, 2), (2, 1)),
        ((0, 5), (1, 0)),
    ],
)
def test_hosts_that_are_no_placement_are_refused(hosts: tuple[tuple[GroupId, ...], ...]) -> None:
    with pytest.raises(ValueError, match="shard"):
        Placement(hosts=hosts)


def test_placements_are_equal_by_their_hosts_and_survive_pickling() -> None:
    placement = make_placement("golomb", 21, 4)
    copy = pickle.loads(pickle.dumps(placement))
    assert copy == placement
    assert hash(copy) == hash(placement)
    assert (copy.pair_array == placement.pair_array).all()
    assert make_placement("consecutive", 21, 4) != placement


def test_uncovered_shards_are_those_that_lost_all_hosts() -> None:
    ring = Placement(hosts=((0, 3), (1, 0), (2, 1), (3, 2)))
    assert ring.uncovered(frozenset({0, 2})) == ()
    assert ring.uncovered(frozenset({0, 1})) == (3,)
    assert ring.uncovered(frozenset()) == (0, 1, 2, 3)
    assert ring.uncovered(frozenset({0, 2, 6})) == ()
    assert ring.uncovered(frozenset({0, 1, 4})) == (3,), "a group beyond those of the placement hosts nothing"
    with pytest.raises(ValueError, match="begin with 0, got -1"):
        ring.uncovered(frozenset({-1}))


def test_a_wipe_out_names_its_shards_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(WipeOut((2, 5))))
    assert error.shards == (2, 5)
    assert "2, 5" in str(error)


# ------------------------------------------------------------------------------------------------------- domains


def brute_hosts_in_domain(placement: Placement, size: int) -> int:
    return max(max(Counter(host // size for host in row).values()) for row in placement.hosts)


@pytest.mark.parametrize("num_groups", range(1, 15))
def test_hosts_stand_in_different_domains_exactly_where_there_is_room_for_it(num_groups: int) -> None:
    for redundancy in range(1, num_groups + 1):
        for size in range(1, num_groups + 2):
            placement = make_placement("golomb", num_groups, redundancy, size)
            most = placement.max_hosts_in_domain(size)
            assert most == brute_hosts_in_domain(placement, size)
            # Necessary for any placement: size groups of a whole domain host size * redundancy times, N shards once.
            assert (most == 1) == (redundancy * min(size, num_groups) <= num_groups or redundancy == 1)


@pytest.mark.parametrize("num_groups", [8, 9, 10, 11, 12])
def test_no_offsets_with_as_few_hosts_in_a_domain_repeat_less(num_groups: int) -> None:
    def key(offsets: tuple[int, ...], size: int) -> tuple[int, int, int]:
        hosts = tuple(tuple(GroupId((s - o) % num_groups) for o in offsets) for s in range(num_groups))
        counts = difference_counts(num_groups, offsets)
        return brute_hosts_in_domain(Placement(hosts=hosts), size), int(counts.max()), int((counts**2).sum())

    is_compromise = False
    for redundancy in range(2, num_groups):
        everything = [(0, *rest) for rest in combinations(range(1, num_groups), redundancy - 1)]
        for size in (2, 3, 4):
            found = golomb_offsets(num_groups, redundancy, size)
            assert key(found, size) == min(key(offsets, size) for offsets in everything)
            is_compromise |= key(found, size)[1:] > key(golomb_offsets(num_groups, redundancy), size)[1:]
    assert is_compromise  # domains cost something somewhere, or the comparison would show little


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("num_groups", [200, 600, 1000])
def test_large_placements_keep_hosts_in_different_domains_and_stay_golomb(num_groups: int, size: int) -> None:
    for redundancy in (2, 3, 5, 8, 9, 10):
        placement = make_placement("golomb", num_groups, redundancy, size)
        assert brute_hosts_in_domain(placement, size) == 1
        assert placement.max_shared_hosts == 1


@pytest.mark.parametrize(
    ("num_groups", "redundancy", "size"),
    [(200, 14, 8), (200, 12, 16), (200, 14, 16), (200, 25, 8), (60, 10, 7), (50, 30, 5), (40, 38, 4), (33, 17, 30)],
)
def test_where_domains_are_tight_hosts_are_spread_as_evenly_as_any_placement_can(
    num_groups: int, redundancy: int, size: int
) -> None:
    placement = make_placement("golomb", num_groups, redundancy, size)
    assert brute_hosts_in_domain(placement, size) == -(-redundancy * size // num_groups)  # pigeonhole


def test_domains_of_one_group_change_nothing() -> None:
    for num_groups, redundancy in ((7, 3), (40, 9), (200, 14), (30, 20)):
        assert golomb_offsets(num_groups, redundancy, 1) == golomb_offsets(num_groups, redundancy)


def test_domains_that_make_no_sense_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match=r"spare\.groups_per_domain=0 is below 1"):
        make_placement("golomb", 7, 3, 0)
    with pytest.raises(ValueError, match=r"spare\.groups_per_domain=0 is below 1"):
        make_placement("golomb", 7, 3).max_hosts_in_domain(0)
    with pytest.raises(ValueError, match="set placement to golomb"):
        make_placement("consecutive", 12, 3, 4)


# ------------------------------------------------------------------------------------------------------- offsets


def test_the_tabulated_rulers_are_rulers() -> None:
    for num_marks, text in enumerate(_SHORTEST_RULERS, start=1):
        marks = tuple(map(int, text.split()))
        assert len(marks) == num_marks
        assert difference_counts(2 * marks[-1] + 1, marks).max() <= 1


@pytest.mark.parametrize("redundancy", range(1, 25))
def test_no_difference_repeats_where_the_groups_exceed_twice_the_shortest_ruler(redundancy: int) -> None:
    length = int(_SHORTEST_RULERS[redundancy - 1].split()[-1])
    for num_groups in (2 * length + 1, 2 * length + 2, 10_000):
        offsets = golomb_offsets(num_groups, redundancy)
        assert len(offsets) == redundancy
        assert offsets[0] == 0
        assert difference_counts(num_groups, offsets).max() <= 1


@pytest.mark.parametrize("order", [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23])
def test_difference_sets_are_found_where_every_difference_has_to_occur(order: int) -> None:
    num_groups = order * order + order + 1
    assert (difference_counts(num_groups, golomb_offsets(num_groups, order + 1))[1:] == 1).all()


@pytest.mark.parametrize(
    ("num_groups", "redundancy"), [(5, 3), (6, 3), (8, 4), (9, 4), (10, 5), (11, 7), (12, 9), (14, 4)]
)
def test_small_cases_repeat_as_little_as_any_offsets_do(num_groups: int, redundancy: int) -> None:
    def repeats(offsets: tuple[int, ...]) -> tuple[int, int]:
        counts = difference_counts(num_groups, offsets)
        return int(counts.max()), int((counts**2).sum())

    best = min(repeats((0, *rest)) for rest in combinations(range(1, num_groups), redundancy - 1))
    assert repeats(golomb_offsets(num_groups, redundancy)) == best


def test_offsets_are_distinct_for_every_redundancy_up_to_all_groups() -> None:
    for num_groups in (2, 3, 7, 24, 30):
        for redundancy in range(1, min(num_groups, 24) + 1):
            offsets = golomb_offsets(num_groups, redundancy)
            assert offsets == tuple(sorted(set(offsets)))
            assert len(offsets) == redundancy
            assert offsets[0] == 0
            assert offsets[-1] < num_groups


def test_offsets_reach_across_the_ring_rather_than_lie_in_a_window() -> None:
    # The shortest ruler of 9 marks, 44 long, has a second singular value of 8.9 out of 9 at N = 1000.
    indicator = np.zeros(1000)
    indicator[list(golomb_offsets(1000, 9))] = 1
    assert np.abs(np.fft.rfft(indicator))[1:].max() < 6.6
