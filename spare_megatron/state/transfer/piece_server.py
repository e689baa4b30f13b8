"""Serves pieces of this rank's state to ranks of other groups, in threads beside the training."""

import contextlib
import secrets
import socket
import threading
import time
from typing import Protocol

from spare_megatron.formats import frames
from spare_megatron.formats.pieces import LARGEST_PIECE_BYTES, Piece

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
        self._listener, self.address = frames.listen(host, most_connections)
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
            nonce = secrets.token_bytes(frames.NONCE_BYTES)
            connection.settimeout(self._timeout_s)
            connection.sendall(nonce)
            channel = frames.Channel(connection, self.address.token, nonce)
            name = memoryview(bytearray(32))  # the longest name of a state
            while True:
                channel.send(self._answer(channel.receive(name, _IDLE_S)), self._timeout_s)
        except (frames.ConnectionBroken, OSError):
            pass  # the client has left, or will see that it is closed
        finally:
            with self._lock:
                self._connections.remove(connection)
            connection.close()

    def _answer(self, asked: frames.Frame) -> frames.Frame:
        piece = Piece(*asked.pair)
        if asked.kind is not frames.FrameKind.PIECE_WANTED or not 0 < piece.size <= LARGEST_PIECE_BYTES:
            raise frames.ConnectionBroken(f"{piece} is no piece of at most {LARGEST_PIECE_BYTES} bytes")
        try:
            content = self._source.read(str(asked.content, "ascii"), asked.number, piece)
        except frames.WrongStep as error:
            return frames.Frame(frames.FrameKind.WRONG_STEP, error.present)
        except frames.NotOffered:
            return frames.Frame(frames.FrameKind.NOT_OFFERED)
        return frames.Frame(frames.FrameKind.PIECE, asked.number, asked.pair, content)
