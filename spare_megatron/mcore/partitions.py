"""How the parameters of a rank are cut into slices, pieces and fragments: the same on that rank of every group.

The flat parameter space of a rank is the concatenation of its parameters in the order of its chunks. It is cut into
slices of equal length, the last ones short or empty where it does not divide. A slice is cut into pieces, the unit in
which its optimizer state is copied, and a piece into fragments, the ranges of single parameters in it. So every
element is always updated in the same fragment, whoever hosts its slice and however it came there.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spare_megatron.mcore.model import Chunk
from spare_megatron.stacking.layout import SliceId

PIECE_ELEMENTS = 1 << 17
"""Length of a piece: 1 MiB of Adam's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A range of one parameter.

    Attributes:
        parameter: The parameter, or this rank's part of it.
        start: First element in the parameter, flat.
        stop: Element after the last.
        offset: Place of the first element in the slice.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    offset: int

    @property
    def values(self) -> Tensor:
        """The elements themselves, as the model computes with them."""
        return self.parameter.detach().view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """Their gradient in fp32, where Megatron keeps it."""
        gradient: Tensor = self.parameter.main_grad
        return gradient.view(-1)[self.start : self.stop]

    @property
    def place(self) -> slice:
        """Where in the slice they are."""
        return slice(self.offset, self.offset + self.stop - self.start)


class Slices:
    """The cuts.

    Args:
        chunks: The rank's part of the model.
        num_slices: Slices to cut it into.
        piece_elements: Length of a piece.
    """

    def __init__(self, chunks: Sequence[Chunk], num_slices: int, piece_elements: int = PIECE_ELEMENTS) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
        *self._firsts, self._size = accumulate((p.numel() for p in self._parameters), initial=0)
        self._length = -(-self._size // num_slices)
        self._piece = piece_elements
        self.num_slices = num_slices

    def length(self, number: SliceId) -> int:
        """Elements of a slice."""
        return max(0, min(self._length, self._size - number * self._length))

    def num_pieces(self, number: SliceId) -> int:
        """Pieces of a slice; none if it is empty."""
        return -(-self.length(number) // self._piece)

    def place(self, number: SliceId, piece: int) -> slice:
        """Where in its slice a piece is."""
        return slice(piece * self._piece, min((piece + 1) * self._piece, self.length(number)))

    def fragments(self, number: SliceId, place: slice) -> Iterator[Fragment]:
        """What a range of a slice consists of, without gaps, in the order of the parameters."""
        origin = number * self._length
        start, end = origin + place.start, origin + place.stop
        index = bisect_right(self._firsts, start) - 1
        while start < end:
            first, parameter = self._firsts[index], self._parameters[index]
            stop = min(end, first + parameter.numel())
            yield Fragment(parameter=parameter, start=start - first, stop=stop - first, offset=start - origin)
            start, index = stop, index + 1
