"""The state that a rank lets others read: whole pieces of one step, never while it changes."""

import contextlib
import threading
from collections.abc import Iterator, Mapping

from spare_megatron.formats.frames import NotOffered, WrongStep
from spare_megatron.formats.pieces import Piece
from spare_megatron.state.optimizer_state import Content


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
        """Blocks readers inside the block, after which the state is that after `step` committed steps. Waits for pieces
        that are being read, and withdraws what was offered.
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
