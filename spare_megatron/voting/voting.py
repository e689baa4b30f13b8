"""A group's votes on attempts and its part in the log: it casts, reads the votes of all, appends and reads entries. A
relay casts its block's votes with one write and passes the next entry back; a lost relay costs at most
FALLBACK_INTERVALS heartbeat intervals, once. After a loss only groups that cast votes read them
(`core.log.relays.Reliance`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.config.schema import ControlConfig
from spare_megatron.core.controller.decision import fence_silent_voters
from spare_megatron.core.log import actions
from spare_megatron.core.log.entries import Entry, decode_entry
from spare_megatron.core.log.events import HostsRead, VotesRead
from spare_megatron.core.log.relays import BlockVotes, Reliance
from spare_megatron.core.log.votes import Digests, Vote
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.codec import encode, set_fields
from spare_megatron.formats.frames import Address
from spare_megatron.journal.records import Record, VoteRecord, digest_of_work
from spare_megatron.mcore.model.probe import Probe
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.store import keys
from spare_megatron.store.decision_log import poll_interval_s
from spare_megatron.store.interface import ControlStore, StoreTimeout, read_values, write_value
from spare_megatron.voting.agreement import TURN_S, GroupAgreement
from spare_megatron.voting.relay_link import RelayLink
from spare_megatron.voting.vote_relay import VoteRelay

COLLECT_INTERVALS = 1 / 8
"""How long a relay waits for the votes of its block, in heartbeat intervals."""
FALLBACK_INTERVALS = 1 / 4
"""How long the others of the block wait for the relay, in heartbeat intervals."""

Attempt = (
    actions.AttemptReduce
    | actions.AttemptEvaluation
    | actions.AttemptSync
    | actions.AttemptFinish
    | actions.AttemptUndo
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """A leader's relay connections; its relay waits for votes for `collect_s` seconds at most."""

    relay: VoteRelay
    link: RelayLink
    collect_s: float


def plain_vote(action: Attempt, digests: Digests, *, lacks_params: bool) -> Vote:
    """A vote that carries digests of state alone. `lacks_params`: some parameters are those of an earlier step."""
    return Vote(
        is_complete=not lacks_params,
        plan_digest=action.plan_digest,
        params_digest=digests.params,
        lacks_params=lacks_params,
        partition_digests=digests.partitions,
        state_digest=digests.state,
        copied_from=digests.copied_from,
    )


def open_relay(member: Member, store: ControlStore, control: ControlConfig, num_groups: int) -> RelayParts | None:
    """Opens and publishes the relay of this leader; None where all groups vote directly."""
    fan_in, interval_s = control.vote_fan_in, control.heartbeat_interval_s
    if fan_in == 1 or num_groups <= fan_in:
        return None
    relay = VoteRelay(store.local_host(), fan_in)
    write_value(store, keys.relay(member), relay.address)
    link = RelayLink(
        member, lambda other: read_values(store, [keys.relay(other)], Address)[0], FALLBACK_INTERVALS * interval_s
    )
    return RelayParts(relay=relay, link=link, collect_s=COLLECT_INTERVALS * interval_s)


