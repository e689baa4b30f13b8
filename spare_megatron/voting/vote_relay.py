"""A relay: collects the votes of its block while its leader votes, and passes the next log entry on to the voters."""

import selectors
import socket
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

from spare_megatron.core.log.relays import BlockVotes
from spare_megatron.formats.frames import ConnectionBroken, Frame, FrameKind, Inbox, listen, send_at_once
from spare_megatron.stacking.layout import GroupId, Member

_POLL_S = 0.02
"""Interval between polls of the log while votes are missing."""
_STRANGERS = 16
"""Connections that are accepted beyond those of the block, from peers that have not voted yet; more are turned away."""


@dataclass(slots=True)
class _Client:
    """One connection; its member is known from the first frame on."""

    inbox: Inbox
    member: Member | None = None


class VoteRelay:
    """The relay of one leader, driven by its calls. It has no thread: between calls, frames wait in its sockets.

    It listens on a free port of the IP address `host`, for a block of at most `fan_in` groups.
    """

    def __init__(self, host: str, fan_in: int) -> None:
        self._listener, self.address = listen(host, fan_in + _STRANGERS)
        self._listener.setblocking(False)
        self._most_clients = fan_in + _STRANGERS
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._absent: frozenset[Member] = frozenset()
        self._entry_receivers: Set[Member] = frozenset()

    def collect(self, votes: BlockVotes, timeout_s: float, is_decided: Callable[[], bool]) -> None:
        """Collects votes until none worth waiting for is missing; sends CLOSED to clients whose votes it does not have.

        Members missing after `timeout_s` are not waited for again until they send something. `is_decided`, polled
        meanwhile, says whether the log makes votes unnecessary; it removes fenced members from those missing.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            # Members that are not waited for may have voted nevertheless.
            left_s = 0.0 if votes.missing <= self._absent else max(end_s - time.monotonic(), 0.0)
            if not self._handle_ready(votes, min(left_s, _POLL_S)) and (not left_s or is_decided()):
                break
            if time.monotonic() >= end_s:
                self._handle_all_ready(votes)
                break
        self._absent |= votes.missing
        self._entry_receivers = votes.entry_receivers
        closed = Frame(FrameKind.CLOSED, votes.attempt).packed(self.address.token)
        for connection, client in list(self._clients.items()):
            if client.member not in self._entry_receivers:
                self._send(connection, closed)

    def pass_on(self, index: int, entry: str) -> None:
        """Sends the log entry at the index to the members whose votes the last `collect` took."""
        data = Frame(FrameKind.ENTRY, index, content=entry.encode()).packed(self.address.token)
        for connection, client in list(self._clients.items()):
            if client.member in self._entry_receivers:
                self._send(connection, data)

    def close(self) -> None:
        for connection in (self._listener, *self._clients):
            connection.close()
        self._selector.close()

    def _handle_all_ready(self, votes: BlockVotes) -> None:
        """Takes votes that arrived in time but were not polled. Bounded: without free descriptors a listener is ready
        forever.
        """
        for _ in range(self._most_clients + 1):
            if not self._handle_ready(votes, 0.0):
                return

    def _handle_ready(self, votes: BlockVotes, timeout_s: float) -> bool:
        """Handles what arrives within this time; False if nothing does."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._receive(key.fileobj, votes)
        return bool(ready)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the client has left already
        if len(self._clients) >= self._most_clients:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[connection] = _Client(Inbox(self.address.token))
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket, votes: BlockVotes) -> None:
        client = self._clients[connection]
        try:
            for frame in client.inbox.receive(connection):
                group, incarnation = frame.pair
                client.member = Member(GroupId(group), incarnation)
                if client.member in self._absent:
                    self._absent -= {client.member}
                if frame.kind is FrameKind.VOTE:
                    votes.add_vote(frame.number, client.member, str(frame.content, "utf-8"))
        except ConnectionBroken:
            self._drop(connection)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        try:
            send_at_once(connection, data)
        except ConnectionBroken:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        client = self._clients.pop(connection)
        if client.member is not None:
            self._absent |= {client.member}
        self._selector.unregister(connection)
        connection.close()
