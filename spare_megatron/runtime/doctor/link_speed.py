"""How fast bytes go from one node to another over TCP: bounded in bytes and in time."""

import hmac
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from spare_megatron.config.node_facts import Rate

_KEY_BYTES = 32
_PIECE = bytes(1 << 20)
_MOST_PIECES = 64
_MOST_S = 1.0
_SILENT_S = 10.0
_COUNT = struct.Struct(">Q")


class Sink:
    """Takes bytes from whoever has the key, and tells him how many have come.

    Args:
        host: The address to listen on.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(_KEY_BYTES)
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                sender, _ = self._socket.accept()
            except OSError:  # closed
                return
            with sender, suppress(OSError):
                sender.settimeout(_SILENT_S)
                if hmac.compare_digest(_received(sender, _KEY_BYTES), self.key):
                    sender.sendall(_COUNT.pack(_drained(sender)))


def send_speed(host: str, port: int, key: bytes) -> Rate:
    """How fast up to 64 MiB go to the sink there, in a second or little more."""
    try:
        with socket.create_connection((host, port), timeout=_SILENT_S) as receiver:
            receiver.sendall(key)
            num_bytes, began_s = 0, time.monotonic()
            while num_bytes < _MOST_PIECES * len(_PIECE) and time.monotonic() - began_s < _MOST_S:
                receiver.sendall(_PIECE)
                num_bytes += len(_PIECE)
            receiver.shutdown(socket.SHUT_WR)
            count = _received(receiver, _COUNT.size)
            took_s = time.monotonic() - began_s
    except OSError as error:
        return Rate(failure=f"{host}:{port}: {error.strerror or error}")
    if count != _COUNT.pack(num_bytes):
        return Rate(failure=f"{host}:{port}: what was sent has not come whole")
    return Rate(bytes_per_s=num_bytes / took_s)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or fewer if there are no more."""
    text = b""
    while len(text) < num_bytes and (piece := connection.recv(num_bytes - len(text))):
        text += piece
    return text


def _drained(connection: socket.socket) -> int:
    buffer, num_bytes = bytearray(1 << 20), 0
    while count := connection.recv_into(buffer):
        num_bytes += count
    return num_bytes
