"""The division of a flat gradient space over lanes, against a walk over its elements."""

import random

from spare_megatron.core.log.bucket_window import cut
from spare_megatron.mcore.gradients.flat_gradients import ScatterRange, scatter_ranges


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
