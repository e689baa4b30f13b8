"""One group's leader in a benchmark of the control plane, made of what a real one is made of."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch.distributed as dist

from spare_megatron.config.schema import ControlConfig, LayoutConfig, RunConfig
from spare_megatron.core.log.actions import ReadVotes
from spare_megatron.core.log.entries import Commit, Entry, Fence, Retry
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.relays import Blocks
from spare_megatron.core.log.votes import Vote
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog, ask_interval_s
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec
from spare_megatron.store.tcp_store import without_name_lookups
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.voting import Voting, open_relay

TIMEOUT_S = 300.0
LOST = Member(GroupId(1))
"""Who is lost: where groups vote by way of others, no relay."""


class Roster:
    """All voters before and after the loss, once for all leaders of a process: real ones have machines of their own.

    Args:
        num_groups: Groups.
        fan_in: Most groups of a block; 1 if all vote directly.
    """

    def __init__(self, num_groups: int, fan_in: int) -> None:
        self.fan_in = fan_in
        self.all = tuple(Member(GroupId(group)) for group in range(num_groups))
        self.left = tuple(member for member in self.all if member != LOST)
        self._of_all, self._of_left = Blocks(self.all, fan_in), Blocks(self.left, fan_in)

    def blocks(self, voters: Sequence[Member]) -> Blocks:
        """Who votes by way of whom, of all or of those who are left."""
        return self._of_all if voters is self.all else self._of_left


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChange:
    """What one group has seen of it, on the monotonic clock of the machine.

    Attributes:
        known_at_s: It found the fence in the log.
        ended_at_s: It read the next commit: after a vote against the sum, a retry, and another vote.
        num_casts: How often it has cast votes.
        num_reads: How often it has read them.
    """

    known_at_s: float
    ended_at_s: float
    num_casts: int
    num_reads: int


class _LoneAgreement(GroupAgreement):
    """That of a group of one rank, which counts what it asks of the store."""

    def __init__(self, member: Member, log: DecisionLog, roster: Roster) -> None:
        rank = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda: 0, size=lambda: 1))
        super().__init__(member, rank, log, TIMEOUT_S, fan_in=roster.fan_in, num_positions=1)
        self._roster = roster
        self.num_casts = self.num_reads = 0

    def blocks(self, voters: Sequence[Member]) -> Blocks:
        return self._roster.blocks(voters)

    def cast(
        self, attempt: int, votes: Mapping[Member, str], voters: Sequence[Member], forget: Sequence[int] = ()
    ) -> VotesRead | None:
        self.num_casts += 1
        return super().cast(attempt, votes, voters, forget)

    def read_votes(self, attempt: int, voters: Sequence[Member]) -> VotesRead:
        self.num_reads += 1
        return super().read_votes(attempt, voters)


class Leader:
    """One group's.

    Args:
        spec: The store.
        member: The group.
        roster: Of all leaders.
        uses_relays: Votes by way of a relay, or is one, where groups do.

    Attributes:
        member: The group.
        attempt: The next one.
        index: Of the next entry of the log.
    """

    def __init__(self, spec: StoreSpec, member: Member, roster: Roster, *, uses_relays: bool) -> None:
        with without_name_lookups():  # a thousand of them in a row
            store = open_store(spec)
        self.member, self._roster = member, roster
        self._agreement = _LoneAgreement(member, DecisionLog(store), roster)
        control = ControlConfig(vote_fan_in=roster.fan_in, heartbeat_interval_s=TIMEOUT_S)  # nobody is given up
        config = RunConfig(control=control, layout=LayoutConfig(num_groups=len(roster.all)))
        self._parts = open_relay(member, store, config.control, config.layout.num_groups) if uses_relays else None
        self._voters = self._left = roster.all
        self.attempt = self.index = 0
        silent = SilentProbe()
        self._voting = Voting(self._agreement, self._parts, head=lambda: self.index, write=lambda _: None, probe=silent)
        self._known_at_s = 0.0

    def decide(self, *, is_complete: bool = True) -> float:
        """One attempt: all who are left vote, one of the last writes the entry, all read it. Returns the seconds."""
        began_s = time.monotonic()
        step = attempt = self.attempt
        entry = Commit(step=step, attempt=attempt) if is_complete else Retry(step=step, attempt=attempt)
        vote = vote_on(is_complete=is_complete)
        for votes in (self._voting.vote(self.attempt, vote, self._voters), self._voting.confirm()):
            self._write(entry, votes)
        while not self.receive(self._voting.read_entry(self.index)):
            read = ReadVotes(attempt=self.attempt, voters=self._voters, num_left=len(self._left))
            for found in self._voting.read_votes(read):
                self._write(entry, found)
        return time.monotonic() - began_s

    def _write(self, entry: Entry, votes: VotesRead | None) -> None:
        if votes is not None and all(member.group in votes.votes for member in self._left):
            self._agreement.append(self.index, entry)

    def receive(self, entry: Entry) -> bool:
        """Goes on after the entry; whether that decides the attempt."""
        self.index += 1
        if isinstance(entry, Fence):
            self._left = self._roster.left
            return False
        self.attempt += 1
        self._voters = self._left
        return True

    def change_epoch(self) -> EpochChange:
        """A loss in a reduction, which groups see in the log alone."""
        time.sleep(self.first_ask_s())
        while not self.sees_loss():
            time.sleep(ask_interval_s(len(self._roster.all)))
        self.decide(is_complete=False)
        self.decide()
        return self.changed()

    def first_ask_s(self) -> float:
        """When it looks at the log first: its reduction begins with the end of its computation."""
        self._agreement.num_casts = self._agreement.num_reads = 0
        return random.Random(self.member.group).uniform(0.0, ask_interval_s(len(self._roster.all)))

    def sees_loss(self) -> bool:
        """Looks at the log once."""
        if self._agreement.is_written(self.index):
            self._known_at_s = time.monotonic()
            return True
        return False

    def changed(self) -> EpochChange:
        """What it has seen, once it is over."""
        return EpochChange(
            known_at_s=self._known_at_s,
            ended_at_s=time.monotonic(),
            num_casts=self._agreement.num_casts,
            num_reads=self._agreement.num_reads,
        )

    def die(self) -> None:
        """Leaves its relay, or its block."""
        if self._parts is not None:
            self._parts.relay.close()
            self._parts.link.close()


def vote_on(*, is_complete: bool) -> Vote:
    """What all groups say."""
    return Vote(is_complete=is_complete, plan_digest="0" * 64)
