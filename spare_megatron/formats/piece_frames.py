"""The wire format between a client that asks for pieces of a state and the server that has it.

The server greets with a nonce. A request names a state, a step and a range of bytes; the answer is those bytes, or why
there are none. Both carry an HMAC-SHA-256 under the server's token, which the control store holds beside its address.
So only readers of the run's store are served and believed, and damaged bytes are detected. Messages hold nothing but
numbers, a name and bytes.
"""

import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from spare_megatron.formats.pieces import LARGEST_PIECE_BYTES, Piece

NONCE_BYTES = 32
_MAC_BYTES = 32
_REQUEST = struct.Struct("!32sqQQ")
_ANSWER = struct.Struct("!BqQ")
LOOK_S = 0.05
"""Interval at which a waiting side checks whether it still needs to wait: a machine without power says nothing."""


class WrongStep(Exception):
    """The server's state is that of `present` committed steps, not of the requested number."""

    def __init__(self, present: int) -> None:
        super().__init__(f"the state there is that of {present} steps")
        self.present = present


class NotOffered(Exception):
    """The server has no state of this name, or not this range of it."""


class TransferBroken(Exception):
    """The other side is gone, silent or not authenticated, or the data is damaged."""


class TurnedAway(TransferBroken):
    """The server already serves as many clients as it may."""


class Status(IntEnum):
    PIECE = 0
    WRONG_STEP = 1
    NOT_OFFERED = 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A piece of a state, as of a step. The name has at most 32 ASCII characters."""

    name: str
    step: int
    piece: Piece


class Channel:
    """One end of a connection, after the server's greeting, the nonce. Every wait sets the connection's timeout anew.
    `timeout_s` is the longest wait for a whole request or answer that has begun, and for the other side to take one.
    `is_over` is as in `receive`, while an answer is awaited.
    """

    def __init__(
        self,
        connection: socket.socket,
        token: str,
        nonce: bytes,
        timeout_s: float,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self._connection = connection
        self._key = bytes.fromhex(token)
        self._nonce = nonce
        self._timeout_s = timeout_s
        self._is_over = is_over

    def ask(self, request: Request, into: memoryview | None = None) -> memoryview:
        """Client: the bytes of a piece, in `into` if given. WrongStep, NotOffered: refused. TransferBroken: no valid
        answer has come.
        """
        self.send_request(request)
        return self.await_answer(request, into)

    def send_request(self, request: Request) -> None:
        """Client: the first half of `ask`; several may be sent before their answers are taken, in the same order."""
        head = _packed(request)
        self._send(head + self._mac(head))

    def await_answer(self, request: Request, into: memoryview | None = None) -> memoryview:
        """Client: the second half of `ask`."""
        head = _packed(request)
        answer = receive(self._connection, _ANSWER.size + _MAC_BYTES, self._timeout_s, is_over=self._is_over)
        status, step, num_bytes = _ANSWER.unpack_from(answer)
        if num_bytes not in (0, request.piece.size):
            raise TransferBroken("an answer to another request")
        content = receive(
            self._connection, num_bytes, self._timeout_s, is_over=self._is_over, into=into if num_bytes else None
        )
        if not hmac.compare_digest(answer[_ANSWER.size :], self._mac(head, answer[: _ANSWER.size], content)):
            raise TransferBroken("an answer is damaged, or a stranger's")
        if status == Status.WRONG_STEP:
            raise WrongStep(step)
        if status != Status.PIECE or num_bytes != request.piece.size:
            raise NotOffered(f"{request.name} is not offered")
        return content

    def next_request(self, idle_s: float) -> tuple[Request, bytes] | None:
        """Server: the next request, and the bytes to sign the answer with; None if the client has left. TransferBroken:
        the client was silent for `idle_s` seconds, or its request is not authentic or no piece.
        """
        head = receive(self._connection, _REQUEST.size + _MAC_BYTES, idle_s, may_end=True)
        if not head:
            return None
        signed = bytes(head[: _REQUEST.size])
        if not hmac.compare_digest(head[_REQUEST.size :], self._mac(signed)):
            raise TransferBroken("a stranger asks")
        name, step, start, stop = _REQUEST.unpack(signed)
        if not 0 < stop - start <= LARGEST_PIECE_BYTES:
            raise TransferBroken(f"a range of {stop - start} bytes is no piece of at most {LARGEST_PIECE_BYTES}")
        return Request(name=name.rstrip(b"\0").decode("ascii"), step=step, piece=Piece(start, stop)), signed

    def answer(self, signed: bytes, status: Status, step: int, content: bytes | memoryview = b"") -> None:
        """Server: answers the request. Raises TransferBroken if the client does not take the answer."""
        head = _ANSWER.pack(status, step, len(content))
        self._send(head + self._mac(signed, head, content))
        self._send(content)

    def _mac(self, *parts: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, self._nonce, hashlib.sha256)
        for part in parts:
            mac.update(part)
        return mac.digest()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._connection.settimeout(self._timeout_s)
            self._connection.sendall(data)
        except OSError as error:
            raise TransferBroken(f"the other side takes nothing: {error}") from error


def _packed(request: Request) -> bytes:
    return _REQUEST.pack(request.name.encode("ascii"), request.step, *request.piece)


def receive(
    connection: socket.socket,
    num_bytes: int,
    timeout_s: float,
    *,
    may_end: bool = False,
    is_over: Callable[[], bool] | None = None,
    into: memoryview | None = None,
) -> memoryview:
    """Receives num_bytes within timeout_s (in `into` if given), or none where the other side may end the connection
    (`may_end`) and has. While nothing comes, `is_over` is asked every LOOK_S whether the bytes are no longer needed.
    TransferBroken: they have not come in time, never will, or are no longer needed.
    """
    data = memoryview(bytearray(num_bytes)) if into is None else into
    end_s = time.monotonic() + timeout_s
    num_received = 0
    while num_received < num_bytes:
        left_s = end_s - time.monotonic()
        try:
            # 0 would make the socket non-blocking.
            connection.settimeout(max(left_s if is_over is None else min(left_s, LOOK_S), 1e-6))
            some = connection.recv_into(data[num_received:])
        except TimeoutError as error:
            if is_over is not None and is_over():
                raise TransferBroken("the other side is not waited for any longer") from error
            if time.monotonic() < end_s:
                continue
            raise TransferBroken(f"{num_bytes - num_received} bytes have not come within {timeout_s:g} s") from error
        except OSError as error:
            raise TransferBroken(f"nothing comes: {error}") from error
        if not some:
            if may_end and not num_received:
                return data[:0]
            raise TransferBroken("the other side has closed the connection")
        num_received += some
    return data
