"""Asks a rank of another group for pieces of its state."""

import contextlib
import socket

from spare_megatron.core.pieces import Piece
from spare_megatron.runtime.wire.piece_wire import (
    NONCE_BYTES,
    Address,
    Channel,
    Request,
    TransferBroken,
    TurnedAway,
    receive,
)


class PieceClient:
    """A connection to one server. For one thread, but for `abort`.

    Args:
        address: The server's.
        timeout_s: Longest wait for each piece.
        connect_timeout_s: Longest wait for the connection, and for the greeting, which is sent at once; as long as for
            a piece if absent.

    Raises:
        TurnedAway: The server has too much to do now.
        TransferBroken: Nobody is there.
    """

    def __init__(self, address: Address, timeout_s: float, *, connect_timeout_s: float | None = None) -> None:
        greeted_within_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        try:
            self._connection = socket.create_connection((address.host, address.port), timeout=greeted_within_s)
        except OSError as error:
            raise TransferBroken(f"no connection to {address.host}: {error}") from error
        try:
            nonce = bytes(receive(self._connection, NONCE_BYTES, greeted_within_s, may_end=True))
            if not nonce:
                raise TurnedAway(f"{address.host} serves as many as it may")
        except TransferBroken:
            self.close()
            raise
        self._channel = Channel(self._connection, address.token, nonce, timeout_s)

    def fetch(self, name: str, step: int, piece: Piece) -> memoryview:
        """The piece of the state of this name, as of this step.

        Raises:
            WrongStep: The state there is of another step.
            NotOffered: It is not to be had there.
            TransferBroken: The connection is of no use any more.
        """
        return self._channel.ask(Request(name=name, step=step, piece=piece))

    def abort(self) -> None:
        """From any thread: ends a fetch that is under way, and every later one."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
