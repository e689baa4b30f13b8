"""A relay: takes the votes of its block in while it casts its own, and passes on what the log says."""

import secrets
import selectors
import socket
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

from spare_megatron.core.relays import BlockVotes
from spare_megatron.process.piece_wire import Address
from spare_megatron.process.vote_wire import Inbox, Kind, Message, RelayBroken, pack, send
from spare_megatron.stacking.layout import GroupId, Member

_LOOK_S = 0.02
"""Between two looks at the log while votes are missing."""
_STRANGERS = 16
"""Connections of whoever has not voted yet beside those of the block; more are turned away."""


@dataclass(slots=True)
class _Client:
    """One connection: of a member of the block, as soon as it has voted."""

    inbox: Inbox
    member: Member | None = None


class VoteRelay:
    """The relay of one leader, which it calls. It has no thread: what comes at other times waits in its sockets.

    Args:
        host: IP address of this machine to listen on; the port is a free one.
        fan_in: Most groups of a block.
    """

    def __init__(self, host: str, fan_in: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=fan_in + _STRANGERS)
        self._listener.setblocking(False)
        self.address = Address(host=host, port=self._listener.getsockname()[1], token=secrets.token_hex(32))
        self._most_clients = fan_in + _STRANGERS
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._absent: frozenset[Member] = frozenset()
        self._told: Set[Member] = frozenset()

    def collect(self, votes: BlockVotes, timeout_s: float, is_decided: Callable[[], bool]) -> None:
        """Takes votes in until all are there for which it pays to wait, and tells the others not to wait for this.

        Args:
            votes: Where they go.
            timeout_s: Longest wait. Nobody waits again for a member that was missing then, until it says something.
            is_decided: Whether the log says something after which nobody needs these votes. Asked while some are
                missing; who is lost meanwhile is not among them any more.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            # Who is not waited for may have come nevertheless.
            left_s = 0.0 if votes.missing <= self._absent else max(end_s - time.monotonic(), 0.0)
            if not self._serve(votes, min(left_s, _LOOK_S)) and (not left_s or is_decided()):
                break
            if time.monotonic() >= end_s:
                self._take_what_has_come(votes)
                break
        self._absent |= votes.missing
        self._told = votes.told
        closed = pack(Message(Kind.CLOSED, votes.attempt), self.address.token)
        for connection, client in list(self._clients.items()):
            if client.member not in self._told:
                self._send(connection, closed)

    def pass_on(self, index: int, entry: str) -> None:
        """Tells those whose votes have been taken last what stands in the log at the index."""
        data = pack(Message(Kind.ENTRY, index, entry), self.address.token)
        for connection, client in list(self._clients.items()):
            if client.member in self._told:
                self._send(connection, data)

    def close(self) -> None:
        """Lets go of everybody."""
        for connection in (self._listener, *self._clients):
            connection.close()
        self._selector.close()

    def _take_what_has_come(self, votes: BlockVotes) -> None:
        """However late the relay itself looks: on a busy machine the time may be over before it has looked once.

        Each look lets one in. There is an end to them: without descriptors left a listener stays ready for good.
        """
        for _ in range(self._most_clients + 1):
            if not self._serve(votes, 0.0):
                return

    def _serve(self, votes: BlockVotes, timeout_s: float) -> bool:
        """Takes in what comes within this time; False if nothing does."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj, votes)
        return bool(ready)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has left already
        if len(self._clients) >= self._most_clients:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[connection] = _Client(Inbox(self.address.token))
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket, votes: BlockVotes) -> None:
        client = self._clients[connection]
        try:
            for message in client.inbox.receive(connection):
                client.member = Member(GroupId(message.group), message.incarnation)
                if client.member in self._absent:
                    self._absent -= {client.member}
                if message.kind is Kind.VOTE:
                    votes.take(message.number, client.member, message.text)
        except RelayBroken:
            self._drop(connection)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        try:
            send(connection, data)
        except RelayBroken:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        client = self._clients.pop(connection)
        if client.member is not None:
            self._absent |= {client.member}
        self._selector.unregister(connection)
        connection.close()
