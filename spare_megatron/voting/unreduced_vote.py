"""Votes on attempts that reduce nothing: evaluations, and the end of a run with state left to compare or to gather."""

from collections.abc import Sequence

from spare_megatron.core.log.actions import AttemptEvaluation, AttemptFinish
from spare_megatron.core.log.evaluation_sums import SetSum
from spare_megatron.core.log.events import Event
from spare_megatron.core.log.votes import Digests, Vote
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import VoteRecord, digest_of_work
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.voting.voting import Voting


def vote_unreduced(
    action: AttemptFinish | AttemptEvaluation,
    voting: Voting,
    journal: JournalWriter,
    probe: RankProbe,
    digests: Digests,
    *,
    lacks_params: bool,
    computed: Sequence[Microbatch] = (),
    sums: tuple[SetSum, ...] = (),
) -> list[Event]:
    """The leader votes; returns all votes if its cast may have been the last, else nothing.

    `lacks_params`: some parameters of the group are those of an earlier step. `computed` and `sums` are of an
    evaluation.
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
        work_digest=digest_of_work(computed),
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
        sums=sums,
    )
    with probe.during(Operation.VOTE):
        cast = voting.vote(action.attempt, vote, action.voters)
        return [votes for votes in (cast, voting.confirm()) if votes is not None]
