"""The state that a rank lets others read: whole pieces of one step, never while it changes."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from spare_megatron.formats.piece_frames import NotOffered, WrongStep
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.optimizer.stacked_optimizer import PieceState, StackedOptimizer
from spare_megatron.stacking.layout import PartitionId


class Content(Protocol):
    """State that is read in pieces."""

    num_bytes: int

    def read(self, piece: Piece) -> bytes | memoryview:
        """The bytes of the piece, until the thread's next call. Raises `NotOffered` if they are not here now."""


class StateSource:
    """The state of one rank between two updates; a `piece_server.Source`. `always` is readable after every update."""

    def __init__(self, always: Mapping[str, Content] | None = None) -> None:
        self._always = always or {}
        self._lock = threading.Lock()
        self._step = 0
        self._offered: dict[str, Content] = {}

    def offer(self, step: int, contents: Mapping[str, Content]) -> None:
        """Offers these contents, the state after `step` committed steps, until it changes."""
        with self._lock:
            self._step = step
            self._offered = dict(contents)

    @contextlib.contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """Blocks readers inside the block, after which the state is that after `step` committed steps.

        Entering waits for pieces that are being read, and withdraws what was offered.
        """
        with self._lock:
            self._offered = {}
            yield
            self._step = step

    def read(self, name: str, step: int, piece: Piece) -> bytes | memoryview:
        with self._lock:
            if step != self._step:
                raise WrongStep(self._step)
            content = self._offered.get(name) or self._always.get(name)
            if content is None or piece.stop > content.num_bytes:
                raise NotOffered(f"{name}: {piece}")
            return content.read(piece)


class PartitionContent:
    """The state of one partition; a `Content`. Its pieces are the optimizer's, and only whole ones are read."""

    def __init__(self, optimizer: StackedOptimizer, number: PartitionId) -> None:
        self._optimizer = optimizer
        self._number = number
        self.num_bytes = optimizer.partitions.length(number) * optimizer.element_bytes

    @property
    def name(self) -> str:
        return f"slice-{self._number}"

    @property
    def num_pieces(self) -> int:
        return self._optimizer.partitions.num_pieces(self._number)

    def piece(self, index: int) -> Piece:
        """The byte range of one of its pieces."""
        place = self._optimizer.partitions.place(self._number, index)
        return Piece(place.start * self._optimizer.element_bytes, place.stop * self._optimizer.element_bytes)

    def read(self, piece: Piece) -> bytes:
        """The bytes of a piece. Raises `NotOffered` if the partition is not hosted here or has no such piece."""
        index = piece.start // self.piece(0).size
        if self._number not in self._optimizer.hosted or piece != self.piece(index):
            raise NotOffered(f"state partition {self._number}, {piece}")
        return self._optimizer.read_piece(self._number, index).data

    def install(self, index: int, step: int, data: bytes) -> bool:
        """Installs a piece as of a step; False, changing nothing, if the state here is of another step."""
        return self._optimizer.install_piece(self._number, index, PieceState(num_updates=step, data=data))


def partition_contents(optimizer: StackedOptimizer) -> list[PartitionContent]:
    """All state partitions by number, hosted here or not."""
    return [PartitionContent(optimizer, PartitionId(number)) for number in range(optimizer.partitions.num_partitions)]
