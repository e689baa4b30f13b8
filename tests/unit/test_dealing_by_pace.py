"""Work dealt by pace, at both granularities, against all ways to deal it."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from spare_megatron.stacking.layout import GroupId, ShardId, Slabs
from spare_megatron.stacking.order import Dealing, initial_order
from spare_megatron.stacking.paces import EVEN, Paces, Rounds, slack_of
from spare_megatron.stacking.placement import Placement, make_placement
from spare_megatron.stacking.plans import Microbatch, Owners, work_of
from spare_megatron.stacking.reorder import initial_owners, patch_work, reorder_microbatches
from spare_megatron.stacking.stack_reorder import initial_order as initial_stacks
from spare_megatron.stacking.stack_reorder import reorder_stacks

EVERYWHERE = make_placement("golomb", 8, 8)


def slow(permille: dict[int, int], rounds: Rounds | None = None) -> Paces:
    by_group = {GroupId(group): pace for group, pace in permille.items()}
    return Paces(permille=by_group, rounds=rounds or Rounds())


def time_of(loads: dict[int, int], paces: Paces) -> int:
    """When the last group is done, counted round by round."""
    longest, rounds = 0, paces.rounds
    for group, load in loads.items():
        passes = -(-load * rounds.size // rounds.lanes)
        fill = rounds.fill - paces.lacking.get(GroupId(group), 0)
        passes += -passes % rounds.multiple + (fill if load else 0)
        longest = max(longest, passes * paces.permille.get(GroupId(group), 1000))
    return longest


def loads_of(owners: Owners | list[int]) -> dict[int, int]:
    groups, counts = np.unique(np.array(owners), return_counts=True)
    return dict(zip(groups.tolist(), counts.tolist(), strict=True))


def brute_force(placement: Placement, alive: frozenset[GroupId], owners: Owners, paces: Paces) -> tuple[int, int]:
    """Least time and, at it, fewest moves, by trying all owners."""
    choices = [[g for g in row if g in alive] for row in placement.hosts for _ in range(owners.shape[1])]
    present = owners.ravel().tolist()
    return min(
        (time_of(loads_of(list(trial)), paces), sum(a != b for a, b in zip(trial, present, strict=True)))
        for trial in product(*choices)
    )


def random_paces(rng: np.random.Generator, num_groups: int) -> Paces:
    lanes, multiple = rng.integers(1, 3, 2).tolist()
    rounds = Rounds(lanes=lanes, multiple=multiple, fill=int(rng.integers(0, 3)))
    paces = slow(dict(enumerate(rng.integers(500, 3000, num_groups).tolist())), rounds)
    return replace(paces, lacking=dict(enumerate(rng.integers(0, rounds.fill + 1, num_groups).tolist())))


@pytest.mark.parametrize("seed", range(40))
def test_microbatches_take_the_least_time_and_then_the_fewest_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, redundancy, num_microbatches = [(3, 2, 3), (4, 3, 2), (5, 2, 2), (2, 2, 4)][seed % 4]
    placement = make_placement("golomb", num_groups, redundancy)
    owners = rng.integers(0, num_groups, (num_groups, num_microbatches)).astype(np.int32)
    while placement.uncovered(alive := frozenset(np.flatnonzero(rng.random(num_groups) < 0.8).tolist())):
        pass
    paces = random_paces(rng, num_groups)
    if len(alive) == 1:
        paces = EVEN
    result = reorder_microbatches(placement, alive, owners, paces=paces)
    found = (time_of(loads_of(result.owners), paces), result.num_moves)
    assert found == brute_force(placement, alive, owners, paces)


@pytest.mark.parametrize("seed", range(20))
def test_whole_shards_take_the_least_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, redundancy = [(4, 3), (5, 3), (3, 2)][seed % 3]
    placement = make_placement("golomb", num_groups, redundancy)
    while placement.uncovered(alive := frozenset(np.flatnonzero(rng.random(num_groups) < 0.8).tolist())):
        pass
    paces = random_paces(rng, num_groups).in_units_of(4)
    if len(alive) == 1:
        paces = EVEN
    result = reorder_stacks(placement, alive, initial_stacks(placement), paces=paces)
    best, _ = brute_force(placement, alive, initial_owners(placement, 1), paces)
    assert time_of(loads_of(result.owners), paces) == best
    again = reorder_stacks(placement, alive, result.order, paces=paces)
    assert again.num_moves == 0, "what is dealt by these paces stays as it is"


def test_a_group_at_half_speed_gets_about_half_the_work() -> None:
    result = reorder_microbatches(
        EVERYWHERE, frozenset(range(8)), initial_owners(EVERYWHERE, 16), paces=slow({2: 2000})
    )
    loads = loads_of(result.owners)
    assert (loads[2], time_of(loads, slow({2: 2000}))) == (9, 18_000)
    assert result.num_moves == 7, "only what the slow group gives away moves"


@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_equal_paces_deal_exactly_as_none(granularity: str) -> None:
    placement, alive = make_placement("golomb", 13, 4), frozenset(range(13)) - {GroupId(3), GroupId(7)}
    order = initial_order(placement, 6, granularity)
    all_slow = slow(dict.fromkeys(range(13), 1700), Rounds(lanes=2, multiple=3, fill=5))
    one_lost = slow({3: 5000}, Rounds(fill=2))
    orphans = [Microbatch(0, 1), Microbatch(3, 2), Microbatch(3, 4)]
    for paces in (all_slow, one_lost):
        assert order.for_groups(alive, paces).work.digest == order.for_groups(alive).work.digest
        assert order.patch(alive, orphans, paces).digest == order.patch(alive, orphans).digest


@pytest.mark.parametrize(("layers", "stages"), [(12, 4), (12, 3), (7, 4), (8, 8)])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8])
def test_groups_with_fewer_stages_are_dealt_what_ends_first_of_all_loads(
    layers: int, stages: int, num_microbatches: int
) -> None:
    """Two such groups beside a whole one, of all lengths: against exact fractions, which thousandths stand for."""
    placement, total = make_placement("golomb", 3, 3), 3 * num_microbatches
    for lengths in product(range(2, stages + 1), repeat=2):
        slabs = Slabs(layers, (stages, *range(stages - 1, 1, -1)))
        of_group = (stages, *lengths)

        def time_of_loads(loads: tuple[int, ...], of_group: tuple[int, ...] = of_group) -> Fraction:
            return max(
                Fraction(-(-layers // length), -(-layers // stages)) * (load + length - 1) if load else Fraction(0)
                for load, length in zip(loads, of_group, strict=True)
            )

        cuts = combinations_with_replacement(range(total + 1), 2)
        least = min(time_of_loads((first, second - first, total - second)) for first, second in cuts)
        fewer = {GroupId(group): length for group, length in enumerate(of_group) if length < stages}
        paces = Paces(
            permille={group: slabs.pace(length) for group, length in fewer.items()},
            rounds=Rounds(fill=stages - 1),
            lacking={group: stages - length for group, length in fewer.items()},
        )
        result = reorder_microbatches(
            placement, frozenset(range(3)), initial_owners(placement, num_microbatches), paces=paces
        )
        loads = loads_of(result.owners)
        assert time_of_loads(tuple(loads.get(group, 0) for group in range(3))) == least


def test_slack_counts_the_stages_that_a_pipeline_lacks() -> None:
    some = [Microbatch(ShardId(0), index) for index in range(12)]
    work = work_of({GroupId(0): some[:2], GroupId(1): some[2:9], GroupId(2): some[9:]}, (1, 12))
    paces = replace(slow({0: 1333, 2: 2000}, Rounds(fill=3)), lacking={GroupId(0): 1, GroupId(2): 2})
    longest = time_of({0: 2, 1: 7, 2: 3}, paces)
    slack = slack_of(work, paces)
    assert slack == {0: 3, 1: 0, 2: 1}
    for group, load in ((0, 2), (1, 7), (2, 3)):
        assert time_of({group: load + slack[GroupId(group)]}, paces) <= longest
        assert time_of({group: load + slack[GroupId(group)] + 1}, paces) > longest


def test_a_patch_spares_a_slow_group() -> None:
    placement, alive = make_placement("golomb", 3, 3), frozenset({GroupId(1), GroupId(2)})
    orphans = [Microbatch(0, index) for index in range(6)]
    work = patch_work(placement, alive, orphans, paces=slow({1: 2000}))
    assert {group: len(items) for group, items in work.items()} == {1: 2, 2: 4}
    filled = patch_work(placement, alive, orphans[:2], paces=slow({1: 3000}, Rounds(fill=2)))
    assert {group: len(items) for group, items in filled.items()} == {2: 2}


@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_a_group_too_slow_for_any_work_is_probed_for_one_step(granularity: str) -> None:
    groups = tuple(map(GroupId, range(8)))
    dealing = Dealing(initial_order(EVERYWHERE, 4, granularity), groups)
    paces = slow({5: 90_000})
    before = dealing.work(groups, paces)
    probing = dealing.work(groups, paces, probe=GroupId(5))
    assert not before.of(GroupId(5))
    assert len(probing.of(GroupId(5))) == {"microbatch": 1, "stack": 4}[granularity]
    assert (probing.num_microbatches, int((probing.owners < 0).sum())) == (32, 0)
    assert dealing.work(groups, paces).digest == before.digest
    assert dealing.work(groups, paces, probe=GroupId(2)).digest == before.digest, "it has work"
