"""One rank's part in deciding an evaluation: its group's vote carries the sums, and the log has the result."""

from collections.abc import Sequence
from dataclasses import replace

from spare_megatron.core.log.actions import AttemptEvaluation
from spare_megatron.core.log.events import Event
from spare_megatron.core.log.loss_sums import SetSum, added
from spare_megatron.core.log.votes import Digests
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import EvaluationRecord, by_shard, digest_of_work
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.voting.voting import plain_vote


def attempt_evaluation(ctx: RankContext, digests: StateDigests, action: AttemptEvaluation) -> Sequence[Event]:
    """Votes with the group's sums, if it has its parameters. Returns as `Voting.cast`; collective likewise."""
    if ctx.progress.lacks_params:
        return ctx.voting.cast(action, plain_vote(action, Digests(), lacks_params=True))
    ctx.probe(FaultPoint.EVALUATION_COMPUTED)
    with ctx.probe.during(Operation.SETTLE):
        sums = _settle(ctx)
    _write(ctx, action, sums)
    vote = replace(plain_vote(action, digests.for_vote(), lacks_params=False), sums=sums)
    votes = ctx.voting.cast(action, vote, ctx.progress.now.computed)
    ctx.probe(FaultPoint.EVALUATION_VOTED)
    return votes


def _settle(ctx: RankContext) -> tuple[SetSum, ...]:
    """The group's sums over all lanes, on all ranks. Raises RuntimeError if ranks computed different work."""
    work = digest_of_work(ctx.progress.now.computed)
    of_ranks = ctx.agreement.gathered((work, ctx.trainer.evaluator.sums))
    if len({digest for digest, _ in of_ranks}) > 1:
        raise RuntimeError(f"the ranks of group {ctx.member.group} computed different work in one evaluation")
    of_lanes: dict[int, tuple[SetSum, ...]] = {}
    for rank, (_, sums) in enumerate(of_ranks):
        if sums:
            of_lanes.setdefault(ctx.config.parallel.lane_of(rank), sums)
    return added(of_lanes.values())


def _write(ctx: RankContext, action: AttemptEvaluation, sums: tuple[SetSum, ...]) -> None:
    record = EvaluationRecord(
        group=ctx.member.group,
        step=action.step,
        attempt=action.attempt,
        microbatches=by_shard(ctx.progress.now.computed),
        sums=[list(one) for one in sums],
        incarnation=ctx.member.incarnation,
    )
    ctx.write_if_leader(record)
