"""Tensors as one range of bytes, read and written in place, a piece at a time."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spare_megatron.core.pieces import Piece


class TensorBytes:
    """The bytes of tensors, one after the other.

    Args:
        tensors: On any device, contiguous. They are neither copied nor kept from changing.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # view, not reshape: what is not contiguous would be copied, and the copy written.
        self._parts = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(part.numel() for part in self._parts))
        self.num_bytes = self._ends[-1] if self._ends else 0

    def read(self, piece: Piece) -> bytes:
        """The bytes of the piece."""
        return b"".join(some.cpu().numpy().tobytes() for some in self._within(piece))

    def write(self, piece: Piece, data: memoryview) -> None:
        """Writes these bytes in the place of the piece."""
        start = 0
        for some in self._within(piece):
            some.copy_(torch.frombuffer(data, dtype=torch.uint8, count=some.numel(), offset=start))
            start += some.numel()

    def beside(self, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of each tensor, and their places in as many bytes as all have, in their order."""
        ends = [0, *self._ends]
        for part, start, stop in zip(self._parts, ends, ends[1:], strict=False):
            yield part, out[start:stop]

    def _within(self, piece: Piece) -> Iterator[Tensor]:
        for index in range(bisect_right(self._ends, piece.start), len(self._parts)):
            begin = self._ends[index] - self._parts[index].numel()
            if begin >= piece.stop:
                return
            yield self._parts[index][max(0, piece.start - begin) : piece.stop - begin]
