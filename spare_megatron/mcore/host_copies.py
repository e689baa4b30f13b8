"""Tensors as one range of bytes, read and written in place, a piece at a time."""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, cycle

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


BUFFER_BYTES = 32 * 2**20
"""Of each pinned buffer: many times what a transfer takes to begin, and nothing beside a rank's memory."""

_NUM_BUFFERS = 2


Batch = Sequence[tuple[Tensor, Tensor]]
"""Flat bytes on the device, and as many in host memory."""


class PinnedBuffer:
    """Host memory that a GPU fills while nobody waits, on the current stream.

    Args:
        num_bytes: Its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._is_full = torch.cuda.Event()

    def fill(self, batch: Batch) -> None:
        """Begins to copy from the device."""
        for (source, _), place in zip(batch, _places(batch, self._memory), strict=True):
            place.copy_(source, non_blocking=True)
        self._is_full.record()

    def empty(self, batch: Batch) -> None:
        """Waits for what `fill` was given and copies it to where it belongs."""
        self._is_full.synchronize()
        for (_, target), place in zip(batch, _places(batch, self._memory), strict=True):
            target.copy_(place)


class HostCopies:
    """Copies from one device. From a GPU, threads take turns.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._buffers: Sequence[PinnedBuffer] = ()

    def now(self) -> torch.cuda.Event | None:
        """What the device has been asked for so far by this thread; None where it is done already."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: torch.cuda.Event | None) -> None:
        """Fills tensors in host memory with the values of others of the same shapes and formats.

        Waits for nothing that the device is asked for after `now` has been.

        Args:
            pairs: What to copy, and where to; the latter are contiguous.
            after: What `now` has given.
        """
        with torch.no_grad():
            if after is None:
                for source, target in pairs:
                    target.copy_(source)
                return
            with self._turn:
                self._copy_from_gpu(pairs, after)

    def _copy_from_gpu(self, pairs: Iterable[tuple[Tensor, Tensor]], after: torch.cuda.Event) -> None:
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):  # what is not contiguous is made so there
            self._buffers = self._buffers or [PinnedBuffer(BUFFER_BYTES) for _ in range(_NUM_BUFFERS)]
            flat = ((_bytes(source.contiguous()), _bytes(target)) for source, target in pairs)
            copy_through(self._buffers, batches(flat, BUFFER_BYTES))


def copy_through(buffers: Sequence[PinnedBuffer], all_batches: Iterable[Batch]) -> None:
    """Fills one buffer while another is emptied."""
    filling: deque[tuple[PinnedBuffer, Batch]] = deque()
    for buffer, batch in zip(cycle(buffers), all_batches, strict=False):
        if len(filling) == len(buffers):
            first, copied = filling.popleft()
            first.empty(copied)
        buffer.fill(batch)
        filling.append((buffer, batch))
    for buffer, batch in filling:
        buffer.empty(batch)


def batches(pairs: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Iterator[Batch]:
    """All bytes in their order, as many at a time as a buffer holds."""
    batch: list[tuple[Tensor, Tensor]] = []
    left = num_bytes
    for source, target in pairs:
        start = 0
        while start < source.numel():
            stop = min(start + left, source.numel())
            batch.append((source[start:stop], target[start:stop]))
            left -= stop - start
            start = stop
            if not left:
                yield batch
                batch, left = [], num_bytes
    if batch:
        yield batch


def _places(batch: Batch, memory: Tensor) -> Iterator[Tensor]:
    """The place of each part of a batch when all stand one after the other."""
    start = 0
    for source, _ in batch:
        yield memory[start : start + source.numel()]
        start += source.numel()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
