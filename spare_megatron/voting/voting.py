"""How a group's vote gets into the control store, and how the group hears of the decision: by way of a relay or not.

A vote goes to the relay of the group's block, which casts all of them at once, and the next entry of the log comes back
the same way. Whoever hears nothing from its relay casts its vote itself and reads the log itself, so that a relay that
is lost, stopped or slow costs time and nothing else: no more than FALLBACK_INTERVALS of the heartbeat interval, once.
After a loss, too: a relay does not wait for a member whose connection has broken, nor for anybody once the loss stands
in the log. Those who cast votes read them then, and not those who have left that to their relay (`core.relays.Reliance`
tells why that is enough), and only once as many votes are counted as groups are left. Else each of 10,000 groups would
read what hundreds of relays have written, and look in vain for votes that are not cast yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.entries import Entry, decode_entry
from spare_megatron.core.events import VotesRead
from spare_megatron.core.relays import BlockVotes, Reliance
from spare_megatron.core.votes import Vote, encode_vote
from spare_megatron.process.piece_wire import Address
from spare_megatron.stacking.layout import Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreTimeout
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.relay_link import RelayLink
from spare_megatron.voting.vote_relay import VoteRelay

COLLECT_INTERVALS = 1 / 8
"""How long a relay waits for the votes of its block, in heartbeat intervals."""
FALLBACK_INTERVALS = 1 / 4
"""How long the others of the block wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """What a leader needs to vote by way of others, and they by way of it.

    Attributes:
        relay: Where it takes their votes.
        link: To its own relay.
        collect_s: How long the first waits.
    """

    relay: VoteRelay
    link: RelayLink
    collect_s: float


def open_relay(member: Member, store: ControlStore, config: RunConfig) -> RelayParts | None:
    """Lets others vote by way of this leader from now on; None where all groups vote directly.

    Args:
        member: The leader's group, in its incarnation.
        store: The leader's connection.
        config: The run's.
    """
    fan_in, interval_s = config.control.vote_fan_in, config.control.heartbeat_interval_s
    if fan_in == 1 or config.layout.num_groups <= fan_in:
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
    """A group's voice where it votes and hears of decisions.

    Args:
        agreement: The voice otherwise.
        parts: Sockets; None where everybody votes directly, and on ranks that are no leaders.
    """

    def __init__(self, agreement: GroupAgreement, parts: RelayParts | None = None) -> None:
        self.agreement = agreement
        self._member = agreement.member
        self._parts = parts
        self._attempt, self._vote = -1, ""  # the last one
        self._voters: Sequence[Member] = ()
        self._reliance = Reliance(None)
        self._cast_on: list[int] = []  # attempts

    def vote(self, attempt: int, vote: Vote, voters: Sequence[Member]) -> VotesRead | None:
        """Casts the vote, or sends it to the relay; `confirm` is to follow.

        Args:
            attempt: The attempt.
            vote: The group's only vote on it.
            voters: All who vote on it.

        Returns:
            All votes if the last one may be among those cast, for the leader to decide.
        """
        self._attempt, self._vote, self._voters = attempt, encode_vote(vote), voters
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
        """Returns when the next entry has come from the relay, or else when the vote is cast.

        Returns:
            As `vote`.
        """
        if not self._reliance.is_placed or self._told(self.agreement.head):
            return None
        self._reliance = Reliance(None)
        return self._cast({self._member: self._vote})

    def read_votes(self, attempt: int, voters: Sequence[Member], num_left: int) -> VotesRead | None:
        """After a loss, the votes cast so far.

        Args:
            attempt: The attempt.
            voters: Who began it.
            num_left: How many of them are left.

        Returns:
            None if the group's relay reads them, or somebody has yet to vote: who casts the last vote reads after that.
        """
        if self._reliance.is_placed or self.agreement.num_votes(attempt) < num_left:
            return None
        return self.agreement.read_votes(attempt, voters)

    def read_entry(self, index: int) -> Entry:
        """The entry at the index, as soon as it is written.

        Collective over: all ranks of the group.

        Raises:
            StoreTimeout: It was not written within the decision timeout, and it is not for want of votes.
        """
        entry = ""
        if self.agreement.is_leader:
            entry = (self._told(index) if self._reliance.is_placed else "") or self._await_entry(index)
        if self._parts is not None:
            self._parts.relay.pass_on(index, entry)
        read = self.agreement.read_entry(index, entry)
        self._reliance.fold(read)
        return read

    def _await_entry(self, index: int) -> str:
        """The entry. If it does not come in time, who has not voted is put out, and not who waits for that."""
        try:
            return self.agreement.await_entry(index)
        except StoreTimeout as late:
            votes = self.agreement.read_votes(self._attempt, self._voters).votes
            silent = [voter for voter in self._voters if voter.group not in votes]
            reason = f"it has not voted on attempt {self._attempt}: {late}"
            if max((self.agreement.fence(voter, reason, index) for voter in silent), default=-1) < index:
                raise  # nobody, or none but those who were put out before
            return self.agreement.await_entry(index)

    def _told(self, index: int) -> str:
        assert self._parts is not None, "something was relayed"
        return self._parts.link.await_entry(index, self._attempt)

    def _collect(self, block: Sequence[Member], parts: RelayParts) -> Mapping[Member, str]:
        """The votes that the group casts as a relay."""
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
        # Everybody voted on the attempt before this one, so nobody is still reading the votes before that.
        past = [attempt for attempt in self._cast_on if attempt < self._attempt - 1]
        self._cast_on = [*self._cast_on[len(past) :], self._attempt]
        return self.agreement.cast(self._attempt, votes, self._voters, past)
