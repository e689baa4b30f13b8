"""Authenticated frames on a socket: a head of fixed size, an HMAC-SHA-256, and the content.

The key is the server's token, which the control store holds beside its address. So only readers of the run's store are
served and believed, and damaged bytes are detected. A nonce under the HMAC ties frames to one connection and to their
order in it. Votes and log entries have none: they are written once, so a repeated one says nothing new.
"""

import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

NONCE_BYTES = 32
LOOK_S = 0.05
"""Interval at which a waiting side checks whether it still needs to wait: a machine without power says nothing."""

_HEAD = struct.Struct("!BqqqI")  # kind, numbers, bytes of content
_MAC_BYTES = 32
_MOST_TEXT_BYTES = 16 * 2**20
_READ_BYTES = 2**16


class ConnectionBroken(Exception):
    """The other side is gone, silent, takes nothing or is not authenticated, or the data is damaged."""


class TurnedAway(ConnectionBroken):
    """The server already serves as many clients as it may."""


class WrongStep(Exception):
    """The server's state is that of `present` committed steps, not of the requested number."""

    def __init__(self, present: int) -> None:
        super().__init__(f"the state there is that of {present} steps")
        self.present = present


class NotOffered(Exception):
    """The server has no state of this name, or not this range of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """IP address and TCP port of a server, and the secret token (hex) that its clients need."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        host, port, token = text.split(" ")
        return cls(host=host, port=int(port), token=token)


