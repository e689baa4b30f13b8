"""Casts a group's vote and reads the decision, by way of a relay or directly.

A relay casts its block's votes with one write and passes the next log entry back. A group that hears nothing in time
casts its vote and reads the log itself: a lost relay costs at most FALLBACK_INTERVALS heartbeat intervals, once. After
a loss only groups that cast votes read them (`core.log.relays.Reliance` says why that suffices).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.config.schema import ControlConfig
from spare_megatron.core.controller.decision import fence_silent_voters
from spare_megatron.core.log.entries import Entry, decode_entry
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.relays import BlockVotes, Reliance
from spare_megatron.core.log.votes import Vote
from spare_megatron.formats.codec import encode, set_fields
from spare_megatron.formats.piece_frames import Address
from spare_megatron.stacking.layout import Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreTimeout
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.relay_link import RelayLink
from spare_megatron.voting.vote_relay import VoteRelay

COLLECT_INTERVALS = 1 / 8
"""How long a relay waits for the votes of its block, in heartbeat intervals."""
FALLBACK_INTERVALS = 1 / 4
"""How long the others of the block wait for the relay, in heartbeat intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """A leader's relay connections; its relay waits for votes for `collect_s` seconds at most."""

    relay: VoteRelay
    link: RelayLink
    collect_s: float


def open_relay(member: Member, store: ControlStore, control: ControlConfig, num_groups: int) -> RelayParts | None:
    """Opens and publishes the relay of this leader; None where all groups vote directly."""
    fan_in, interval_s = control.vote_fan_in, control.heartbeat_interval_s
    if fan_in == 1 or num_groups <= fan_in:
        return None
    log = DecisionLog(store)

    def find(other: Member) -> Address | None:
        text = log.relay(other)
        return None if text is None else Address.parse(text)

    relay = VoteRelay(store.local_host(), fan_in)
    log.publish_relay(member, str(relay.address))
    link = RelayLink(member, find, FALLBACK_INTERVALS * interval_s)
    return RelayParts(relay=relay, link=link, collect_s=COLLECT_INTERVALS * interval_s)


class Voting:
    """A group's votes and decisions; no `parts` where all groups vote directly, and on ranks that are not leaders."""

    def __init__(self, agreement: GroupAgreement, parts: RelayParts | None = None) -> None:
        self.agreement = agreement
        self._member = agreement.member
        self._parts = parts
        self._attempt, self._vote = -1, ""  # the last one
        self._voters: Sequence[Member] = ()
        self._reliance = Reliance(None)
        self._cast_on: list[int] = []  # attempts

    def vote(self, attempt: int, vote: Vote, voters: Sequence[Member]) -> VotesRead | None:
        """Leader: casts the group's only vote on the attempt, or sends it to the relay; `confirm` must follow.

        Returns all votes if the last one may be among those cast, for the leader to decide.
        """
        self._attempt, self._vote, self._voters = attempt, encode(set_fields(vote)), voters
        blocks = self.agreement.blocks(voters)
        relay = blocks.relay_of(self._member)
        block, parts = blocks.block_of(relay), self._parts
        self._reliance = Reliance(None)
        if parts is not None and len(block) > 1:
            if relay == self._member:
                return self._cast(self._collect(block, parts))
            if parts.link.send(relay, attempt, self._vote, self.agreement.head):
                self._reliance = Reliance(relay)
                return None
        return self._cast({self._member: self._vote})

    def confirm(self) -> VotesRead | None:
        """Waits for the next entry from the relay; casts the vote directly if it does not come. Returns as `vote`."""
        if not self._reliance.is_placed or self._relayed_entry(self.agreement.head):
            return None
        self._reliance = Reliance(None)
        return self._cast({self._member: self._vote})

    def read_votes(self, attempt: int, voters: Sequence[Member], num_left: int) -> VotesRead | None:
        """After a loss, the votes cast so far; `num_left` of the voters that began the attempt are left.

        None if the group's relay reads them, or if a vote is still missing: the group that casts it reads them all.
        """
        if self._reliance.is_placed or self.agreement.num_votes(attempt) < num_left:
            return None
        return self.agreement.read_votes(attempt, voters)

    def read_entry(self, index: int) -> Entry:
        """The entry at the index, as soon as it is written; a relay passes it on.

        Collective over: all ranks of the group. Raises StoreTimeout after the decision timeout, if no vote was missing.
        """
        entry = ""
        if self.agreement.is_leader:
            entry = (self._relayed_entry(index) if self._reliance.is_placed else "") or self._await_entry(index)
        if self._parts is not None:
            self._parts.relay.pass_on(index, entry)
        read = self.agreement.read_entry(index, entry)
        self._reliance.fold(read)
        return read

    def _await_entry(self, index: int) -> str:
        """Waits for the entry. On timeout it writes the fences of silent voters and returns the entry then."""
        try:
            return self.agreement.await_entry(index)
        except StoreTimeout as late:
            votes = self.agreement.read_votes(self._attempt, self._voters).votes
            fences = fence_silent_voters(self._attempt, self._voters, votes, str(late))
            written = [self.agreement.fence(Member(f.group, f.incarnation), f.reason, index) for f in fences]
            if max(written, default=-1) < index:
                raise  # no vote is missing, or only those of groups fenced before
            return self.agreement.await_entry(index)

    def _relayed_entry(self, index: int) -> str:
        assert self._parts is not None, "something was relayed"
        return self._parts.link.await_entry(index, self._attempt)

    def _collect(self, block: Sequence[Member], parts: RelayParts) -> Mapping[Member, str]:
        votes = BlockVotes(self._attempt, block, self._member, self._vote)
        index = self.agreement.head

        def is_decided() -> bool:
            nonlocal index
            while self.agreement.is_written(index):
                if votes.fold(decode_entry(self.agreement.await_entry(index))):
                    return True
                index += 1
            return False

        parts.relay.collect(votes, parts.collect_s, is_decided)
        return votes.votes

    def _cast(self, votes: Mapping[Member, str]) -> VotesRead | None:
        # All groups voted on the attempt before this one, so the votes before that are not read any more.
        past = [attempt for attempt in self._cast_on if attempt < self._attempt - 1]
        self._cast_on = [*self._cast_on[len(past) :], self._attempt]
        return self.agreement.cast(self._attempt, votes, self._voters, past)
