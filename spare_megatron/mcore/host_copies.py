"""Copies tensors to host memory, and presents tensors as one range of bytes that is read and written in pieces."""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, cycle

import torch
from torch import Tensor

from spare_megatron.core.pieces import Piece


class TensorBytes:
    """The concatenated bytes of contiguous tensors on any device, neither copied nor protected from changes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # view, not reshape, which would silently copy a tensor that is not contiguous and then write to the copy.
        self._parts = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(part.numel() for part in self._parts))
        self.num_bytes = self._ends[-1] if self._ends else 0

    def read(self, piece: Piece) -> bytes:
        return b"".join(some.cpu().numpy().tobytes() for some in self._within(piece))

    def write(self, piece: Piece, data: memoryview) -> None:
        start = 0
        for some in self._within(piece):
            some.copy_(torch.frombuffer(data, dtype=torch.uint8, count=some.numel(), offset=start))
            start += some.numel()

    def beside(self, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs the bytes of each tensor with its range in `out`, which has `num_bytes` bytes."""
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
"""Size of a pinned buffer: large against the latency of a transfer, small against a rank's memory."""

_NUM_BUFFERS = 2


Batch = Sequence[tuple[Tensor, Tensor]]
"""Pairs of flat bytes on the device and equally many in host memory."""


class PinnedBuffer:
    """Pinned host memory that a GPU fills asynchronously on the current stream."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._is_full = torch.cuda.Event()

    def fill(self, batch: Batch) -> None:
        for (source, _), place in zip(batch, _places(batch, self._memory), strict=True):
            place.copy_(source, non_blocking=True)
        self._is_full.record()

    def empty(self, batch: Batch) -> None:
        """Waits for the batch given to `fill` and copies it to its targets."""
        self._is_full.synchronize()
        for (_, target), place in zip(batch, _places(batch, self._memory), strict=True):
            target.copy_(place)


class HostCopies:
    """Copies from one device to host memory, `buffer_bytes` (BUFFER_BYTES) at a time. Threads take turns at a GPU."""

    def __init__(self, device: torch.device, buffer_bytes: int | None = None) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes or BUFFER_BYTES
        self._turn = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._buffers: Sequence[PinnedBuffer] = ()

    def now(self) -> torch.cuda.Event | None:
        """A marker of the GPU work issued so far by this thread; None on a CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: torch.cuda.Event | None) -> None:
        """Copies tensors into contiguous host tensors, after GPU work issued before the marker `after` of `now`.

        Waits for no GPU work issued later.
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
        with torch.cuda.stream(self._stream):  # `contiguous` below must run on this stream
            self._buffers = self._buffers or [PinnedBuffer(self._buffer_bytes) for _ in range(_NUM_BUFFERS)]
            flat = ((_bytes(source.contiguous()), _bytes(target)) for source, target in pairs)
            copy_through(self._buffers, batches(flat, self._buffer_bytes))


def copy_through(buffers: Sequence[PinnedBuffer], all_batches: Iterable[Batch]) -> None:
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
    start = 0
    for source, _ in batch:
        yield memory[start : start + source.numel()]
        start += source.numel()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
