"""Cuts of the layers for pipelines of several lengths, against stages found layer by layer."""

from itertools import combinations, groupby, product
from math import gcd, lcm

import pytest

from spare_megatron.stacking.layout import Slabs


def stage_of(layer: int, num_layers: int, length: int) -> int:
    """The last stage that begins at this layer or before; stage i begins after i / length of the layers."""
    return max(stage for stage in range(length) if stage * num_layers // length <= layer)


@pytest.mark.parametrize("lengths", [*combinations(range(1, 7), 2), *combinations(range(1, 6), 3), (5,)])
def test_slabs_are_the_runs_of_layers_that_are_together_in_pipelines_of_all_lengths(lengths: tuple[int, ...]) -> None:
    for num_layers in range(max(lengths), 31):
        slabs = Slabs(num_layers, lengths)
        together = [tuple(stage_of(layer, num_layers, length) for length in lengths) for layer in range(num_layers)]
        runs = [list(run) for _, run in groupby(range(num_layers), key=together.__getitem__)]
        assert [list(layers) for layers in slabs.layers] == runs
        for length in lengths:
            stages = [slabs.of_stage(stage, length) for stage in range(length)]
            assert [number for stage in stages for number in stage] == list(range(len(runs))), "in order, without gaps"
            for stage, numbers in enumerate(stages):
                layers = [layer for number in numbers for layer in slabs.layers[number]]
                assert layers == [at for at in range(num_layers) if stage_of(at, num_layers, length) == stage]
                assert len(layers) in (num_layers // length, -(-num_layers // length)), "as even as layers allow"


@pytest.mark.parametrize(("longer", "shorter"), [pair for pair in product(range(1, 9), repeat=2) if pair[0] > pair[1]])
def test_two_lengths_make_as_many_slabs_as_they_have_different_cuts(longer: int, shorter: int) -> None:
    most = longer + shorter - gcd(longer, shorter)
    assert len(Slabs(lcm(longer, shorter), (longer, shorter)).layers) == most
    assert all(len(Slabs(num_layers, (longer, shorter)).layers) <= most for num_layers in range(longer, 60))


def test_the_pace_of_a_pipeline_is_that_of_its_longest_stage() -> None:
    slabs = Slabs(13, (4, 3, 2))
    assert [slabs.pace(length) for length in slabs.lengths] == [1000, 1250, 1750]


def test_with_one_length_slabs_are_stages() -> None:
    slabs = Slabs(8, (4,))
    assert slabs.layers == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert [list(slabs.of_stage(stage, 4)) for stage in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("width", [1, 3])
def test_the_holder_of_a_position_is_the_rank_of_the_stage_that_has_the_slab(width: int) -> None:
    slabs = Slabs(16, (6, 4, 3))
    for length in slabs.lengths:
        held = {stage * width + place: place for stage in range(length) for place in range(width)}
        positions = {
            rank: [slab * width + place for slab in slabs.of_stage(rank // width, length)]
            for rank, place in held.items()
        }
        found = {at: rank for rank, of_rank in positions.items() for at in of_rank}
        assert sorted(found) == list(range(len(slabs.layers) * width))
        assert found == {at: slabs.holder_of(at, length, width) for at in found}


# ------------------------------------------------------------------------------------------------------ order of posts

Operations = dict[tuple[int, int], list[tuple[object, ...]]]
"""What each rank does in its last backward pass, by group and stage; each operation waits for all that take part."""


def backward_pass(slabs: Slabs, group: int, length: int, *, is_ascending: bool = False) -> Operations:
    operations: Operations = {}
    for stage in range(length):
        held = slabs.of_stage(stage, length)
        sums = [("sum", slab, bucket) for slab in (held if is_ascending else held[::-1]) for bucket in range(2)]
        received = [("transfer", group, stage)] if stage < length - 1 else []
        sent = [("transfer", group, stage - 1)] if stage else []
        operations[group, stage] = [*received, *sums, *sent, ("vote", group)]
    return operations


def gets_through(operations: Operations) -> bool:
    """Whether all ranks reach their end if each waits at an operation until all that take part are there."""
    left = {rank: list(of_rank) for rank, of_rank in operations.items()}
    parts = {
        one: [rank for rank, of_rank in operations.items() if one in of_rank]
        for of_rank in left.values()
        for one in of_rank
    }
    while any(left.values()):
        next_of = {rank: of_rank[0] for rank, of_rank in left.items() if of_rank}
        ready = [one for one in set(next_of.values()) if all(next_of.get(rank) == one for rank in parts[one])]
        if not ready:
            return False
        for one in ready:
            for rank in parts[one]:
                left[rank].pop(0)
    return True


@pytest.mark.parametrize(("num_layers", "lengths"), [(12, (4, 3)), (12, (4, 3, 2)), (10, (5, 4, 3, 2, 1))])
def test_groups_of_any_lengths_never_wait_in_a_circle_as_all_post_their_last_slabs_first(
    num_layers: int, lengths: tuple[int, ...]
) -> None:
    slabs = Slabs(num_layers, lengths)
    for of_groups in product(lengths, repeat=3):
        passes = [backward_pass(slabs, group, length) for group, length in enumerate(of_groups)]
        assert gets_through({rank: of_rank for each in passes for rank, of_rank in each.items()})
        others = {rank: of_rank for each in passes[1:] for rank, of_rank in each.items()}
        in_order = backward_pass(slabs, 0, of_groups[0], is_ascending=True)
        is_same = in_order == passes[0]
        assert gets_through({**others, **in_order}) is is_same, "in another order groups wait for each other for ever"
