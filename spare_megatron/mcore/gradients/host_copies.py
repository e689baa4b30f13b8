"""Copies between a device and host memory, on a GPU through two pinned buffers and a stream of its own each: copies of
pageable memory would wait for all GPU work issued before, and keep other threads from the GPU.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, cycle

import torch
from torch import Tensor

from spare_megatron.devices import gpu
from spare_megatron.formats.pieces import LARGEST_PIECE_BYTES, Piece

BUFFER_BYTES = 32 * 2**20
"""Size of a buffer for a whole state: large against the latency of a transfer, small against a rank's memory."""

_NUM_BUFFERS = 2


class PinnedBuffer:
    """Pinned host memory for asynchronous copies from and to a GPU, on a stream."""

    def __init__(self, num_bytes: int, stream: gpu.Stream) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream = stream
        self._is_done = gpu.Event()

    def fill(self, sources: Sequence[Tensor]) -> None:
        """Starts to copy flat bytes from the GPU here, one after the other."""
        with gpu.stream(self._stream):
            for source, place in zip(sources, places(sources, self.memory), strict=True):
                place.copy_(source, non_blocking=True)
            self._is_done.record()

    def empty(self, targets: Sequence[Tensor]) -> None:
        """Starts to copy what is here to flat bytes on the GPU, one after the other."""
        with gpu.stream(self._stream):
            for target, place in zip(targets, places(targets, self.memory), strict=True):
                target.copy_(place, non_blocking=True)
            self._is_done.record()

    def wait(self) -> None:
        """Returns once the last copy has ended."""
        self._is_done.synchronize()


def places(parts: Sequence[Tensor], memory: Tensor) -> Iterator[Tensor]:
    """The ranges of `memory` in which flat bytes lie one after the other."""
    start = 0
    for part in parts:
        yield memory[start : start + part.numel()]
        start += part.numel()


def _pinned_buffers(num_bytes: int, device: torch.device, after: gpu.Event | None) -> list[PinnedBuffer]:
    """Two buffers with a stream of their own, which starts after the GPU work before the marker `after`."""
    stream = gpu.Stream(device)
    if after is not None:
        stream.wait_event(after)
    return [PinnedBuffer(num_bytes, stream) for _ in range(_NUM_BUFFERS)]


def issued_on(device: torch.device) -> gpu.Event | None:
    """A marker of the GPU work issued so far by this thread; None on a CPU."""
    if device.type != gpu.TYPE:
        return None
    event = gpu.Event()
    event.record(gpu.current_stream(device))
    return event


# ------------------------------------------------------------------------------------------------------------ pieces


