"""How a rank's parameters are cut into state partitions, pieces and fragments; equal on that rank of every group.

The parameters, concatenated in chunk order, are cut into partitions of equal length (the last ones may be short or
empty). A partition is cut into pieces, the unit in which optimizer state is copied, and a piece into fragments, ranges
of single parameters. An element is thus always updated in the same fragment, whichever group hosts its partition.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spare_megatron.mcore.model import Chunk
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


class StatePartitions:
    """The state partitions of a rank: `num_partitions` of them, in pieces of `piece_elements`."""

    def __init__(self, chunks: Sequence[Chunk], num_partitions: int, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
        *self._firsts, self._size = accumulate((p.numel() for p in self._parameters), initial=0)
        self._length = -(-self._size // num_partitions)
        self._piece = piece_elements
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
            first, parameter = self._firsts[index], self._parameters[index]
            stop = min(end, first + parameter.numel())
            yield Fragment(parameter=parameter, start=start - first, stop=stop - first, offset=start - origin)
            start, index = stop, index + 1
