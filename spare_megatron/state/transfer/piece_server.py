"""Serves pieces of this rank's state to ranks of other groups, in threads beside the training."""

import contextlib
import secrets
import socket
import threading
import time
from typing import Protocol

from spare_megatron.formats import piece_frames as wire
from spare_megatron.formats.pieces import Piece

MOST_CONNECTIONS = 64
"""Connections at a time; more are turned away. A rank is the donor of a few others."""
_PAUSE_S = 0.05
"""After a failed accept: file descriptors may be available again."""
_IDLE_S = 60.0
"""A client that requests nothing for this long is dropped."""


class Source(Protocol):
    """The state that is served. Several threads read it."""

    def read(self, name: str, step: int, piece: Piece) -> bytes | memoryview:
        """The piece, until the thread's next call. Raises `WrongStep`, or `NotOffered` for an unknown name or range."""


class PieceServer:
    """The server of one rank, on a free port, in daemon threads. `timeout_s`: longest wait for a client to take an
    answer.
    """

    def __init__(self, host: str, source: Source, timeout_s: float, most_connections: int = MOST_CONNECTIONS) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=most_connections)
        self.address = wire.Address(host=host, port=self._listener.getsockname()[1], token=secrets.token_hex(32))
        self._source = source
        self._timeout_s = timeout_s
        self._most_connections = most_connections
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._serving: list[threading.Thread] = []  # some may have closed their connection, and be about to end
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept, name="pieces", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """Ends all transfers under way; returns when no thread is left."""
        with self._lock:
            self._is_closed = True
            open_now, serving = set(self._connections), self._serving
        for connection in (self._listener, *open_now):
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._accepting, *serving):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the client has left already, there are no descriptors left, or it is closed
                with self._lock:
                    if self._is_closed:
                        return
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if self._is_closed or len(self._connections) == self._most_connections:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve_client, args=(connection,), name="pieces", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # there is no memory for a thread now
                    connection.close()
                    continue
                self._connections.add(connection)
                self._serving = [other for other in self._serving if other.is_alive()] + [thread]

    def _serve_client(self, connection: socket.socket) -> None:
        try:
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            connection.settimeout(self._timeout_s)
            connection.sendall(nonce)
            channel = wire.Channel(connection, self.address.token, nonce, self._timeout_s)
            while (asked := channel.next_request(_IDLE_S)) is not None:
                self._answer(channel, *asked)
        except (wire.TransferBroken, OSError):
            pass  # its client will see that it is closed
        finally:
            with self._lock:
                self._connections.remove(connection)
            connection.close()

    def _answer(self, channel: wire.Channel, request: wire.Request, signed: bytes) -> None:
        try:
            content = self._source.read(request.name, request.step, request.piece)
        except wire.WrongStep as error:
            channel.answer(signed, wire.Status.WRONG_STEP, error.present)
        except wire.NotOffered:
            channel.answer(signed, wire.Status.NOT_OFFERED, request.step)
        else:
            channel.answer(signed, wire.Status.PIECE, request.step, content)
