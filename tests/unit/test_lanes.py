"""The share of each lane of a group: of the work, against counting, and of a flat gradient space, against a walk."""

import random

from spare_megatron.core.log.bucket_window import cut
from spare_megatron.mcore.gradients.flat_gradients import ScatterRange, scatter_ranges
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.plans import Microbatch, Numbered, share_of, work_of


def dealt(num_shards: int, units: int, num_groups: int, chance: random.Random) -> list[tuple[Microbatch, ...]]:
    """All units of a batch, dealt at random."""
    by_group: dict[GroupId, list[Microbatch]] = {GroupId(group): [] for group in range(num_groups)}
    for shard in range(num_shards):
        for index in range(units):
            by_group[GroupId(chance.randrange(num_groups))].append(Microbatch(ShardId(shard), index))
    work = work_of(by_group, (num_shards, units))
    return [work.of(group) for group in by_group]


def shares(work: tuple[Microbatch, ...], num_lanes: int, row_size: int, units: int) -> list[list[Numbered]]:
    return [
        share_of(work, lane=lane, num_lanes=num_lanes, row_size=row_size, units_per_shard=units)
        for lane in range(num_lanes)
    ]


def test_lanes_of_all_groups_compute_each_microbatch_of_the_batch_once() -> None:
    chance = random.Random(1)
    for _ in range(200):
        num_lanes, units, num_shards = chance.randint(1, 6), chance.randint(1, 6), chance.randint(1, 4)
        row_size = chance.choice([size for size in range(1, num_lanes + 1) if num_lanes % size == 0])
        computed: list[int] = []
        for work in dealt(num_shards, units, chance.randint(1, 4), chance):
            by_lane = shares(work, num_lanes, row_size, units)
            lengths = [len(share) for share in by_lane]
            assert max(lengths) - min(lengths) <= (row_size < num_lanes)
            for share in by_lane:
                assert [one.unit for one in share] == sorted(one.unit for one in share)
            computed += [one.number for share in by_lane for one in share]
        assert sorted(computed) == list(range(num_shards * units * row_size))


def test_lanes_compute_a_row_together() -> None:
    """Each pass of all lanes is over consecutive microbatches, those of one row."""
    work = (Microbatch(ShardId(0), 1), Microbatch(ShardId(2), 0))
    passes = list(zip(*shares(work, 3, 3, 2), strict=True))
    assert [[one.number for one in row] for row in passes] == [[3, 4, 5], [12, 13, 14]]
    assert [{one.unit for one in row} for row in passes] == [{work[0]}, {work[1]}]


def test_sets_of_lanes_that_divide_the_experts_take_turns() -> None:
    work = tuple(Microbatch(ShardId(0), index) for index in range(3))
    found = [[one.number for one in share] for share in shares(work, 4, 2, 3)]
    assert found == [[0, 4], [1, 5], [2], [3]]


def test_the_same_microbatch_has_the_same_number_whatever_the_unit() -> None:
    """4 shards of 6 microbatches; 2 of 12; 2 of 4 rows of 3: microbatch 17 is in all of them."""
    found = [
        [one.number for share in shares((unit,), lanes, row, units) for one in share]
        for unit, lanes, row, units in (
            (Microbatch(ShardId(2), 5), 1, 1, 6),
            (Microbatch(ShardId(1), 5), 2, 1, 12),
            (Microbatch(ShardId(1), 1), 3, 3, 4),
        )
    ]
    assert found == [[17], [17], [15, 16, 17]]


def test_a_ramp_in_rows_has_a_row_for_each_of_their_microbatches() -> None:
    for ramp in (BatchRamp.constant(12), BatchRamp(largest=24, start=6, increment=3, steps=17)):
        rows = ramp.in_units_of(3)
        assert [3 * rows.at(step) for step in range(20)] == [ramp.at(step) for step in range(20)]
        assert [3 * rows.before(step) for step in range(20)] == [ramp.before(step) for step in range(20)]


def lanes_of(sizes: list[tuple[int, int]], strip_elements: int, lane: int) -> tuple[ScatterRange, ...]:
    """The ranges as one lane sees them; of spans of one lane it is the only one."""
    spans, stop = [], 0
    for size, num_lanes in sizes:
        start, stop = stop, stop + size
        spans.append(ScatterRange(start=start, stop=stop, lane=lane % num_lanes, num_lanes=num_lanes))
    return scatter_ranges(spans, strip_elements)


def test_every_element_is_in_one_range_and_in_the_strip_of_one_lane() -> None:
    generator = random.Random(5)
    for _ in range(300):
        num_lanes = generator.choice([1, 2, 3, 4, 8])
        sizes = [(generator.randint(1, 60), generator.choice([1, num_lanes])) for _ in range(generator.randint(1, 4))]
        ends = {sum(size for size, _ in sizes[: number + 1]) for number in range(len(sizes))}
        strip_elements = generator.randint(1, 20)
        lanes = [lanes_of(sizes, strip_elements, lane) for lane in range(num_lanes)]
        num_lanes_of = [count for size, count in sizes for _ in range(size)]
        covered = []
        for of_lanes in zip(*lanes, strict=True):
            elements = list(range(of_lanes[0].start, of_lanes[0].stop))
            covered += elements
            shared_by = {num_lanes_of[element] for element in elements}
            assert shared_by == {of_lanes[0].num_lanes}, "a range has the parameters of the same lanes"
            assert num_lanes == 1 or ends.isdisjoint(elements[1:]) or {count for _, count in sizes} == {1}
            own = [list(one.own) for one in of_lanes[: of_lanes[0].num_lanes]]
            assert [element for strip in own for element in strip] == elements
            assert max(map(len, own)) == of_lanes[0].strip_length <= strip_elements
            assert [list(one.own) for one in of_lanes] == own * (num_lanes // len(own))
            for one in of_lanes:
                assert [list(one.strip(lane)) for lane in range(one.num_lanes)] == own
        assert covered == list(range(len(num_lanes_of)))


def test_strips_are_equal_but_in_the_last_range_of_a_span() -> None:
    ranges = lanes_of([(103, 4), (50, 4)], 5, 0)
    assert [(one.start, one.stop) for one in ranges[4:7]] == [(80, 100), (100, 103), (103, 123)]
    for one in ranges:
        is_last = one.stop in (103, 153)
        assert is_last or {len(one.strip(lane)) for lane in range(4)} == {5}


def test_with_one_lane_the_ranges_are_the_buckets_across_buffers() -> None:
    ranges = lanes_of([(70, 1), (3, 1), (41, 1)], 16, 0)
    assert tuple(one.own for one in ranges) == cut(114, 16)
