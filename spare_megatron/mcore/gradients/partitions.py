"""How a rank's parameters are cut into state partitions, pieces and fragments; equal on that rank of every group.

Spans of parameters, concatenated, are cut into partitions of equal length (the last ones may be short or empty): whole
parameters in chunk order or, in a group with lanes, what the rank's own strips have of them. A partition is cut into
pieces, the unit in which optimizer state is copied, and a piece into fragments, ranges of single parameters. An element
is thus always updated in the same fragment, whichever group hosts its partition.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.mcore.gradients.flat_gradients import counts_for_norm, flat_parameters, needed_everywhere
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.stacking.layout import PartitionId

PIECE_ELEMENTS = 1 << 17
"""Length of a piece: 1 MiB of Adam's two moments."""

OWN = PartitionId(0)
"""The one state partition where lanes divide the state: all own strips, in the order of the flat gradient space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A range of one flat parameter; `offset` is the place of its first element in the state partition."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    offset: int

    @property
    def values(self) -> Tensor:
        return self.parameter.detach().view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """Their fp32 gradient, a view of Megatron's buffer."""
        gradient: Tensor = self.parameter.main_grad
        return gradient.view(-1)[self.start : self.stop]

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class ParameterRange(NamedTuple):
    parameter: torch.nn.Parameter
    start: int
    stop: int


def whole_parameters(chunks: Sequence[Chunk]) -> list[ParameterRange]:
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    return [ParameterRange(parameter, 0, parameter.numel()) for parameter in parameters]


class StatePartitions:
    """The state partitions of a rank, `num_partitions` of them, in pieces of `piece_elements` (None: whole)."""

    def __init__(
        self, spans: Sequence[ParameterRange], num_partitions: int, piece_elements: int | None = PIECE_ELEMENTS
    ) -> None:
        self._spans = spans
        *self._firsts, self._size = accumulate((span.stop - span.start for span in spans), initial=0)
        self._length = -(-self._size // num_partitions)
        self._piece = piece_elements or max(self._length, 1)
        self.numbers = tuple(map(PartitionId, range(num_partitions)))

    def length(self, number: PartitionId) -> int:
        return max(0, min(self._length, self._size - number * self._length))

    def num_pieces(self, number: PartitionId) -> int:
        return -(-self.length(number) // self._piece)

    def place(self, number: PartitionId, piece: int) -> slice:
        """Range of a piece in its partition."""
        return slice(piece * self._piece, min((piece + 1) * self._piece, self.length(number)))

    def fragments(self, number: PartitionId, place: slice) -> Iterator[Fragment]:
        """The fragments of a range of a partition, without gaps, in parameter order."""
        origin = number * self._length
        start, end = origin + place.start, origin + place.stop
        index = bisect_right(self._firsts, start) - 1
        while start < end:
            span = self._spans[index]
            shift = span.start - self._firsts[index]
            stop = min(end, span.stop - shift)
            yield Fragment(parameter=span.parameter, start=start + shift, stop=stop + shift, offset=start - origin)
            start, index = stop, index + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """A range (`place`) of a bucket in the state partition `number`; None if every group needs it. `counted`: the
    ranges within it that Megatron counts for the norm, by part of the model; empty where `number` is None.
    """

    number: PartitionId | None
    place: slice
    counted: tuple[tuple[slice, str], ...]


def gradient_parts(
    chunks: Sequence[Chunk],
    groups: ProcessGroupCollection,
    partitions: StatePartitions,
    buckets: Sequence[range],
    part_of: Mapping[torch.nn.Parameter, str],
) -> tuple[tuple[GradientPart, ...], ...]:
    """As few parts of each bucket as possible, ascending. `part_of` the model is what a parameter belongs to."""
    ranges = sorted(_ranges(chunks, groups, partitions, part_of), key=lambda part: part.place.start)
    parts: list[list[GradientPart]] = [[] for _ in buckets]
    index = 0
    for bucket, of_bucket in zip(buckets, parts, strict=True):
        while index < len(ranges) and ranges[index].place.start < bucket.stop:
            part = _within(ranges[index], bucket)
            if of_bucket and of_bucket[-1].number == part.number and of_bucket[-1].place.stop == part.place.start:
                part = _joined(of_bucket.pop(), part)
            of_bucket.append(part)
            if ranges[index].place.stop > bucket.stop:
                break  # the rest is in the next bucket
            index += 1
    return tuple(map(tuple, parts))


def _ranges(
    chunks: Sequence[Chunk],
    groups: ProcessGroupCollection,
    partitions: StatePartitions,
    part_of: Mapping[torch.nn.Parameter, str],
) -> Iterator[GradientPart]:
    """The range of every partition fragment in the flat gradient space."""
    starts = {flat.parameter: flat.start for flat in flat_parameters(chunks)}
    everywhere = needed_everywhere(chunks, groups)
    for number in partitions.numbers:
        for fragment in partitions.fragments(number, slice(0, partitions.length(number))):
            first = starts[fragment.parameter]
            place = slice(first + fragment.start, first + fragment.stop)
            if fragment.parameter in everywhere:
                yield GradientPart(number=None, place=place, counted=())
            else:
                counted = ((place, part_of[fragment.parameter]),) if counts_for_norm(fragment.parameter, groups) else ()
                yield GradientPart(number=number, place=place, counted=counted)


def _within(part: GradientPart, bucket: range) -> GradientPart:
    """The part that lies in the bucket, relative to the bucket."""

    def within(place: slice) -> slice:
        return slice(max(place.start, bucket.start) - bucket.start, min(place.stop, bucket.stop) - bucket.start)

    return replace(part, place=within(part.place), counted=tuple((within(one), name) for one, name in part.counted))


def _joined(first: GradientPart, second: GradientPart) -> GradientPart:
    counted = (*first.counted, *second.counted)
    if first.counted and second.counted:
        (last, name), (following, other) = first.counted[-1], second.counted[0]
        if (last.stop, name) == (following.start, other):
            counted = (*first.counted[:-1], (slice(last.start, following.stop), name), *second.counted[1:])
    return GradientPart(number=first.number, place=slice(first.place.start, second.place.stop), counted=counted)
