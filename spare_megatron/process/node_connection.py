"""The connection between the driver and a supervisor on another machine. Its address and secret key are in a file of
the run's directory that only its owner can read. HMAC proves the key; what follows is neither signed nor encrypted.
"""

import contextlib
import os
import socket
import struct
import time
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from spare_megatron.formats.codec import decode, encode
from spare_megatron.formats.frames import Address, listen

_STRANGER_S = 10
"""Longest time for a peer to prove that it has the key."""
_SILENT_S = 10
"""A side that acknowledges nothing for so long is gone: a machine without power closes no connection."""
_POLL_S = 0.5


class Listener:
    """Listens for the supervisor of one node at `host`, and publishes the address in the run's directory."""

    def __init__(self, run_dir: Path, node: int, host: str) -> None:
        self._file = _file(run_dir, node)
        self._socket, address = listen(host)
        self._key = bytes.fromhex(address.token)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as stream:
            stream.write(encode(address))
        new.rename(self._file)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Readable when a peer connects."""
        return self._socket.fileno()

    def accept(self) -> Connection | None:
        """The authenticated connection of a peer; None if it lacks the key or has left."""
        try:
            knocking, _ = self._socket.accept()
        except OSError:  # it has left
            return None
        connection = _connection(knocking)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except (OSError, EOFError, ValueError, AssertionError, ProcessError):
            connection.close()
            return None
        _wait_for_ever(connection)
        return connection

    def close(self) -> None:
        self._socket.close()
        self._file.unlink(missing_ok=True)


def connect(run_dir: Path, node: int, timeout_s: float) -> Connection:
    """A supervisor's connection to the driver; raises ValueError if no driver listens for this node within the time."""
    file = _file(run_dir, node)
    end_s = time.monotonic() + timeout_s
    reason = "no driver has written it"
    while True:
        try:
            address = decode(file.read_text(), Address)
        except FileNotFoundError:
            address = None
        except (OSError, ValueError) as error:  # shared storage may lose a file that is being replaced
            address, reason = None, f"it cannot be read: {error}"
        if address is not None:
            try:
                connection = _connection(socket.create_connection((address.host, address.port), timeout=_STRANGER_S))
                key = bytes.fromhex(address.token)
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                _wait_for_ever(connection)
                return connection
            except (OSError, EOFError, ProcessError) as error:
                reason = f"{address.host}:{address.port} does not answer: {error}"
        if time.monotonic() >= end_s:
            raise ValueError(
                f"node {node} is not awaited by a driver ({file}): {reason}; start `spare train` (or "
                f"`spare doctor`, `spare replay`) with this directory on the first node, on storage that they share"
            )
        time.sleep(_POLL_S)


def _file(run_dir: Path, node: int) -> Path:
    return run_dir / "nodes" / f"node-{node:04d}.json"


def _connection(connected: socket.socket) -> Connection:
    """Limits how long the proof of the other side is waited for, and its silence."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STRANGER_S, 0))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S // 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_S // 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)
    return Connection(connected.detach())


def _wait_for_ever(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
