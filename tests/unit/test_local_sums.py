"""Local sums against what was added to them, and staged copies against local sums: whatever bit of either changes is
found before the vote, in its bucket, and nothing without a fault. Sums and checksums are computed again by NumPy.
"""

import math
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spare_megatron.mcore.gradients import lane_sums
from spare_megatron.mcore.gradients.checksums import COLUMNS, NUM_DIGITS, ROWS, weights_on
from spare_megatron.mcore.gradients.fixed_point import FixedPoint, add_rounded
from spare_megatron.mcore.gradients.gradients import FixedPointSums
from tests.unit.test_staged_gradients import LAST, add, make_sums

CPU = torch.device("cpu")
FIXED = FixedPoint(scale=2.0**20, largest=2.0**50)
NO_LANES = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
LOCAL, STAGED = "the local sum of bucket {} is not what was added to it", "the staged copy of bucket {} differs"

Random = np.random.Generator


def sums_of(sizes: Sequence[int], bucket_elements: int, lanes: Any = NO_LANES, num_terms: int = 0) -> Any:
    """Those of a model whose parameters have these sizes."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    ends = np.cumsum([0, *sizes]).tolist()
    places = {one: (*place, 0) for one, place in zip(parameters, pairwise(ends), strict=True)}
    buffer = SimpleNamespace(grad_data=torch.zeros(ends[-1]), param_index_map=places, params=parameters)
    module = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], zero_grad_buffer=lambda: None, modules=list)
    chunks: Any = [SimpleNamespace(module=module)]
    groups: Any = SimpleNamespace(lanes=lanes)
    sums: Any = FixedPointSums(chunks, groups, CPU, 8 * bucket_elements, FIXED, 100, num_terms)
    sums.parameters = parameters
    return sums


def backward(sums: Any, random: Random) -> None:
    """The backward pass of a microbatch, with a loss and terms."""
    for parameter in sums.parameters:
        gradient = torch.from_numpy(random.normal(size=len(parameter)).astype(np.float32))
        (parameter * gradient).sum().backward()
    sums.add_loss(torch.tensor(random.normal()), None)
    sums.add_terms(torch.from_numpy(random.normal(size=len(sums._term_sums))), torch.ones(len(sums._term_sums)).long())
    sums.add_count(1)


def flip(values: Tensor, element: int, bit: int) -> None:
    values[element] ^= -(2**63) if bit == 63 else 1 << bit


# ------------------------------------------------------------------------------------------- additions by themselves


def added_by_numpy(rounded: np.ndarray, place: int) -> int:
    rows, _, columns, _, blocks = (of.numpy() for of in weights_on(CPU))
    places = np.arange(place, place + len(rounded))
    of_rows = rows[places // COLUMNS % ROWS] * blocks[places // COLUMNS // ROWS]
    return int((rounded * of_rows * columns[places % COLUMNS]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_and_its_checksum_are_those_of_numpy_wherever_it_begins(dtype: torch.dtype) -> None:
    random, piece, block = np.random.default_rng(1), 64 * COLUMNS, ROWS * COLUMNS
    for size in (1, 7, COLUMNS, 3 * COLUMNS + 5, piece, 2 * piece + 3):
        for place in (0, 5, COLUMNS - 1, COLUMNS, piece - 3, block - 9, block, 3 * block - COLUMNS):
            values = torch.from_numpy(random.normal(size=size)).to(dtype)
            sums = torch.from_numpy(random.integers(-(2**62), 2**62, size))
            largest, added, before = torch.tensor(0.5), torch.tensor(11), sums.numpy().copy()
            add_rounded(sums, values, 2.0**31, largest, added, place)
            scaled = values.float().numpy() * np.float32(2.0**31)
            rounded = np.rint(scaled).astype(np.int64)
            assert (sums.numpy() == before + rounded).all()
            assert float(largest) == max(0.5, float(np.abs(scaled).max()))
            assert int(added - 11) == added_by_numpy(rounded, place), (size, place)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("element", [0, 70 * COLUMNS])
def test_a_value_that_is_not_finite_raises_the_largest_and_contradicts_nothing(value: float, element: int) -> None:
    sums = sums_of([80 * COLUMNS], 80 * COLUMNS)
    gradient = torch.zeros(80 * COLUMNS)
    gradient[element] = value
    (sums.parameters[0] * gradient).sum().backward()
    assert not math.isfinite(sums.norm(0))
    sums.stage(0, sums.new_staging())
    sums.check_local(0)
    assert sums.wrong_numbers() == ""


# ------------------------------------------------------------------------------------------- steps of several attempts


def attempts(random: Random, num_buckets: int) -> list[tuple[str, int]]:
    """What happens in a step: microbatches, also some that do not count, buckets that are staged, and what is kept."""
    events, kept = [], 0
    for _ in range(random.integers(1, 4)):
        events += [("pass", int(random.random() < 0.8)) for _ in range(random.integers(1, 4))]
        num_staged = int(random.integers(kept, num_buckets + 1))
        events += [("stage", bucket) for bucket in range(kept, num_staged)]
        kept = int(random.integers(kept, num_staged + 1))
        events.append(("keep", kept))
    return [*events, *(("stage", bucket) for bucket in range(kept, num_buckets))]


def play(sums: Any, random: Random, events: Sequence[tuple[str, int]], strike: Callable[[int, Any], None]) -> None:
    """Plays a step. `strike` is called before each event, and with each bucket that has been staged."""
    staging = sums.new_staging()
    for number, (kind, of) in enumerate(events):
        strike(number, None)
        if kind == "pass":
            sums.is_counting = bool(of)
            backward(sums, random)
        elif kind == "keep":
            for bucket in range(of):
                sums.put(bucket, torch.from_numpy(random.integers(-99, 99, len(staging))))
            sums.mark_kept(of)
        else:
            staged = sums.stage(of, staging)
            strike(number, staged)
            sums.check_staged(of, staged)


def drawn_step(seed: int) -> tuple[Any, Random, list[tuple[str, int]]]:
    random = np.random.default_rng(seed)
    most = 6000 if seed % 12 == 0 else 30
    sizes = random.integers(1, most, random.integers(1, 5)).tolist()
    sums = sums_of(sizes, int(random.integers(1, most)) if most > 30 or seed % 2 else 7, num_terms=seed % 3)
    if seed % 5 < 2:  # as for state partitions
        cuts = [sorted({0, len(of), *random.integers(0, len(of), 2).tolist()}) for of in sums.buckets]
        sums.divide([[slice(*pair) for pair in pairwise(of)] for of in cuts])
    return sums, random, attempts(random, len(sums.buckets))


@pytest.mark.parametrize("part", range(4))
def test_every_flip_of_a_local_sum_or_staged_copy_is_found_and_nothing_without_one(part: int) -> None:
    for seed in range(part, 100, 4):
        sums, random, events = drawn_step(seed)
        play(sums, random, events, lambda *_: None)
        assert sums.wrong_numbers() == "", seed
        sums.reset()
        for _ in range(4):
            moments = [number for number, (kind, _) in enumerate(events) if kind == "stage"]
            staged_at = int(random.choice(moments))
            bucket = events[staged_at][1]
            in_copy, bit = random.random() < 0.4, int(random.integers(64))
            # From any event on of those since the bucket was kept or the step began, if the copy is not what changes.
            at = staged_at if in_copy else int(random.integers(0, staged_at + 1))
            struck = []

            def strike(number: int, staged: Tensor | None) -> None:
                if number != at or (staged is not None) != in_copy:  # noqa: B023  (called in this round alone)
                    return
                values = sums._local(bucket) if staged is None else used(sums, bucket, staged)  # noqa: B023
                element = int(random.integers(len(values)))  # noqa: B023
                flip(values, element, bit)  # noqa: B023
                struck.append(element)  # noqa: B023

            play(sums, random, events, strike)
            assert len(struck) == 1
            text = (STAGED if in_copy else LOCAL).format(bucket)
            assert sums.wrong_numbers().startswith(text), (seed, events, at, bucket, struck, bit)
            sums.reset()
            assert sums.wrong_numbers() == ""


def used(sums: Any, bucket: int, staged: Tensor) -> Tensor:
    """Gradients and checksums of a staged bucket, without what has only room for the checksums of others."""
    return staged[: len(sums.buckets[bucket]) + NUM_DIGITS * len(sums._checks._sections[bucket])]


def test_a_flip_of_what_is_counted_is_found_in_the_staged_copy_and_of_the_losses_before() -> None:
    sums = sums_of([9, 4], 5, num_terms=2)
    for bit in range(64):
        for element in range(sums._num_extras):
            backward(sums, np.random.default_rng(1))
            staged = sums.stage(LAST, sums.new_staging())
            flip(staged[-sums._num_extras :], element, bit)
            sums.check_staged(LAST, staged)
            assert sums.wrong_numbers().startswith(STAGED.format(LAST))
            sums.reset()
        for counted in (sums._loss.view(1), sums._term_sums[:1], sums._term_sums[1:]):
            backward(sums, np.random.default_rng(1))
            flip(counted, 0, bit)
            sums.stage(LAST, sums.new_staging())
            assert sums.wrong_numbers() == LOCAL.format(LAST)
            sums.reset()


def test_what_the_norm_finds_is_compared_although_it_is_not_staged() -> None:
    sums = make_sums("reproducible")
    add(sums, 5, 1.0)
    for bucket in range(LAST + 1):
        sums.check_local(bucket)
    assert sums.wrong_numbers() == ""
    flip(sums._sums, 5, 61)
    for bucket in range(LAST + 1):
        sums.check_local(bucket)
    assert sums.wrong_numbers() == LOCAL.format(1)


def test_top_bits_of_two_elements_escape_and_any_other_bit_of_two_is_mostly_found() -> None:
    """The limit of one number modulo 2^64 with odd weights: bit b of two elements escapes in 2^(b - 63) of cases."""
    sums, random, num_found = sums_of([64], 64), np.random.default_rng(2), 0
    for bit in (63, *range(50)):
        backward(sums, random)
        one, other = random.choice(64, 2, replace=False).tolist()
        flip(sums._sums, one, bit)
        flip(sums._sums, other, bit)
        sums.stage(0, sums.new_staging())
        assert bit < 63 or sums.wrong_numbers() == ""
        num_found += bool(sums.wrong_numbers())
        sums.reset()
    assert num_found == 50


# ------------------------------------------------------------------------------------------------------------- lanes


class Lanes:
    """Lanes in threads: what each brings to a sum is there when all have brought it."""

    def __init__(self, num: int) -> None:
        self.num, self._barrier = num, threading.Barrier(num)
        self._brought: dict[int, Tensor] = {}

    def of(self, lane: int) -> Any:
        return SimpleNamespace(rank=lambda: lane, size=lambda: self.num, lanes=self)

    def total(self, lane: int, values: Tensor) -> Tensor:
        self._barrier.wait(60)
        self._brought[lane] = values.clone()
        self._barrier.wait(60)
        return torch.stack([self._brought[one] for one in range(self.num)]).sum(0)

    def run(self, do: Callable[[int], None]) -> None:
        failed: list[BaseException] = []

        def run_lane(lane: int) -> None:
            try:
                do(lane)
            except BaseException as error:  # noqa: BLE001  (raised below)
                failed.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_lane, args=(lane,)) for lane in range(self.num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


@pytest.fixture
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter(own: Tensor, whole: Tensor, *, group: Any, **_: object) -> Any:
        lane = group.rank()
        own.copy_(group.lanes.total(lane, whole)[lane * len(own) :][: len(own)])
        return SimpleNamespace(wait=lambda: None)

    def all_reduce(values: Tensor, *, group: Any) -> None:
        values.copy_(group.lanes.total(group.rank(), values))

    monkeypatch.setattr(lane_sums, "_scatter", scatter)
    monkeypatch.setattr(lane_sums.dist, "all_reduce", all_reduce)


@pytest.mark.usefixtures("_in_threads")
@pytest.mark.parametrize("num_lanes", [2, 3])
def test_with_lanes_a_flip_on_any_lane_is_found_by_the_one_that_sums_the_strip(num_lanes: int) -> None:
    """Over a patch in which lanes keep unequal numbers of buckets; between passes and after the sum over lanes."""
    for seed in range(12):
        random = np.random.default_rng(seed)
        sizes = random.integers(1, 40, 3).tolist()
        num_buckets = len(sums_of(sizes, 8 * num_lanes).buckets)
        kept = random.integers(0, num_buckets + 1, num_lanes).tolist()
        for fault in (None, *((random.integers(3), *random.integers(0, num_lanes, 2)) for _ in range(5))):
            lanes = Lanes(num_lanes)
            groups = [sums_of(sizes, 8, lanes.of(lane)) for lane in range(num_lanes)]
            drawn = int(random.integers(2**32))
            strips = [of for of in groups[0].space.ranges[min(kept) :] if len(of)]
            expected: list[tuple[int, int]] = []
            if fault is not None and strips:
                moment, at, owner = map(int, fault)
                place = strips[int(random.integers(len(strips)))]
                bucket = groups[0].space.ranges.index(place)
                elements = place.strip(owner)
                if not elements or bucket < kept[owner]:
                    continue
                at = owner if moment == 2 else at
                expected = [(owner, bucket)]
            element, bit = (int(random.integers(2**30)), int(random.integers(64)))

            def run(lane: int) -> None:
                sums, own = groups[lane], np.random.default_rng(drawn + lane)  # noqa: B023

                def strike(now: int) -> None:
                    if expected and (moment, at) == (now, lane):  # noqa: B023
                        flip(sums._sums, elements[element % len(elements)], bit)  # noqa: B023

                for number in range(2):
                    with sums.adding():
                        backward(sums, own)
                        if number:
                            strike(0)
                        backward(sums, own)
                    sums.sum_counts()
                    if number:
                        strike(1)
                    for summed in sums.sum_over_lanes(len(sums.buckets)):
                        if number and summed == len(sums.buckets) - 1:
                            strike(2)
                    first = kept[lane] if number else 0  # noqa: B023
                    for one in range(first, len(sums.buckets)):
                        sums.check_staged(one, sums.stage(one, sums.new_staging()))
                    if not number:
                        for one in range(kept[lane]):  # noqa: B023
                            sums.put(one, torch.ones(64, dtype=torch.int64))
                        sums.mark_kept(kept[lane], min(kept))  # noqa: B023

            lanes.run(run)
            found = [(lane, sums.wrong_numbers()) for lane, sums in enumerate(groups) if sums.wrong_numbers()]
            assert found == [(lane, LOCAL.format(one)) for lane, one in expected], (seed, fault)


# ------------------------------------------------------------------------------------------------ floating-point sums


@pytest.mark.parametrize(("mode", "num_bits"), [("fast", 32), ("fast_bf16", 16)])
def test_every_flip_of_a_staged_copy_is_found_in_floating_point_too(mode: str, num_bits: int) -> None:
    sums = make_sums(mode)
    kind = torch.int32 if num_bits == 32 else torch.int16
    for element, value in enumerate((0.37, -2.0, math.nan, 0.0, math.inf, 1e-9, 3e38, 1.0, -1e-41, 0.1)):
        add(sums, element, value)
    for bucket in range(LAST + 1):
        sums.check_staged(bucket, sums.stage(bucket, sums.new_staging()))
    assert sums.wrong_numbers() == ""
    num_struck = 0
    for bucket in range(LAST + 1):
        length = len(sums.buckets[bucket])
        num_elements = len(sums.stage(bucket, sums.new_staging()))
        padding = range(length, num_elements - sums._num_extras * sums._per_extra)
        for element in set(range(num_elements)) - set(padding):
            for bit in range(num_bits):
                staged = sums.stage(bucket, sums.new_staging())
                staged.view(kind)[element] ^= -(1 << bit) if bit == num_bits - 1 else 1 << bit
                sums.check_staged(bucket, staged)
                assert sums.wrong_numbers().startswith(STAGED.format(bucket))
                sums._is_wrong.zero_()
                num_struck += 1
    assert num_struck > 10 * num_bits