class Voting:
    """A group's votes and decisions; no `parts` where all groups vote directly, and on ranks that are not leaders.

    `head` returns the index of the next entry to read, `write` journals a record.
    """

    def __init__(
        self,
        agreement: GroupAgreement,
        parts: RelayParts | None,
        *,
        head: Callable[[], int],
        write: Callable[[Record], None],
        probe: Probe,
    ) -> None:
        self.agreement = agreement
        self._member = agreement.member
        self._parts = parts
        self._head, self._write, self._probe = head, write, probe
        self._attempt, self._vote = -1, ""  # the last one
        self._voters: Sequence[Member] = ()
        self._reliance = Reliance(None)
        self._cast_on: list[int] = []  # attempts
        self._pause_epoch = -1
        self._have_waited: set[GroupId] = set()  # in that epoch
        self._since_s = 0.0
        self._reported: tuple[Member, ...] = ()

    # ----------------------------------------------------------------------------------------------- actions of a rank

    def cast(
        self, action: Attempt, vote: Vote, computed: Sequence[Microbatch] = (), evidence: str = ""
    ) -> list[VotesRead]:
        """The leader journals and casts the group's only vote on the attempt. `evidence`: why sums are missing.

        Returns all votes on the leader that casts the last one, for it to decide; else nothing. All ranks call it.
        """
        found: list[VotesRead | None] = []
        if self.agreement.is_leader:
            record = VoteRecord(
                group=self._member.group,
                step=action.step,
                attempt=action.attempt,
                is_complete=vote.is_complete,
                work_digest=digest_of_work(computed),
                evidence=evidence,
                incarnation=self._member.incarnation,
                num_complete=list(vote.num_complete),
            )
            self._write(record)
            with self._probe.during(Operation.VOTE):
                found.append(self.vote(action.attempt, vote, action.voters))
        if isinstance(action, actions.AttemptReduce):
            self._probe(FaultPoint.AFTER_VOTE)
        with self._probe.during(Operation.VOTE):
            found.append(self.confirm())
        return [votes for votes in found if votes is not None]

    def read_votes(self, action: actions.ReadVotes) -> list[VotesRead]:
        """The votes so far on a leader that is to read them. None if its relay reads them, or if a vote is missing: the
        group that casts it reads them all.
        """
        with self._probe.during(Operation.VOTE):
            if not self.agreement.is_leader or self._reliance.is_placed:
                return []
            if self.agreement.num_votes(action.attempt) < action.num_left:
                return []
            return [self.agreement.read_votes(action.attempt, action.voters)]

    def append(self, action: actions.AppendEntry) -> None:
        if self.agreement.is_leader:
            with self._probe.during(Operation.VOTE):
                self.agreement.append(action.index, action.entry)

    def begin_pause(self, epoch: int) -> bool:
        """Whether the pause of this epoch begins with this call."""
        if epoch == self._pause_epoch:
            return False
        self._pause_epoch, self._since_s = epoch, time.monotonic()
        self._have_waited.clear()
        self._reported = ()
        return True

    def poll_hosts(self, action: actions.AwaitHosts) -> HostsRead:
        """Leader: waits, some seconds at most, for the next log entry or for a further group that waits."""
        end_s, interval_s = time.monotonic() + TURN_S, poll_interval_s(len(action.voters))
        while True:
            waiting, stages = self.agreement.waiting(action.voters)
            groups = {member.group for member in waiting}
            if not groups <= self._have_waited:
                self._have_waited |= groups
                self._since_s = time.monotonic()
            is_new, self._reported = waiting != self._reported, waiting
            if is_new or time.monotonic() >= end_s or self.agreement.poll_entry(action.index, interval_s):
                waited_s = time.monotonic() - self._since_s
                return HostsRead(waiting=waiting, waited_s=waited_s, stages=stages)

    # ----------------------------------------------------------------------------------------------- over the relays

    def vote(self, attempt: int, vote: Vote, voters: Sequence[Member]) -> VotesRead | None:
        """Leader: casts the group's only vote on the attempt or sends it to the relay; `confirm` must follow. Returns
        all votes if the last one may be among those cast, for the leader to decide.
        """
        self._attempt, self._vote, self._voters = attempt, encode(set_fields(vote)), voters
        blocks = self.agreement.blocks(voters)
        relay = blocks.relay_of(self._member)
        block, parts = blocks.block_of(relay), self._parts
        self._reliance = Reliance(None)
        if parts is not None and len(block) > 1:
            if relay == self._member:
                return self._cast(self._collect(block, parts))
            if parts.link.send(relay, attempt, self._vote, self._head()):
                self._reliance = Reliance(relay)
                return None
        return self._cast({self._member: self._vote})

    def confirm(self) -> VotesRead | None:
        """Waits for the next entry from the relay; casts the vote directly if it does not come. Returns as `vote`."""
        if not self._reliance.is_placed or self._relayed_entry(self._head()):
            return None
        self._reliance = Reliance(None)
        return self._cast({self._member: self._vote})

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
        index = self._head()

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
