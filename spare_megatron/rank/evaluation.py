"""One rank's part in deciding an evaluation: its group's vote carries the sums, and the log has the result."""

from collections import defaultdict

from spare_megatron.core.log.actions import AttemptEvaluation, ReportEvaluation
from spare_megatron.core.log.evaluation_sums import SetSum, added
from spare_megatron.core.log.events import Event
from spare_megatron.core.log.votes import Digests
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import EvaluationRecord, digest_of_work
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.voting.unreduced_vote import vote_unreduced


class Evaluation:
    """Carries out AttemptEvaluation and ReportEvaluation, once the group has computed."""

    def __init__(self, ctx: RankContext, digests: StateDigests, reports: RankReports) -> None:
        self._ctx = ctx
        self._digests = digests
        self._reports = reports

    def attempt(self, action: AttemptEvaluation) -> list[Event]:
        """Votes with the group's sums, without them if it lacks parameters. Returns as `Reduction.attempt`.

        Collective over: all ranks of the group.
        """
        if self._ctx.progress.lacks_params:
            return self._vote(action, ())
        self._ctx.probe(FaultPoint.EVALUATION_COMPUTED)
        with self._ctx.probe.during(Operation.SETTLE):
            sums = self._settle()
        self._write(action, sums)
        votes = self._vote(action, sums)
        self._ctx.probe(FaultPoint.EVALUATION_VOTED)
        return votes

    def report(self, action: ReportEvaluation) -> None:
        self._reports.send_evaluation(action)

    def _settle(self) -> tuple[SetSum, ...]:
        """The group's sums, on all ranks: those of the last pipeline stage, over all lanes.

        Raises RuntimeError if ranks computed different work.
        """
        work = digest_of_work(self._ctx.progress.now.computed)
        of_ranks = self._ctx.agreement.gathered((work, self._ctx.trainer.evaluator.sums))
        if len({digest for digest, _ in of_ranks}) > 1:
            group = self._ctx.member.group
            raise RuntimeError(f"the ranks of group {group} computed different work in one evaluation")
        of_lanes: dict[int, tuple[SetSum, ...]] = {}
        for rank, (_, sums) in enumerate(of_ranks):
            if sums:
                of_lanes.setdefault(self._ctx.config.parallel.lane_of(rank), sums)
        return added(of_lanes.values())

    def _write(self, action: AttemptEvaluation, sums: tuple[SetSum, ...]) -> None:
        microbatches: dict[str, list[int]] = defaultdict(list)
        for item in self._ctx.progress.now.computed:
            microbatches[str(item.shard)].append(item.index)
        record = EvaluationRecord(
            group=self._ctx.member.group,
            step=action.step,
            attempt=action.attempt,
            microbatches=dict(microbatches),
            sums=[list(one) for one in sums],
            incarnation=self._ctx.member.incarnation,
        )
        self._ctx.write_if_leader(record)

    def _vote(self, action: AttemptEvaluation, sums: tuple[SetSum, ...]) -> list[Event]:
        lacks_params = self._ctx.progress.lacks_params
        return vote_unreduced(
            action,
            self._ctx.voting,
            self._ctx.journal,
            self._ctx.probe,
            Digests() if lacks_params else self._digests.for_vote(),
            lacks_params=lacks_params,
            computed=[] if lacks_params else self._ctx.progress.now.computed,
            sums=sums,
        )
