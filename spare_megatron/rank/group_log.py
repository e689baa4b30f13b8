"""The group's part in the decision log on one rank: reads votes, appends and awaits entries, votes to finish."""

from spare_megatron.core.actions import AppendEntry, AttemptFinish, ReadVotes
from spare_megatron.core.entries import Fence, entry_fields
from spare_megatron.core.events import EntryRead, Event
from spare_megatron.core.failure_detector import Operation
from spare_megatron.journal.records import EntryRecord
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.rank.rank_progress import RankProgress
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.voting.agreement import Fenced
from spare_megatron.voting.unreduced_vote import vote_unreduced
from spare_megatron.voting.voting import Voting


class GroupLog:
    """Carries out ReadVotes, AppendEntry, ReadEntry and AttemptFinish. It decides nothing."""

    def __init__(
        self,
        *,
        voting: Voting,
        digests: StateDigests,
        reports: RankReports,
        probe: RankProbe,
        progress: RankProgress,
    ) -> None:
        self._agreement, self._voting = voting.agreement, voting
        self._digests = digests
        self._reports = reports
        self._probe = probe
        self._progress = progress

    def read_votes(self, action: ReadVotes) -> list[Event]:
        """Returns the votes cast so far on a leader that is to read them, else nothing."""
        with self._probe.during(Operation.VOTE):
            if not self._agreement.is_leader:
                return []
            votes = self._voting.read_votes(action.attempt, action.voters, action.num_left)
            return [] if votes is None else [votes]

    def append_entry(self, action: AppendEntry) -> None:
        if self._agreement.is_leader:
            with self._probe.during(Operation.VOTE):
                self._agreement.append(action.index, action.entry)

    def read_entry(self, index: int) -> list[Event]:
        """Waits for the log entry. Collective over: all ranks of the group. Raises `Fenced` if it fences the group."""
        with self._probe.during(Operation.AWAIT_ENTRY):
            entry = self._voting.read_entry(index)
        progress, group = self._progress, self._agreement.member.group
        progress.head = index + 1
        self._reports.write_if_leader(EntryRecord(group=group, index=index, entry=entry_fields(entry)))
        if isinstance(entry, Fence):
            if entry.hits(self._agreement.member):
                raise Fenced(f"group {group} is fenced by log entry {index}: {entry.reason}")
            step = progress.num_steps if progress.step is None else progress.step.step
            self._reports.clock.on_group_lost(step, entry.group)
            self._digests.is_wanted = True
        else:
            self._reports.clock.on_decided()
        return [EntryRead(index=index, entry=entry)]

    def attempt_finish(self, action: AttemptFinish) -> list[Event]:
        """Votes on whether the run can end. Returns as `Reduction.attempt`."""
        digests, lacks_params = self._digests.for_vote(), self._progress.lacks_params
        journal = self._reports.journal
        return vote_unreduced(action, self._voting, journal, self._probe, digests, lacks_params=lacks_params)
