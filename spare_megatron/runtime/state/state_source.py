"""What a rank lets others read of its state: whole pieces of one step, never one that is changing."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from spare_megatron.core.pieces import Piece
from spare_megatron.runtime.wire.piece_wire import NotOffered, WrongStep


class Content(Protocol):
    """Something to be read in pieces."""

    num_bytes: int

    def read(self, piece: Piece) -> bytes:
        """The bytes of the piece.

        Raises:
            NotOffered: It is not here now.
        """


class StateSource:
    """The state of one rank between two updates; a `piece_server.Source`.

    Args:
        always: What may be read after every update.
    """

    def __init__(self, always: Mapping[str, Content] | None = None) -> None:
        self._always = always or {}
        self._lock = threading.Lock()
        self._step = 0
        self._offered: dict[str, Content] = {}

    def offer(self, step: int, contents: Mapping[str, Content]) -> None:
        """Lets these be read, which are the state after this many steps, until it changes."""
        with self._lock:
            self._step = step
            self._offered = dict(contents)

    @contextlib.contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """Inside the block nobody reads, and after it the state is that after this many steps.

        It is entered as soon as the pieces have been copied that are being read.
        """
        with self._lock:
            self._offered = {}
            yield
            self._step = step

    def read(self, name: str, step: int, piece: Piece) -> bytes:
        with self._lock:
            if step != self._step:
                raise WrongStep(self._step)
            content = self._offered.get(name) or self._always.get(name)
            if content is None or piece.stop > content.num_bytes:
                raise NotOffered(f"{name}: {piece}")
            return content.read(piece)
