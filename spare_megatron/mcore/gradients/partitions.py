"""How a rank's parameters are cut into state partitions, pieces and fragments; equal on that rank of every group.

Spans of parameters, concatenated, are cut into partitions of equal length (the last ones may be short or empty): whole
parameters in chunk order or, in a group with lanes, what the rank's own strips have of them. A partition is cut into
pieces, the unit in which optimizer state is copied, and a piece into fragments, ranges of single parameters. An element
is thus always updated in the same fragment, whichever group hosts its partition.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from spare_megatron.mcore.model.model import Chunk
from spare_megatron.stacking.layout import PartitionId

PIECE_ELEMENTS = 1 << 17
"""Length of a piece: 1 MiB of Adam's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A range of one flat parameter; `offset` is the place of its first element in the state partition."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    offset: int

    @property
    def values(self) -> Tensor:
        """The elements, in the model's precision."""
        return self.parameter.detach().view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """Their fp32 gradient, a view of Megatron's buffer."""
        gradient: Tensor = self.parameter.main_grad
        return gradient.view(-1)[self.start : self.stop]

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class Span(NamedTuple):
    """A range of one flat parameter."""

    parameter: torch.nn.Parameter
    start: int
    stop: int


def whole_parameters(chunks: Sequence[Chunk]) -> list[Span]:
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    return [Span(parameter, 0, parameter.numel()) for parameter in parameters]


class StatePartitions:
    """The state partitions of a rank: `num_partitions` of them, in pieces of `piece_elements` (None: whole)."""

    def __init__(self, spans: Sequence[Span], num_partitions: int, piece_elements: int | None = PIECE_ELEMENTS) -> None:
        self._spans = spans
        *self._firsts, self._size = accumulate((span.stop - span.start for span in spans), initial=0)
        self._length = -(-self._size // num_partitions)
        self._piece = piece_elements or max(self._length, 1)
        self.num_partitions = num_partitions

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
