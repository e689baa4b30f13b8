"""The vote to end the run after the last step, where state is left to compare or parameters are left to gather."""

from spare_megatron.core.actions import AttemptFinish
from spare_megatron.core.events import Event
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.votes import Digests, Vote
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import VoteRecord, digest_of_work
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.voting.voting import Voting


def vote_to_finish(
    action: AttemptFinish,
    voting: Voting,
    journal: JournalWriter,
    probe: RankProbe,
    digests: Digests,
    *,
    lacks_params: bool,
) -> list[Event]:
    """The leader votes on whether the run can end; returns all votes if its cast may have been the last, else nothing.

    `lacks_params`: some parameters of the group are those of an earlier step.
    """
    agreement = voting.agreement
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
    journal.write(record)
    vote = Vote(
        is_complete=not lacks_params,
        plan_digest=action.plan_digest,
        params_digest=digests.params,
        lacks_params=lacks_params,
        slice_digests=digests.partitions,
        state_digest=digests.state,
        copied_from=digests.copied_from,
    )
    with probe.during(Operation.VOTE):
        cast = voting.vote(action.attempt, vote, action.voters)
        return [votes for votes in (cast, voting.confirm()) if votes is not None]