def listen(host: str, most_waiting: int | None = None) -> tuple[socket.socket, Address]:
    """A server's socket on a free port of an IP address of this machine, and the address that its clients need.
    `most_waiting`: connections that may wait to be accepted; None leaves it to the kernel.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=most_waiting)
    return listener, Address(host=host, port=listener.getsockname()[1], token=secrets.token_hex(32))


def connect(address: Address, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> socket.socket:
    """A non-blocking connection to the server. ConnectionBroken: there is none in time, or `is_over`."""
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
        raise ConnectionBroken(f"no connection to {address.host}: {error}") from error
    return connection


def _await_connection(connection: socket.socket, timeout_s: float, is_over: Callable[[], bool]) -> None:
    """Waits until the connection stands or has failed. Raises `TimeoutError` if it is late or over."""
    ready = select.poll()
    ready.register(connection, select.POLLOUT)
    end_s = time.monotonic() + timeout_s
    while not ready.poll(1000.0 * min(LOOK_S, max(end_s - time.monotonic(), 0.0))):
        if is_over():
            raise TimeoutError("it is not waited for any longer")
        if time.monotonic() >= end_s:
            raise TimeoutError(f"none within {timeout_s:g} s")


class FrameKind(IntEnum):
    """What a frame says; below each kind: who gets it, its number, its pair of numbers, and its content."""

    VOTE = 0
    """A relay: attempt; group and incarnation; the vote."""
    CLOSED = 1
    """A voter: attempt, on which votes are not taken any more, or never were."""
    ENTRY = 2
    """A voter: index; -; the log entry."""
    PIECE_WANTED = 3
    """A piece server: step; start and stop; the name of the state."""
    PIECE = 4
    """Its client: step; start and stop; the bytes."""
    WRONG_STEP = 5
    """Its client: step of the state that is there."""
    NOT_OFFERED = 6
    """Its client: there is no state of this name, or not this range of it."""


class Frame(NamedTuple):
    kind: FrameKind
    number: int = 0
    pair: tuple[int, int] = (0, 0)
    content: bytes | memoryview = b""

    def packed(self, token: str) -> bytes:
        """The whole frame, without a nonce."""
        return self.sealed_head(bytes.fromhex(token)) + self.content

    def sealed_head(self, key: bytes, nonce: bytes = b"") -> bytes:
        """Head and HMAC, which go before the content."""
        head = _HEAD.pack(self.kind, self.number, *self.pair, len(self.content))
        return head + _mac(key, nonce, head, self.content)


_PREFIX_BYTES = _HEAD.size + _MAC_BYTES
_KINDS = {int(kind): kind for kind in FrameKind}


def _size_in(prefix: bytes | memoryview, most_bytes: int) -> int:
    """Bytes of the content that follows."""
    num_bytes: int = _HEAD.unpack_from(prefix)[-1]
    if num_bytes > most_bytes:
        raise ConnectionBroken(f"a frame of {num_bytes} bytes is a stranger's, or none of at most {most_bytes}")
    return num_bytes


def _opened(prefix: bytes | memoryview, content: bytes | memoryview, key: bytes, nonce: bytes = b"") -> Frame:
    head, mac = prefix[: _HEAD.size], prefix[_HEAD.size :]
    kind, number, first, second, _ = _HEAD.unpack(head)
    if kind not in _KINDS or not hmac.compare_digest(mac, _mac(key, nonce, head, content)):
        raise ConnectionBroken("a frame is damaged, or a stranger's")
    return Frame(_KINDS[kind], number, (first, second), content)


def _mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()


class Inbox:
    """Assembles the frames that come over one non-blocking connection under this token, without a nonce."""

    def __init__(self, token: str) -> None:
        self._key = bytes.fromhex(token)
        self._bytes = b""

    def receive(self, connection: socket.socket) -> Iterator[Frame]:
        """Reads once; yields complete frames. ConnectionBroken: closed, or a frame is invalid."""
        try:
            some = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return  # there is no complete frame left
        except OSError as error:
            raise ConnectionBroken(str(error)) from error
        if not some:
            raise ConnectionBroken("the other side has closed the connection")
        self._bytes += some
        while len(self._bytes) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + _size_in(self._bytes, _MOST_TEXT_BYTES)
            if len(self._bytes) < end:
                return
            prefix, content = self._bytes[:_PREFIX_BYTES], self._bytes[_PREFIX_BYTES:end]
            self._bytes = self._bytes[end:]
            yield _opened(prefix, content, self._key)


def send_at_once(connection: socket.socket, data: bytes) -> None:
    """Sends over a non-blocking connection. ConnectionBroken: the other side is gone, or has taken nothing for long."""
    try:
        num_sent = connection.send(data)
    except OSError as error:
        raise ConnectionBroken(str(error)) from error
    if num_sent < len(data):
        raise ConnectionBroken("the other side takes nothing")


class Channel:
    """One end of a connection on which frames are waited for; every wait sets the connection's timeout anew.

    The HMAC of each frame covers the server's greeting, a nonce, and the frame's number in its direction: none can be
    repeated, left out or moved. `is_over` is as in `receive`.
    """

    def __init__(
        self, connection: socket.socket, token: str, nonce: bytes, is_over: Callable[[], bool] | None = None
    ) -> None:
        self._connection = connection
        self._key = bytes.fromhex(token)
        self._nonce = nonce
        self._is_over = is_over
        self._num_sent = self._num_received = 0

    def send(self, frame: Frame, timeout_s: float) -> None:
        """Raises ConnectionBroken if the other side does not take the frame in time."""
        head = frame.sealed_head(self._key, self._nonce + self._num_sent.to_bytes(8))
        self._num_sent += 1
        try:
            self._connection.settimeout(timeout_s)
            # Held back until the content comes: two small segments would cost a delayed acknowledgement.
            self._connection.sendall(head, socket.MSG_MORE if len(frame.content) else 0)
            self._connection.sendall(frame.content)
        except OSError as error:
            raise ConnectionBroken(f"the other side takes nothing: {error}") from error

    def receive(self, into: memoryview, timeout_s: float) -> Frame:
        """The next frame, its content at the start of `into`, which limits its size. ConnectionBroken: none has come
        within timeout_s, or it is not valid.
        """
        prefix = memoryview(bytearray(_PREFIX_BYTES))
        receive(self._connection, prefix, timeout_s, is_over=self._is_over)
        content = into[: _size_in(prefix, len(into))]
        receive(self._connection, content, timeout_s, is_over=self._is_over)
        frame = _opened(prefix, content, self._key, self._nonce + self._num_received.to_bytes(8))
        self._num_received += 1
        return frame


def receive(
    connection: socket.socket,
    into: memoryview,
    timeout_s: float,
    *,
    may_end: bool = False,
    is_over: Callable[[], bool] | None = None,
) -> bool:
    """Fills `into` within timeout_s; False if the other side may end the connection (`may_end`) and has, before the
    first byte. While nothing comes, `is_over` is asked every LOOK_S whether the bytes are no longer needed.
    ConnectionBroken: they have not come in time, never will, or are no longer needed.
    """
    end_s = time.monotonic() + timeout_s
    num_received = 0
    while num_received < len(into):
        left_s = end_s - time.monotonic()
        try:
            # 0 would make the socket non-blocking.
            connection.settimeout(max(left_s if is_over is None else min(left_s, LOOK_S), 1e-6))
            some = connection.recv_into(into[num_received:])
        except TimeoutError as error:
            if is_over is not None and is_over():
                raise ConnectionBroken("the other side is not waited for any longer") from error
            if time.monotonic() < end_s:
                continue
            raise ConnectionBroken(f"{len(into) - num_received} bytes have not come within {timeout_s:g} s") from error
        except OSError as error:
            raise ConnectionBroken(f"nothing comes: {error}") from error
        if not some:
            if may_end and not num_received:
                return False
            raise ConnectionBroken("the other side has closed the connection")
        num_received += some
    return True
