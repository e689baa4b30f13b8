"""The groups of a benchmark that vote by way of relays, hundreds in one event loop.

They say and hear on the wire what a leader does; only the loop around it differs. A thread for each would spend most of
its time on switching to the next, and on a cluster every leader has a processor of its own.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.open_store import open_store
from spare_megatron.control.spec import StoreSpec
from spare_megatron.core.messages import decode_entry
from spare_megatron.core.relays import Blocks
from spare_megatron.core.topology import Member
from spare_megatron.core.votes import Vote, encode_vote
from spare_megatron.runtime.wire.piece_wire import Address
from spare_megatron.runtime.wire.vote_wire import Inbox, Kind, Message, pack, send


@dataclass(slots=True, kw_only=True)
class _Voter:
    """One group's leader, which has voted on as many attempts as it has heard decisions, and one more."""

    member: Member
    connection: socket.socket
    token: str
    inbox: Inbox
    num_heard: int = 0
    voted_at_s: float = 0.0
    decide_s: list[float] = field(default_factory=list)

    def vote(self, vote: Vote) -> None:
        """On the next attempt."""
        self.voted_at_s = time.monotonic()
        group, incarnation = self.member
        message = Message(Kind.VOTE, self.num_heard, encode_vote(vote), int(group), incarnation)
        send(self.connection, pack(message, self.token))

    def hear(self) -> bool:
        """Takes in what has come; whether it is a decision."""
        has_decision = False
        for message in self.inbox.receive(self.connection):
            assert message.kind is Kind.ENTRY, "the relay has not waited for this vote"
            assert message.number == self.num_heard
            decode_entry(message.text)
            self.decide_s.append(time.monotonic() - self.voted_at_s)
            self.num_heard += 1
            has_decision = True
        return has_decision


def run_crowd(spec: StoreSpec, members: Sequence[Member], blocks: Blocks, num_decisions: int) -> list[list[float]]:
    """Votes on one attempt after the other, each of these members as soon as it has heard of the last decision.

    Args:
        spec: The store in which relays, which are up, have said where they are.
        members: None of them a relay.
        blocks: Of all voters.
        num_decisions: Attempts.

    Returns:
        Of each member the seconds from each vote until it heard the decision.
    """
    log = DecisionLog(open_store(spec))
    relays = {member: blocks.relay_of(member) for member in members}
    addresses = {relay: _address_of(log, relay) for relay in set(relays.values())}
    selector = selectors.DefaultSelector()
    voters = [_connect(member, addresses[relays[member]], selector) for member in members]
    vote = Vote(is_complete=True, plan_digest="0" * 64)
    for voter in voters:
        voter.vote(vote)
    num_left = len(voters)
    while num_left:
        for key, _ in selector.select():
            voter = key.data
            if not voter.hear():
                continue
            if voter.num_heard < num_decisions:
                voter.vote(vote)
            else:
                selector.unregister(voter.connection)
                num_left -= 1
    return [voter.decide_s for voter in voters]


def _address_of(log: DecisionLog, relay: Member) -> Address:
    text = log.relay(relay)
    assert text is not None, "relays are up before anybody votes"
    return Address.parse(text)


def _connect(member: Member, address: Address, selector: selectors.BaseSelector) -> _Voter:
    connection = socket.create_connection((address.host, address.port), timeout=60.0)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    voter = _Voter(member=member, connection=connection, token=address.token, inbox=Inbox(address.token))
    selector.register(connection, selectors.EVENT_READ, voter)
    return voter
