"""The group's part in the decision log on one rank: reads votes, appends and awaits entries, votes to finish."""

import time

from spare_megatron.core.log.actions import AppendEntry, AttemptFinish, AwaitHosts, ChangePaces, ReadVotes
from spare_megatron.core.log.entries import Fence, Resume, entry_fields
from spare_megatron.core.log.events import EntryRead, Event, HostsRead
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.records import EntryRecord, PacesRecord
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.voting.agreement import Fenced
from spare_megatron.voting.unreduced_vote import vote_unreduced

_TURN_S = 2.0
"""How long the other ranks of a group wait at most for their leader, which polls the store."""
_POLL_S = 0.05
_POLL_S_PER_GROUP = 0.001
"""Every leader reads the announcements of all absent groups."""


class GroupLog:
    """Carries out ReadVotes, AppendEntry, ReadEntry, AwaitHosts, ChangePaces and AttemptFinish. It decides nothing."""

    def __init__(self, ctx: RankContext, digests: StateDigests, reports: RankReports) -> None:
        self._ctx = ctx
        self._digests = digests
        self._reports = reports
        self._pause_epoch = -1
        self._have_waited: set[GroupId] = set()  # in that epoch
        self._since_s = 0.0
        self._reported: tuple[Member, ...] = ()

    def read_votes(self, action: ReadVotes) -> list[Event]:
        """Returns the votes cast so far on a leader that is to read them, else nothing."""
        with self._ctx.probe.during(Operation.VOTE):
            if not self._ctx.agreement.is_leader:
                return []
            votes = self._ctx.voting.read_votes(action.attempt, action.voters, action.num_left)
            return [] if votes is None else [votes]

    def append_entry(self, action: AppendEntry) -> None:
        if self._ctx.agreement.is_leader:
            with self._ctx.probe.during(Operation.VOTE):
                self._ctx.agreement.append(action.index, action.entry)

    def read_entry(self, index: int) -> list[Event]:
        """Waits for the log entry. Collective over: all ranks of the group. Raises `Fenced` if it fences the group."""
        with self._ctx.probe.during(Operation.AWAIT_ENTRY):
            entry = self._ctx.voting.read_entry(index)
        progress, group = self._ctx.progress, self._ctx.member.group
        progress.head = index + 1
        self._ctx.write_if_leader(EntryRecord(group=group, index=index, entry=entry_fields(entry)))
        if isinstance(entry, Fence):
            if entry.hits(self._ctx.member):
                raise Fenced(f"group {group} is fenced by log entry {index}: {entry.reason}")
            step = progress.num_steps if progress.step is None else progress.step.step
            self._reports.clock.on_group_lost(step, entry.group)
            self._digests.is_wanted = True
        elif isinstance(entry, Resume):
            self._reports.clock.on_pause()
            self._reports.send_pause(entry.step)
        else:
            self._reports.clock.on_decided()
        return [EntryRead(index=index, entry=entry)]

    def await_hosts(self, action: AwaitHosts) -> list[Event]:
        """Waits in a pause, some seconds at most, for the next log entry or for a further group that waits.

        Collective over: all ranks of the group. Raises `Fenced` as `read_entry` does.
        """
        if action.epoch != self._pause_epoch:
            self._begin_pause(action)
        with self._ctx.probe.during(Operation.AWAIT_ENTRY):
            if self._ctx.agreement.is_at_end(action.index):
                return [self._poll_hosts(action) if self._ctx.agreement.is_leader else HostsRead()]
        return self.read_entry(action.index)

    def _begin_pause(self, action: AwaitHosts) -> None:
        self._pause_epoch, self._since_s = action.epoch, time.monotonic()
        self._have_waited.clear()
        self._reported = ()
        self._ctx.progress.step = None  # begun again when the pause ends
        self._reports.clock.on_pause()
        self._reports.send_pause(action.step, action.shards)

    def _poll_hosts(self, action: AwaitHosts) -> HostsRead:
        end_s = time.monotonic() + _TURN_S
        interval_s = max(_POLL_S, _POLL_S_PER_GROUP * len(action.voters))
        while True:
            waiting = self._ctx.agreement.waiting(action.voters)
            groups = {member.group for member in waiting}
            if not groups <= self._have_waited:
                self._have_waited |= groups
                self._since_s = time.monotonic()
            is_new, self._reported = waiting != self._reported, waiting
            if is_new or time.monotonic() >= end_s or self._ctx.agreement.poll_entry(action.index, interval_s):
                return HostsRead(waiting=waiting, waited_s=time.monotonic() - self._since_s)

    def change_paces(self, action: ChangePaces) -> None:
        """Journals by which paces work is dealt from here on."""
        permille = {str(group): pace for group, pace in action.permille.items()}
        self._ctx.write_if_leader(PacesRecord(group=self._ctx.member.group, step=action.step, permille=permille))

    def attempt_finish(self, action: AttemptFinish) -> list[Event]:
        """Votes on whether the run can end. Returns as `Reduction.attempt`."""
        digests, lacks_params = self._digests.for_vote(), self._ctx.progress.lacks_params
        journal = self._ctx.journal
        return vote_unreduced(action, self._ctx.voting, journal, self._ctx.probe, digests, lacks_params=lacks_params)
