"""The wire format between a leader and the relay of its block: a head, a text and an HMAC-SHA-256 of both under the
relay's token, which the control store holds. Only readers of the run's store are believed, and damage is detected.
There is no nonce: votes and entries are written once, so a replayed message says nothing new.
"""

import hashlib
import hmac
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("!BqiiI")
_MAC_BYTES = 32
_MOST_TEXT_BYTES = 16 * 2**20
_READ_BYTES = 2**16


class RelayBroken(Exception):
    """The other side is gone, takes nothing or is not authenticated, or the data is damaged."""


class Kind(IntEnum):
    VOTE = 0
    """To the relay: the vote of the group and the incarnation on the attempt of this number."""
    CLOSED = 1
    """From the relay: votes on the attempt of this number are not taken any more, or never were."""
    ENTRY = 2
    """From the relay: the log entry of this number."""


_KINDS = {int(kind): kind for kind in Kind}


class Message(NamedTuple):
    kind: Kind
    number: int
    text: str = ""
    group: int = 0
    incarnation: int = 0


def pack(message: Message, token: str) -> bytes:
    text = message.text.encode()
    signed = _HEAD.pack(message.kind, message.number, message.group, message.incarnation, len(text)) + text
    return signed + hmac.digest(bytes.fromhex(token), signed, hashlib.sha256)


class Inbox:
    """Assembles the messages that come over one connection to or from the relay with this token."""

    def __init__(self, token: str) -> None:
        self._key = bytes.fromhex(token)
        self._bytes = b""

    def receive(self, connection: socket.socket) -> Iterator[Message]:
        """Reads once, without blocking; yields complete messages. RelayBroken: closed, or a message is invalid."""
        try:
            some = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return  # there is no complete message left
        except OSError as error:
            raise RelayBroken(str(error)) from error
        if not some:
            raise RelayBroken("the other side has closed the connection")
        self._bytes += some
        while (message := self._next_message()) is not None:
            yield message

    def _next_message(self) -> Message | None:
        if len(self._bytes) < _HEAD.size:
            return None
        kind, number, group, incarnation, num_bytes = _HEAD.unpack_from(self._bytes)
        if num_bytes > _MOST_TEXT_BYTES or kind not in _KINDS:
            raise RelayBroken("a stranger's message")
        end = _HEAD.size + num_bytes
        if len(self._bytes) < end + _MAC_BYTES:
            return None
        signed, mac = self._bytes[:end], self._bytes[end : end + _MAC_BYTES]
        self._bytes = self._bytes[end + _MAC_BYTES :]
        if not hmac.compare_digest(mac, hmac.digest(self._key, signed, hashlib.sha256)):
            raise RelayBroken("a message is damaged, or a stranger's")
        return Message(_KINDS[kind], number, signed[_HEAD.size :].decode(), group, incarnation)


def send(connection: socket.socket, data: bytes) -> None:
    """Sends over a non-blocking connection. Raises RelayBroken if the peer is gone or has taken nothing for long."""
    try:
        num_sent = connection.send(data)
    except OSError as error:
        raise RelayBroken(str(error)) from error
    if num_sent < len(data):
        raise RelayBroken("the other side takes nothing")