class TensorBytes:
    """The concatenated bytes of contiguous tensors on any device, in place. Any thread reads and writes them after the
    GPU work before the marker `after`, by default the work issued so far, and waits for no other.
    """

    def __init__(self, tensors: Sequence[Tensor], after: gpu.Event | None = None) -> None:
        # view, not reshape, which would silently copy a tensor that is not contiguous and then write to the copy.
        self._parts = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(part.numel() for part in self._parts))
        self.num_bytes = self._ends[-1] if self._ends else 0
        device = next((part.device for part in self._parts if part.device.type == gpu.TYPE), None)
        self._gpu = None if device is None else (device, after or issued_on(device))
        self._of_thread = threading.local()

    def read(self, piece: Piece) -> bytes | memoryview:
        """The bytes of a piece; from a GPU, they are here until this thread's next `read`."""
        if self._gpu is None:
            return b"".join(some.numpy().tobytes() for some in self.within(piece))
        if not hasattr(self._of_thread, "ahead"):
            self._of_thread.ahead = ReadAhead(_pinned_buffers(LARGEST_PIECE_BYTES, *self._gpu))
        ahead: ReadAhead = self._of_thread.ahead
        return ahead.read(self, piece)

    @contextmanager
    def writing(self) -> Iterator["PieceWriter"]:
        """All pieces that were written in this context are there when it ends, also by an exception."""
        buffers = () if self._gpu is None else _pinned_buffers(LARGEST_PIECE_BYTES, *self._gpu)
        writer = PieceWriter(self, buffers)
        try:
            yield writer
        finally:
            writer.wait()

    def beside(self, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs the bytes of each tensor with its range in `out`, which has `num_bytes` bytes."""
        return zip(self._parts, places(self._parts, out), strict=True)

    def within(self, piece: Piece) -> list[Tensor]:
        """The bytes of a piece, in place."""
        found = []
        for index in range(bisect_right(self._ends, piece.start), len(self._parts)):
            begin = self._ends[index] - self._parts[index].numel()
            if begin >= piece.stop:
                break
            found.append(self._parts[index][max(0, piece.start - begin) : piece.stop - begin])
        return found


class ReadAhead:
    """Reads pieces through two buffers, in one thread: the following piece is on its way while one is in use."""

    def __init__(self, buffers: Sequence[PinnedBuffer]) -> None:
        self._buffers = cycle(buffers)
        self._ahead: tuple[Piece, PinnedBuffer] | None = None

    def read(self, content: TensorBytes, piece: Piece) -> memoryview:
        """The bytes of a piece, until the next call. `content` is always the same."""
        ahead = self._ahead
        buffer = ahead[1] if ahead is not None and ahead[0] == piece else self._start(content, piece)
        following = Piece(piece.stop, min(piece.stop + piece.size, content.num_bytes))
        self._ahead = (following, self._start(content, following)) if following.size > 0 else None
        buffer.wait()
        return memoryview(buffer.memory[: piece.size].numpy())

    def _start(self, content: TensorBytes, piece: Piece) -> PinnedBuffer:
        buffer = next(self._buffers)
        buffer.fill(content.within(piece))
        return buffer


class PieceWriter:
    """Writes pieces, each received in `room`, in one thread: through two buffers, or at once."""

    def __init__(self, content: TensorBytes, buffers: Sequence[PinnedBuffer]) -> None:
        self._content = content
        self._buffers = buffers
        self._next = cycle(buffers)
        self._room: PinnedBuffer | Tensor = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> memoryview:
        """Memory for the next piece, until it is written."""
        if self._buffers:
            self._room = next(self._next)
            self._room.wait()
            return memoryview(self._room.memory[:num_bytes].numpy())
        if not isinstance(self._room, Tensor) or self._room.numel() < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        return memoryview(self._room[:num_bytes].numpy())

    def write(self, piece: Piece) -> None:
        targets = self._content.within(piece)
        if not isinstance(self._room, Tensor):
            self._room.empty(targets)
            return
        for target, place in zip(targets, places(targets, self._room), strict=True):
            target.copy_(place)

    def wait(self) -> None:
        """Returns once all that was written is there."""
        for buffer in self._buffers:
            buffer.wait()


# ------------------------------------------------------------------------------------------------------ whole states

Batch = Sequence[tuple[Tensor, Tensor]]
"""Pairs of flat bytes on the device and equally many in host memory."""


class HostCopies:
    """Copies from one device to host memory, `buffer_bytes` (BUFFER_BYTES) at a time. Threads take turns at a GPU."""

    def __init__(self, device: torch.device, buffer_bytes: int | None = None) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes or BUFFER_BYTES
        self._turn = threading.Lock()
        self._stream: gpu.Stream | None = None
        self._buffers: Sequence[PinnedBuffer] = ()

    def now(self) -> gpu.Event | None:
        """A marker of the GPU work issued so far by this thread; None on a CPU."""
        return issued_on(self._device)

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], after: gpu.Event | None, range_bytes: int | None = None
    ) -> None:
        """Copies tensors to contiguous host tensors after the GPU work before the marker `after`; waits for no later
        work. `range_bytes`: the targets are one memory from its start, which CUDA has registered in ranges of this
        size; None: copies go through pinned buffers.
        """
        with torch.no_grad():
            if after is None:
                for source, target in pairs:
                    target.copy_(source)
                return
            with self._turn:
                self._copy_from_gpu(pairs, after, range_bytes)

    def _copy_from_gpu(self, pairs: Iterable[tuple[Tensor, Tensor]], after: gpu.Event, range_bytes: int | None) -> None:
        self._stream = self._stream or gpu.Stream(self._device)
        self._stream.wait_event(after)
        with gpu.stream(self._stream):  # `contiguous` below must run on this stream
            flat = ((_bytes(source.contiguous()), _bytes(target)) for source, target in pairs)
            if range_bytes is not None:
                copy_into_ranges(batches(flat, range_bytes))
                self._stream.synchronize()
                return
            self._buffers = self._buffers or [
                PinnedBuffer(self._buffer_bytes, self._stream) for _ in range(_NUM_BUFFERS)
            ]
            copy_through(self._buffers, batches(flat, self._buffer_bytes))


def copy_into_ranges(all_batches: Iterable[Batch]) -> None:
    """Starts to copy to registered memory, of which each batch fills a range: no copy may cross two."""
    for source, target in chain.from_iterable(all_batches):
        target.copy_(source, non_blocking=True)


def copy_through(buffers: Sequence[PinnedBuffer], all_batches: Iterable[Batch]) -> None:
    filling: deque[tuple[PinnedBuffer, Batch]] = deque()
    for buffer, batch in zip(cycle(buffers), all_batches, strict=False):
        if len(filling) == len(buffers):
            _take(*filling.popleft())
        buffer.fill([source for source, _ in batch])
        filling.append((buffer, batch))
    for buffer, batch in filling:
        _take(buffer, batch)


def _take(buffer: PinnedBuffer, batch: Batch) -> None:
    """Copies the batch with which the buffer was filled to its targets."""
    buffer.wait()
    targets = [target for _, target in batch]
    for target, place in zip(targets, places(targets, buffer.memory), strict=True):
        target.copy_(place)


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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
