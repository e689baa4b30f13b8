"""Fetches pieces of state from a rank of another group."""

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from spare_megatron.formats import piece_frames as wire
from spare_megatron.formats.pieces import Piece


class PieceClient:
    """A connection to one piece server, for one thread; waits `timeout_s` for each piece. `is_over`, polled every
    `wire.LOOK_S`, ends every wait for a lost server. Raises TurnedAway if the server is busy, TransferBroken if none
    answers.
    """

    def __init__(
        self,
        address: wire.Address,
        timeout_s: float,
        *,
        connect_timeout_s: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        greeted_within_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._connection = _connect(address, greeted_within_s, is_over)
        try:
            nonce = bytes(
                wire.receive(self._connection, wire.NONCE_BYTES, greeted_within_s, may_end=True, is_over=is_over)
            )
            if not nonce:
                raise wire.TurnedAway(f"{address.host} has no free connection")
        except wire.TransferBroken:
            self.close()
            raise
        self._channel = wire.Channel(self._connection, address.token, nonce, timeout_s, is_over)

    def fetch(self, name: str, step: int, piece: Piece, into: memoryview | None = None) -> memoryview:
        """The piece, in memory of its own or `into` memory of its size. Raises `WrongStep`, `NotOffered` or
        `TransferBroken`; what is in that memory then is not the piece.
        """
        return self._channel.ask(wire.Request(name=name, step=step, piece=piece), into)

    def fetch_each(
        self, name: str, step: int, pieces: Iterable[Piece], room: Callable[[int], memoryview]
    ) -> Iterator[Piece]:
        """Fetches pieces in order, each into `room(size)`, and yields each; the server prepares a piece while the one
        before is used. Unless all are taken, this client can only be closed.
        """
        asked: wire.Request | None = None
        for piece in chain(pieces, (None,)):
            following = None if piece is None else wire.Request(name=name, step=step, piece=piece)
            if following is not None:
                self._channel.send_request(following)
            if asked is not None:
                self._channel.await_answer(asked, room(asked.piece.size))
                yield asked.piece
            asked = following

    def close(self) -> None:
        self._connection.close()


def _connect(address: wire.Address, timeout_s: float, is_over: Callable[[], bool]) -> socket.socket:
    """A connection to the server. Raises `TransferBroken` if there is none in time, or it is over."""
    connection = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    try:
        connection.setblocking(False)
        error = connection.connect_ex((address.host, address.port))
        if error == errno.EINPROGRESS:
            _await_connection(connection, timeout_s, is_over)
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
    except OSError as error:
        connection.close()
        raise wire.TransferBroken(f"no connection to {address.host}: {error}") from error
    return connection


def _await_connection(connection: socket.socket, timeout_s: float, is_over: Callable[[], bool]) -> None:
    """Waits until the connection stands or has failed. Raises `TimeoutError` if it is late or over."""
    ready = select.poll()
    ready.register(connection, select.POLLOUT)
    end_s = time.monotonic() + timeout_s
    while not ready.poll(1000.0 * min(wire.LOOK_S, max(end_s - time.monotonic(), 0.0))):
        if is_over():
            raise TimeoutError("it is not waited for any longer")
        if time.monotonic() >= end_s:
            raise TimeoutError(f"none within {timeout_s:g} s")
