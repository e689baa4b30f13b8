"""One rank's part in deciding an evaluation: its group's vote carries the sums, and the log has the result."""

from collections import defaultdict

from spare_megatron.core.log.actions import AttemptEvaluation, ReportEvaluation
from spare_megatron.core.log.evaluation_sums import SetSum, added
from spare_megatron.core.log.events import Event
from spare_megatron.core.log.votes import Digests
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import EvaluationRecord, digest_of_work
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.stacking.layout import Layout
from spare_megatron.state.rank_progress import RankProgress
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.voting.unreduced_vote import vote_unreduced
from spare_megatron.voting.voting import Voting


class Evaluation:
    """Carries out AttemptEvaluation and ReportEvaluation, after StepExecutor has computed. It decides nothing."""

    def __init__(
        self,
        *,
        layout: Layout,
        trainer: GroupTrainer,
        voting: Voting,
        digests: StateDigests,
        reports: RankReports,
        probe: RankProbe,
        progress: RankProgress,
    ) -> None:
        self._layout = layout
        self._trainer = trainer
        self._agreement, self._voting = voting.agreement, voting
        self._digests = digests
        self._reports = reports
        self._probe = probe
        self._progress = progress

    def attempt(self, action: AttemptEvaluation) -> list[Event]:
        """Votes with the group's sums, without them if it lacks parameters. Returns as `Reduction.attempt`.

        Collective over: all ranks of the group.
        """
        if self._progress.lacks_params:
            return self._vote(action, ())
        self._probe(FaultPoint.EVALUATION_COMPUTED)
        with self._probe.during(Operation.SETTLE):
            sums = self._settle()
        self._write(action, sums)
        votes = self._vote(action, sums)
        self._probe(FaultPoint.EVALUATION_VOTED)
        return votes

    def report(self, action: ReportEvaluation) -> None:
        self._reports.send_evaluation(action)

    def _settle(self) -> tuple[SetSum, ...]:
        """The group's sums, on all ranks: those of the last pipeline stage, over all lanes.

        Raises RuntimeError if ranks computed different work.
        """
        work = digest_of_work(self._progress.now.computed)
        of_ranks = self._agreement.gathered((work, self._trainer.evaluator.sums))
        if len({digest for digest, _ in of_ranks}) > 1:
            group = self._agreement.member.group
            raise RuntimeError(f"the ranks of group {group} computed different work in one evaluation")
        of_lanes: dict[int, tuple[SetSum, ...]] = {}
        for rank, (_, sums) in enumerate(of_ranks):
            if sums:
                of_lanes.setdefault(self._layout.lane_of(rank), sums)
        return added(of_lanes.values())

    def _write(self, action: AttemptEvaluation, sums: tuple[SetSum, ...]) -> None:
        microbatches: dict[str, list[int]] = defaultdict(list)
        for item in self._progress.now.computed:
            microbatches[str(item.shard)].append(item.index)
        record = EvaluationRecord(
            group=self._agreement.member.group,
            step=action.step,
            attempt=action.attempt,
            microbatches=dict(microbatches),
            sums=[list(one) for one in sums],
            incarnation=self._agreement.member.incarnation,
        )
        self._reports.write_if_leader(record)

    def _vote(self, action: AttemptEvaluation, sums: tuple[SetSum, ...]) -> list[Event]:
        lacks_params = self._progress.lacks_params
        return vote_unreduced(
            action,
            self._voting,
            self._reports.journal,
            self._probe,
            Digests() if lacks_params else self._digests.for_vote(),
            lacks_params=lacks_params,
            computed=[] if lacks_params else self._progress.now.computed,
            sums=sums,
        )
