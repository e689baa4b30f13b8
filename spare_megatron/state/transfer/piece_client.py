"""Fetches pieces of state from a rank of another group."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from spare_megatron.formats import frames
from spare_megatron.formats.pieces import Piece


class PieceClient:
    """A connection to one piece server, for one thread; waits `timeout_s` for each piece.

    `connect_timeout_s` (default timeout_s) limits connection and greeting. `is_over`, polled every `frames.LOOK_S`,
    ends every wait for a server that is lost. Raises TurnedAway if the server is busy, ConnectionBroken if none answers
    or it is over.
    """

    def __init__(
        self,
        address: frames.Address,
        timeout_s: float,
        *,
        connect_timeout_s: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        greeted_within_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._connection = frames.connect(address, greeted_within_s, is_over)
        try:
            nonce = memoryview(bytearray(frames.NONCE_BYTES))
            if not frames.receive(self._connection, nonce, greeted_within_s, may_end=True, is_over=is_over):
                raise frames.TurnedAway(f"{address.host} has no free connection")
        except frames.ConnectionBroken:
            self.close()
            raise
        self._channel = frames.Channel(self._connection, address.token, bytes(nonce), is_over)
        self._timeout_s = timeout_s

    def fetch(self, name: str, step: int, piece: Piece, into: memoryview | None = None) -> memoryview:
        """The piece of the state of this name and step, in memory of its own or `into` memory of its size.

        Raises `WrongStep`, `NotOffered` or `ConnectionBroken`; what is in that memory then is not the piece.
        """
        self._ask(name, step, piece)
        content = memoryview(bytearray(piece.size)) if into is None else into
        self._await_answer(name, content)
        return content

    def fetch_each(
        self, name: str, step: int, pieces: Iterable[Piece], room: Callable[[int], memoryview]
    ) -> Iterator[Piece]:
        """Fetches pieces in order, each into `room(size)`, and yields each; the server prepares a piece while the one
        before is used. Unless all are taken, this client can only be closed.
        """
        asked: Piece | None = None
        for piece in chain(pieces, (None,)):
            if piece is not None:
                self._ask(name, step, piece)
            if asked is not None:
                self._await_answer(name, room(asked.size))
                yield asked
            asked = piece

    def _ask(self, name: str, step: int, piece: Piece) -> None:
        self._channel.send(
            frames.Frame(frames.FrameKind.PIECE_WANTED, step, piece, name.encode("ascii")), self._timeout_s
        )

    def _await_answer(self, name: str, into: memoryview) -> None:
        """Fills `into` with the next piece that was asked for, one of the state of this name."""
        answer = self._channel.receive(into, self._timeout_s)
        if answer.kind is frames.FrameKind.WRONG_STEP:
            raise frames.WrongStep(answer.number)
        if answer.kind is frames.FrameKind.NOT_OFFERED:
            raise frames.NotOffered(f"{name} is not offered")
        if answer.kind is not frames.FrameKind.PIECE or len(answer.content) != len(into):
            raise frames.ConnectionBroken("an answer to another request")

    def close(self) -> None:
        self._connection.close()
