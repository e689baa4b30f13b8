"""The connection between the driver and a supervisor on another machine.

Where the driver listens, and the key without which nobody is served, stand in a file of the run's directory that its
owner alone can read. Both sides prove that they have the key (HMAC); what follows is neither signed nor encrypted.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

_STRANGER_S = 10
"""How long somebody who connects may take to prove that he has the key."""
_SILENT_S = 10
"""A side that acknowledges nothing for so long is gone: a machine without power closes no connection."""
_POLL_S = 0.5


class Listener:
    """Where one supervisor is awaited.

    Args:
        run_dir: The run's directory, which the supervisor's machine shares.
        node: The supervisor's node.
        host: The address of this machine that the other one reaches.
    """

    def __init__(self, run_dir: Path, node: int, host: str) -> None:
        self._key = secrets.token_bytes(32)
        self._file = _file(run_dir, node)
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        text = json.dumps({"host": host, "port": self._socket.getsockname()[1], "key": self._key.hex()})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
        new.rename(self._file)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Ready when somebody knocks."""
        return self._socket.fileno()

    def accept(self) -> Connection | None:
        """The connection to whoever has knocked; None if he has not the key."""
        try:
            knocking, _ = self._socket.accept()
        except OSError:  # he is gone again
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
        """Nobody is awaited any more."""
        self._socket.close()
        self._file.unlink(missing_ok=True)


def connect(run_dir: Path, node: int, timeout_s: float) -> Connection:
    """A supervisor's connection to the driver of the run.

    Raises:
        ValueError: Nobody awaits this node, or not within the time.
    """
    file = _file(run_dir, node)
    end_s = time.monotonic() + timeout_s
    reason = "no driver has written it"
    while True:
        try:
            place = json.loads(file.read_text())
        except FileNotFoundError:
            place = None
        except OSError as error:  # shared storage may know a file that is replaced meanwhile no more
            place, reason = None, f"it cannot be read: {error}"
        if place is not None:
            try:
                connection = _connection(socket.create_connection((place["host"], place["port"]), timeout=_STRANGER_S))
                key = bytes.fromhex(place["key"])
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                _wait_for_ever(connection)
                return connection
            except (OSError, EOFError, ProcessError) as error:
                reason = f"{place['host']}:{place['port']} does not answer: {error}"
        if time.monotonic() >= end_s:
            raise ValueError(
                f"node {node} is not awaited by a driver ({file}): {reason}; start `spare train` (or "
                f"`spare doctor`) with this directory on the first node, on storage that all nodes share"
            )
        time.sleep(_POLL_S)


def _file(run_dir: Path, node: int) -> Path:
    return run_dir / "nodes" / f"node-{node:04d}.json"


def _connection(connected: socket.socket) -> Connection:
    """With limits: on how long it is waited for the other side's proof, and on its silence."""
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
