"""Copies to host memory through a few buffers: which bytes go where, whatever a device does when."""

import mmap
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.gradients import host_copies
from spare_megatron.mcore.gradients.host_copies import (
    HostCopies,
    PieceWriter,
    PinnedBuffer,
    ReadAhead,
    TensorBytes,
    batches,
    copy_into_ranges,
    copy_through,
    places,
)
from spare_megatron.mcore.state import OutgoingState, StateCopy


class StandIn:
    """Stands in for pinned memory: copies are made at the first moment that a device may make them, or at the last.

    All buffers of a stream have `stream` in common: its copies are made in their order.
    """

    def __init__(self, num_bytes: int, stream: list[Callable[[], None]], *, is_late: bool) -> None:
        self.memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        self._stream, self._is_late = stream, is_late
        self._last = 0
        self._num_made = 0

    def fill(self, sources: Sequence[Tensor]) -> None:
        self._do(list(places(sources, self.memory)), list(sources))

    def empty(self, targets: Sequence[Tensor]) -> None:
        self._do(list(targets), list(places(targets, self.memory)))

    def _do(self, to: list[Tensor], of: list[Tensor]) -> None:
        assert sum(part.numel() for part in of) <= self.memory.numel()

        def copy() -> None:
            for target, source in zip(to, of, strict=True):
                target.copy_(source)

        self._stream.append(copy)
        self._last = len(self._stream)
        if not self._is_late:
            self.wait()

    def wait(self) -> None:
        for number in range(self._last):
            self._stream[number]()
            self._stream[number] = lambda: None


def stand_ins(num: int, num_bytes: int, *, is_late: bool) -> list[PinnedBuffer]:
    stream: list[Callable[[], None]] = []
    return [cast(PinnedBuffer, StandIn(num_bytes, stream, is_late=is_late)) for _ in range(num)]


def content_of(sizes: Sequence[int]) -> tuple[TensorBytes, list[Tensor]]:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    return TensorBytes(tensors), tensors


def pieces(num_bytes: int, size: int) -> list[Piece]:
    return [Piece(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=8),
    num_bytes=st.integers(1, 64),
    num_buffers=st.integers(1, 3),
    is_late=st.booleans(),
)
def test_all_bytes_come_to_their_places_in_batches_that_fit(
    sizes: list[int], num_bytes: int, num_buffers: int, *, is_late: bool
) -> None:
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    cut = list(batches(zip(sources, targets, strict=True), num_bytes))
    assert all(sum(source.numel() for source, _ in batch) == num_bytes for batch in cut[:-1])
    assert all(0 < sum(source.numel() for source, _ in batch) <= num_bytes for batch in cut[-1:])
    copy_through(stand_ins(num_buffers, num_bytes, is_late=is_late), cut)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


class RecordedCopies(HostCopies):
    """Stands in for copies of a GPU: what is registered in ranges is written as the device would."""

    crossed: int

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: object, range_bytes: int | None = None) -> None:
        assert range_bytes is not None
        flat = list(pairs)
        start = flat[0][1].data_ptr()
        cut = list(batches(flat, range_bytes))
        offsets = [(to.data_ptr() - start, to.numel()) for batch in cut for _, to in batch]
        self.crossed = sum(first // range_bytes != (first + size - 1) // range_bytes for first, size in offsets)
        copy_into_ranges(cut)


@given(sizes=SIZES, range_bytes=st.integers(1, 64), num_head=st.integers(0, 70))
def test_a_state_comes_whole_into_registered_memory_and_no_copy_crosses_two_ranges(
    sizes: list[int], range_bytes: int, num_head: int
) -> None:
    content, tensors = content_of(sizes)
    copies, description = RecordedCopies(torch.device("cpu")), secrets.token_bytes(num_head)
    copy = StateCopy(OutgoingState(description=description, tensors=content), copies)
    memory = mmap.mmap(-1, 4096)
    copy.write(memory, range_bytes)
    assert memory[: copy.num_bytes] == num_head.to_bytes(8) + description + torch.cat(tensors).numpy().tobytes()
    assert memory[copy.num_bytes :] == bytes(4096 - copy.num_bytes)
    assert copies.crossed == 0


@given(sizes=SIZES, size=st.integers(1, 64), is_late=st.booleans(), data=st.data())
def test_a_piece_that_is_read_stays_until_the_next_whatever_the_order(
    sizes: list[int], size: int, data: st.DataObject, *, is_late: bool
) -> None:
    """In order, as a client asks; from anywhere, as one does that comes back."""
    content, tensors = content_of(sizes)
    whole = torch.cat(tensors).numpy().tobytes()
    in_order = pieces(content.num_bytes, size)
    ahead = ReadAhead(stand_ins(2, size, is_late=is_late))
    jumps = data.draw(st.lists(st.sampled_from(in_order), max_size=4)) if in_order else []
    for piece in [*in_order, *jumps, *in_order]:
        found = ahead.read(content, piece)
        assert found.tobytes() == whole[piece.start : piece.stop]


def test_the_following_piece_is_on_its_way_while_one_is_in_use() -> None:
    content, _ = content_of([40])
    started: list[Sequence[Tensor]] = []
    buffers = stand_ins(2, 16, is_late=True)
    for buffer in buffers:
        buffer.fill = lambda sources, fill=buffer.fill: (started.append(sources), fill(sources))  # type: ignore[method-assign, misc]
    ahead = ReadAhead(buffers)
    for number, piece in enumerate(pieces(40, 16)):
        ahead.read(content, piece)
        assert len(started) == min(number + 2, 3)


@given(sizes=SIZES, size=st.integers(1, 64), kind=st.sampled_from(["early", "late", "none"]))
def test_pieces_are_written_to_their_places_and_none_is_overwritten_before_it_is_there(
    sizes: list[int], size: int, kind: str
) -> None:
    content, tensors = content_of(sizes)
    expected = secrets.token_bytes(content.num_bytes)
    buffers = [] if kind == "none" else stand_ins(2, size, is_late=kind == "late")
    writer = PieceWriter(content, buffers)
    for piece in pieces(content.num_bytes, size):
        writer.room(piece.size)[:] = expected[piece.start : piece.stop]
        writer.write(piece)
    writer.wait()
    assert torch.cat(tensors).numpy().tobytes() == expected


def test_a_broken_transfer_leaves_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are freed then, and their memory is another's."""
    content, (tensor,) = content_of([8])
    buffers = stand_ins(2, 8, is_late=True)
    monkeypatch.setattr(host_copies, "_pinned_buffers", lambda *_: buffers)
    content._gpu = torch.device("cpu"), None  # type: ignore[assignment]

    def receive() -> None:
        with content.writing() as writer:
            writer.room(8)[:] = b"received"
            writer.write(Piece(0, 8))
            raise ConnectionError

    with pytest.raises(ConnectionError):
        receive()
    assert tensor.numpy().tobytes() == b"received"


@pytest.mark.parametrize(
    "source", [torch.arange(6.0).view(2, 3).T, torch.tensor(3.0), torch.ones(0, dtype=torch.int64)]
)
def test_where_nothing_is_to_be_waited_for_values_are_copied_at_once(source: Tensor) -> None:
    copies = HostCopies(torch.device("cpu"))
    target = torch.empty(source.shape, dtype=source.dtype)
    copies.copy([(source, target)], copies.now())
    assert torch.equal(source, target)
