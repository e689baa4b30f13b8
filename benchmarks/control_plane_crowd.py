"""The groups of a benchmark that vote by way of relays, thousands in one event loop.

They send and receive what a leader does; only the loop around it differs, and what is the same for all is
encoded and decoded once. A thread for each would spend most of its time on switching to the next, and on a cluster
every leader has a processor of its own. Whoever its relay does not
vote for is a thread until the attempt is decided: it casts its vote itself and waits at the store.
"""

import heapq
import queue
import selectors
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

from benchmarks.control_plane_leader import LOST, EpochChange, Leader, Roster, vote_on
from spare_megatron.core.log.entries import Entry, decode_entry
from spare_megatron.formats.codec import encode, set_fields
from spare_megatron.formats.frames import Address, Frame, FrameKind, Inbox, send_at_once
from spare_megatron.stacking.layout import Member
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog, ask_interval_s
from spare_megatron.store.interface import read_values
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec


@lru_cache
def _vote_text(is_complete: bool) -> str:
    """Once for all of a process, which on a cluster have a processor each; likewise the next."""
    return encode(set_fields(vote_on(is_complete=is_complete)))


@lru_cache(maxsize=16)
def _entry(text: str) -> Entry:
    return decode_entry(text)


@dataclass(slots=True, kw_only=True)
class _Voter:
    """One group's leader and its connection to its relay."""

    leader: Leader
    connection: socket.socket
    token: str
    inbox: Inbox
    is_complete: bool = True
    is_relayed: bool = False  # has voted, and waits for its relay
    closed: int = -1  # the last attempt for which its relay has reported that it does not vote
    voted_at_s: float = 0.0
    decide_s: list[float] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        """Whether its relay does not vote for it on this attempt."""
        return self.closed == self.leader.attempt

    def send(self) -> None:
        """Votes by way of its relay."""
        frame = Frame(FrameKind.VOTE, self.leader.attempt, self.leader.member, _vote_text(self.is_complete).encode())
        send_at_once(self.connection, frame.packed(self.token))
        self.is_relayed = True

    def receive(self) -> bool:
        """Reads what has come; whether the attempt is decided."""
        is_decided = False
        for frame in self.inbox.receive(self.connection):
            if frame.kind is FrameKind.CLOSED:
                self.closed = frame.number
            elif self.is_relayed and frame.number == self.leader.index:
                # If it is a loss, its relay, which is not lost, reads the votes.
                is_decided = self.leader.receive(_entry(str(frame.content, "utf-8")))
                self.is_relayed = not is_decided
        return is_decided


class Crowd:
    """Groups of one process.

    Args:
        spec: The store in which relays, which are up, have written their addresses.
        members: None of them a relay.
        roster: Of all voters.
    """

    def __init__(self, spec: StoreSpec, members: Sequence[Member], roster: Roster) -> None:
        log, blocks = DecisionLog(open_store(spec)), roster.blocks(roster.all)
        relays = {member: blocks.relay_of(member) for member in members}
        addresses = {relay: _address_of(log, relay) for relay in set(relays.values())}
        self._selector = selectors.DefaultSelector()
        self._ask_interval_s = ask_interval_s(len(roster.all))
        self._voters = []
        for member in members:
            leader = Leader(spec, member, roster, uses_relays=False)
            self._voters.append(_connect(leader, addresses[relays[member]], self._selector))
        self._alone: queue.SimpleQueue[tuple[_Voter, Future[float]]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._pool = ThreadPoolExecutor(len(members))

    def commit(self, num_decisions: int) -> list[list[float]]:
        """Votes on one attempt after the other, each group as soon as it has read the last decision.

        Returns:
            Of each the seconds from each vote until it read the decision.
        """
        for voter in self._voters:
            self._vote(voter)
        self._run(self._voters[0].leader.attempt + num_decisions, [])
        return [voter.decide_s for voter in self._voters]

    def change_epoch(self) -> list[EpochChange]:
        """A loss in a reduction, which groups see in the log alone. Returns what each group has seen."""
        for voter in [voter for voter in self._voters if voter.leader.member == LOST]:
            self._selector.unregister(voter.connection)
            voter.connection.close()
            self._voters.remove(voter)
        now_s = time.monotonic()
        asks = [(now_s + voter.leader.first_ask_s(), number) for number, voter in enumerate(self._voters)]
        heapq.heapify(asks)
        return self._run(self._voters[0].leader.attempt + 2, asks)

    def _run(self, end: int, asks: list[tuple[float, int]]) -> list[EpochChange]:
        """Goes on until all have read the decision of the attempt before this one."""
        seen: list[EpochChange] = []
        while len(seen) < len(self._voters):
            self._ask(asks)
            wait_s = max(asks[0][0] - time.monotonic(), 0.0) if asks else None
            for key, _ in self._selector.select(wait_s):
                for voter in self._taken_back() if key.data is None else self._decided(key.data):
                    voter.decide_s.append(time.monotonic() - voter.voted_at_s)
                    voter.is_complete = True
                    if voter.leader.attempt < end:
                        self._vote(voter)
                    else:
                        seen.append(voter.leader.changed())
        return seen

    def _ask(self, asks: list[tuple[float, int]]) -> None:
        """Those whose turn it is look at the log, and vote as soon as they find something there."""
        while asks and asks[0][0] <= time.monotonic():
            voter = self._voters[asks[0][1]]
            if voter.leader.sees_loss():
                heapq.heappop(asks)
                voter.is_complete = False
                self._vote(voter)
            else:
                heapq.heapreplace(asks, (time.monotonic() + self._ask_interval_s, asks[0][1]))

    def _vote(self, voter: _Voter) -> None:
        voter.voted_at_s = time.monotonic()
        self._vote_alone(voter) if voter.is_closed else voter.send()

    def _vote_alone(self, voter: _Voter) -> None:
        future = self._pool.submit(voter.leader.decide, is_complete=voter.is_complete)
        future.add_done_callback(lambda future: self._give_back(voter, future))

    def _give_back(self, voter: _Voter, future: "Future[float]") -> None:
        self._alone.put((voter, future))
        self._waker.send(b"1")

    def _taken_back(self) -> list[_Voter]:
        """One that has read the decision by itself."""
        self._woken.recv(1)
        voter, future = self._alone.get()
        future.result()
        return [voter]

    def _decided(self, voter: _Voter) -> list[_Voter]:
        """The group, if its relay has passed on the decision."""
        if voter.receive():
            return [voter]
        if voter.is_relayed and voter.is_closed:
            voter.is_relayed = False
            self._vote_alone(voter)
        return []


def _address_of(log: DecisionLog, relay: Member) -> Address:
    (address,) = read_values(log.store, [keys.relay(relay)], Address)
    assert address is not None, "relays are up before anybody votes"
    return address


def _connect(leader: Leader, address: Address, selector: selectors.BaseSelector) -> _Voter:
    connection = socket.create_connection((address.host, address.port), timeout=60.0)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    voter = _Voter(leader=leader, connection=connection, token=address.token, inbox=Inbox(address.token))
    selector.register(connection, selectors.EVENT_READ, voter)
    return voter
