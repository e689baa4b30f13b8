"""The vote of a group that has committed the last step, where the optimizer state is cut into slices."""

from spare_megatron.core.liveness import Operation
from spare_megatron.core.messages import Event
from spare_megatron.core.slice_actions import AttemptFinish
from spare_megatron.core.votes import Digests, Vote
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import VoteRecord, digest_of_work
from spare_megatron.runtime.probe import RankProbe
from spare_megatron.runtime.voting import Voting


class FinishVote:
    """Casts it. Only the leader has something to say.

    Args:
        voting: The group's voice.
        journal: The rank's journal.
        probe: Told what the rank is about.
    """

    def __init__(self, voting: Voting, journal: JournalWriter, probe: RankProbe) -> None:
        self._voting = voting
        self._journal = journal
        self._probe = probe

    def cast(self, action: AttemptFinish, digests: Digests, *, lacks_params: bool) -> list[Event]:
        """Votes on whether the run can end.

        Returns:
            On the leader whose vote was the last, all votes; else nothing.
        """
        agreement = self._voting.agreement
        if not agreement.is_leader:
            return []
        member = agreement.member
        record = VoteRecord(
            group=member.group,
            step=action.step,
            attempt=action.attempt,
            is_complete=not lacks_params,
            work_digest=digest_of_work([]),
            incarnation=member.incarnation,
        )
        self._journal.write(record)
        vote = Vote(
            is_complete=not lacks_params,
            plan_digest=action.plan_digest,
            params_digest=digests.params,
            lacks_params=lacks_params,
            slice_digests=digests.slices,
        )
        with self._probe.during(Operation.VOTE):
            cast = self._voting.vote(action.attempt, vote, action.voters)
            return [votes for votes in (cast, self._voting.confirm()) if votes is not None]
