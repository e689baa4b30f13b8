"""A leader's connection to the relay of its block."""

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.formats.frames import Address, ConnectionBroken, Frame, FrameKind, Inbox, connect, send_at_once
from spare_megatron.stacking.layout import Member

RETRY_ATTEMPTS = 100
"""A relay that is unreachable or does not pass entries on is not used for this many attempts."""


@dataclass
class RelayLink:
    """A member's connection to its current relay, opened with the first vote and again when the relay changes. `find`:
    the address that a relay has published. Waits `timeout_s` at most from the sending of a vote.
    """

    member: Member
    find: Callable[[Member], Address | None]
    timeout_s: float
    _relay: Member | None = None
    _connection: socket.socket | None = None
    _inbox: Inbox = field(default_factory=lambda: Inbox(""))
    _token: str = ""
    _retry_at: int = 0  # number of an attempt
    _entries: dict[int, str] = field(default_factory=dict)
    _last_entry: int = -1
    _waited_for: int = -1  # index of an entry that did not come in time
    _end_s: float = 0.0

    def send(self, relay: Member, attempt: int, vote: str, head: int) -> bool:
        """Sends a vote; False if the relay is unreachable, declines it, or has failed to pass entries on lately."""
        self._end_s = time.monotonic() + self.timeout_s
        if relay != self._relay:
            self.close()
            self._relay, self._retry_at = relay, 0
        if attempt < self._retry_at:
            return False
        try:
            connection = self._connection or self._connect(relay)
            is_closed = False
            while _has_come(connection, 0.0):
                is_closed |= attempt in self._receive(connection)
            if self._last_entry < self._waited_for:
                raise ConnectionBroken("it has not passed an entry on")
            if not is_closed:
                frame = Frame(FrameKind.VOTE, attempt, self.member, vote.encode())
                send_at_once(connection, frame.packed(self._token))
        except ConnectionBroken:
            self._give_up(attempt + RETRY_ATTEMPTS)
            return False
        self._entries = {index: entry for index, entry in self._entries.items() if index >= head}
        return not is_closed

    def await_entry(self, index: int, attempt: int) -> str:
        """The log entry at the index, as passed on by the relay.

        Empty if the connection breaks, the entry comes too late after the vote, or the relay declines the vote.
        """
        while index not in self._entries and self._connection is not None and self._last_entry < index:
            # Even past the deadline: an entry that has arrived need not be read from the store.
            if not _has_come(self._connection, max(self._end_s - time.monotonic(), 0.0)):
                self._waited_for = index
                return ""
            try:
                if attempt in self._receive(self._connection):
                    return ""
            except ConnectionBroken:
                self._give_up(0)
        return self._entries.get(index, "")

    def close(self) -> None:
        self._give_up(0)

    def _connect(self, relay: Member) -> socket.socket:
        address = self.find(relay)
        if address is None:
            raise ConnectionBroken("it has published no address")
        connection = connect(address, self.timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._inbox, self._token = connection, Inbox(address.token), address.token
        return connection

    def _receive(self, connection: socket.socket) -> list[int]:
        """Receives what has arrived; returns the attempts on which the relay declines votes."""
        closed = []
        for frame in self._inbox.receive(connection):
            if frame.kind is FrameKind.ENTRY:
                self._entries[frame.number] = str(frame.content, "utf-8")
                self._last_entry = max(self._last_entry, frame.number)
            elif frame.kind is FrameKind.CLOSED:
                closed.append(frame.number)
                self._waited_for = -1  # the relay owes no entry
        return closed

    def _give_up(self, retry_at: int) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._retry_at = retry_at
        self._last_entry = self._waited_for = -1


def _has_come(connection: socket.socket, timeout_s: float) -> bool:
    """Whether the connection is readable: data has arrived, or the other side has closed it."""
    poll = select.poll()  # a rank may have more descriptors open than select takes
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
