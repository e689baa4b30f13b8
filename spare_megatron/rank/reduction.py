"""One rank's attempts to reduce a step: it sums its gradients over the groups, checks its own, and votes.

Buckets (`comm.bucket_exchange`) are sent after everything is computed and checked; with overlap, as soon as the
backward pass of the attempt's last microbatch has finished them. They are judged on the device, and what is unsound is
found once their sums arrive.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from spare_megatron.comm.bucket_exchange import BucketExchange
from spare_megatron.comm.communicators import report_incomplete
from spare_megatron.core.audits.audits import AuditWord
from spare_megatron.core.audits.suspicion import LossWatch
from spare_megatron.core.log.actions import AttemptReduce, BuildCommunicator
from spare_megatron.core.log.events import Event, VotesRead
from spare_megatron.core.log.gradient_guard import GradientFinding
from spare_megatron.core.log.loss_sum import LossSum
from spare_megatron.core.log.votes import Digests, Vote
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, VoteRecord, digest_of_work
from spare_megatron.process.rank_probe import CUT_OFF
from spare_megatron.rank.group_audits import GroupAudits
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.stacking.layout import PartitionId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.stacked.partition_copier import GroupRepairs
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.store.interface import StoreLost
from spare_megatron.voting.agreement import GroupOpinion

_LONGEST_FAILURE = 150
"""Characters of a group's failure in its vote, from which a fence's reason of at most 200 is made."""


class Suspicions:
    """The watch over one rank's losses. `has_audits`: votes name the suspects, to be audited."""

    def __init__(self, ctx: RankContext, reports: RankReports, *, has_audits: bool) -> None:
        self._ctx, self._reports = ctx, reports
        self._has_audits = has_audits
        self._watch = LossWatch()

    def judge(self, step: int, attempt: int) -> None:
        """Notes the suspects among the microbatches computed since the last call, before the group votes.

        Waits for the device on ranks of the last stage.
        """
        losses = self._ctx.trainer.microbatch_losses()
        suspects = self._watch.on_losses(step, losses)
        samples = [self._ctx.trainer.corpus.addresses(step, suspect.microbatch.number) for suspect in suspects]
        self._reports.write_suspects(attempt, suspects, samples)
        if not self._has_audits:
            return
        now = self._ctx.progress.now
        now.losses.update(losses)
        now.suspects.update(suspect.microbatch.unit for suspect in suspects)


class Reduction:
    """Carries out BuildCommunicator and AttemptReduce. It decides nothing."""

    def __init__(
        self,
        ctx: RankContext,
        *,
        buckets: BucketExchange,
        audits: GroupAudits,
        repairs: GroupRepairs | None,
        digests: StateDigests,
        reports: RankReports,
        suspicions: Suspicions,
    ) -> None:
        self._ctx = ctx
        self._buckets = buckets
        self._audits = audits
        self._repairs = repairs
        self._digests = digests
        self._reports, self._suspicions = reports, suspicions
        self._overlaps = ctx.config.reduce.overlap
        self._attempt = -1
        self._is_early = False  # whether buckets of this attempt may be sent while computing
        self.loss: LossSum | None = None
        """The summed loss of the last attempt, on every rank of the group; None unless it was complete."""
        self.terms: Sequence[LossSum] = ()
        """The same of the further terms of the loss."""
        self._num_posted_bytes = 0  # before this step
        self.bytes_over_groups = 0
        """Bytes that this rank gave to sums over groups since the previous commit."""
        self.compute_s: Sequence[float] = ()
        """Seconds that each rank of the group computed for the last attempt; empty if the group abstained."""

    @property
    def squares(self) -> float | None:
        """As in `GroupTrainer.update`, of the last attempt."""
        return self._buckets.squares

    def build_communicator(self, action: BuildCommunicator) -> None:
        if action.key >= 0:
            self._ctx.probe(FaultPoint.REBUILD)
        self._buckets.communicator.start_build(action.key, action.members)

    def start_attempt(self, action: AttemptReduce) -> None:
        """Accounts for the buckets of the previous attempt, once per attempt and before its patch (microbatches of lost
        groups) is computed; see `BucketExchange.start_attempt`.
        """
        if self._attempt != action.attempt:
            self._attempt, self._is_early = action.attempt, False
            self._buckets.start_attempt(action)

    def send_early(self, action: AttemptReduce, brought: Sequence[Microbatch]) -> Callable[[int], None] | None:
        """Allows buckets to be sent while the last microbatches of the attempt are computed.

        All ranks of the group call it after `start_attempt` and before computing. The leader first journals the
        contribution `brought`, all microbatches that the local sums will hold. Returns None without overlap, else a
        callback for the backward passes that takes the number of finished buckets.
        """
        if not self._overlaps:
            return None
        self._write_contribution(action, brought)
        self._is_early = True
        return lambda num_ready: self._buckets.send_ready(num_ready, self._is_decided, action.step, len(brought))

    def commit(self) -> None:
        """Replaces the local sums by the sums of the committed attempt."""
        self._buckets.commit()
        before, self._num_posted_bytes = self._num_posted_bytes, self._buckets.communicator.num_posted_bytes
        self.bytes_over_groups = self._num_posted_bytes - before
        self._ctx.progress.save_ends.clear()

    # ------------------------------------------------------------------------------------------------ an attempt

    def attempt(self, action: AttemptReduce) -> list[Event]:
        """Sums what is not kept over the groups and casts the group's vote; abstains if the group lacks parameters.

        Returns all votes on the leader that cast the last one; else nothing. Collective over: all ranks of the group,
        and rank j of every member group. Raises UnsoundGradient if this group's gradient is not finite or an outlier.
        """
        self._ctx.progress.now.epoch = action.epoch
        self.start_attempt(action)
        if self._ctx.progress.lacks_params:
            return self._abstain(action)
        computed, step = self._ctx.progress.now.computed, action.step

        if not self._is_early:
            self._contribute(action)
        with self._ctx.probe.during(Operation.REDUCE):
            self._buckets.sum_rest(self._is_decided, step, len(computed), is_early=self._is_early)
            failure = self._report_incomplete() if self._buckets.has_given_up else ""
        wrong = self._buckets.first_wrong_sum()
        if self._is_early:
            self._suspicions.judge(step, action.attempt)
        is_complete = self._buckets.is_complete
        if is_complete:
            self._ctx.probe(FaultPoint.AFTER_REDUCE)

        finding = self._buckets.judge(step, len(computed))
        digests, work_digest = self._digests.for_vote(), digest_of_work(computed)
        with self._ctx.probe.during(Operation.SETTLE):
            opinion = self._ctx.agreement.settle(
                is_complete=is_complete,
                num_complete=self._buckets.num_complete,
                work_digest=work_digest,
                loss=self._buckets.loss_sum(),
                terms=self._buckets.term_sums(),
                compute_s=self._ctx.probe.compute_s(),
                pace_s=self._ctx.probe.pace_s(self._ctx.config.layout.virtual_pipeline),
                finding=finding,
                ends=self._ctx.progress.is_end_asked(),
                wrong_sum=wrong,
                has_suspects=bool(self._ctx.progress.now.suspects),
            )
        self._raise_if_unsound(opinion.finding, step)
        with self._ctx.probe.during(Operation.SETTLE):
            words = self._audits.words(action.attempt, action.disputed)
            losses = self._audits.losses(action.disputed, has_suspects=opinion.has_suspects)
            failure = "" if opinion.is_complete else self._first(failure)
        self.loss, self.terms, self.compute_s = opinion.loss, opinion.terms, opinion.compute_s
        restored = () if self._repairs is None else self._repairs.restored()
        votes = self._cast(
            action, opinion, work_digest, digests, failure=failure, restored=restored, audits=words, losses=losses
        )
        self._reports.clock.on_reduced(self._buckets.communicator.ready_at_s)
        return votes

    def _contribute(self, action: AttemptReduce) -> None:
        """Records what this group is about to contribute, once its gradients are found sound."""
        computed, step = self._ctx.progress.now.computed, action.step
        self._ctx.probe(FaultPoint.BEFORE_REDUCE)
        self._buckets.measure_all(step, len(computed))
        finding = self._buckets.judge(step, len(computed))
        self._suspicions.judge(step, action.attempt)  # before an unsound gradient ends this attempt
        self._agree_on(finding, step)  # before the record: a group that raises here contributes nothing
        self._write_contribution(action, computed)
        # No rank sends before the leader's record: a sum may be kept though the leader is lost.
        self._agree_on(finding, step)

    def _is_decided(self) -> bool:
        """Whether the next log entry is written, or a rank of any group has reported that the sums cannot complete.

        Raises StoreLost if the rank is to give the step up and save its state alone.
        """
        is_over = self._ctx.agreement.is_over(self._ctx.progress.head)
        if not is_over and self._ctx.progress.is_cut_off():
            raise StoreLost(CUT_OFF)
        return is_over

    def _report_incomplete(self) -> str:
        return report_incomplete(self._buckets.communicator, self._ctx.agreement, self._ctx.progress.head)

    def _first(self, failure: str) -> str:
        """The first failure of any rank. Collective over: all ranks of the group."""
        return next(filter(None, self._ctx.agreement.gathered(failure)), "")

    def _agree_on(self, finding: GradientFinding, step: int) -> None:
        """Raises `UnsoundGradient` if any rank's gradients are unsound. Collective over: all ranks of the group."""
        with self._ctx.probe.during(Operation.SETTLE):
            agreed = GradientFinding(self._ctx.agreement.highest(finding))
        self._raise_if_unsound(agreed, step)

    def _raise_if_unsound(self, finding: GradientFinding, step: int) -> None:
        if finding is not GradientFinding.SOUND:
            raise self._buckets.error(finding, step)

    def _abstain(self, action: AttemptReduce) -> list[Event]:
        """Votes without reducing. Collective over: all ranks of the group."""
        self._buckets.communicator.evidence, self.compute_s = self._ctx.progress.gather_evidence, ()
        opinion = GroupOpinion(is_complete=False, loss=None, num_complete=())
        with self._ctx.probe.during(Operation.SETTLE):
            failure = self._first(self._ctx.progress.gather_failure)
        return self._cast(action, opinion, digest_of_work([]), Digests(), lacks_params=True, failure=failure)

    def _cast(
        self,
        action: AttemptReduce,
        opinion: GroupOpinion,
        work_digest: str,
        digests: Digests,
        *,
        failure: str,
        lacks_params: bool = False,
        restored: tuple[PartitionId, ...] = (),
        audits: tuple[AuditWord, ...] = (),
        losses: tuple[AuditWord, ...] = (),
    ) -> list[Event]:
        all_votes: list[VotesRead | None] = []
        if self._ctx.agreement.is_leader:
            record = VoteRecord(
                group=self._ctx.member.group,
                step=action.step,
                attempt=action.attempt,
                is_complete=opinion.is_complete,
                work_digest=work_digest,
                evidence=_wrong_sums(opinion) or self._buckets.communicator.evidence,
                incarnation=self._ctx.member.incarnation,
                num_complete=list(opinion.num_complete),
            )
            self._ctx.write_if_leader(record)
            vote = Vote(
                is_complete=opinion.is_complete,
                plan_digest=action.plan_digest,
                params_digest=digests.params,
                num_complete=opinion.num_complete,
                lacks_params=lacks_params,
                restored=restored,
                save_ends=tuple(self._ctx.progress.save_ends),
                slice_digests=digests.partitions,
                state_digest=digests.state,
                copied_from=digests.copied_from,
                pace_ns=round(opinion.pace_s * 1e9),
                leaves=self._ctx.progress.is_leave_asked(),
                ends=opinion.ends,
                failure=failure[:_LONGEST_FAILURE],
                has_wrong_sum=opinion.has_wrong_sum,
                audits=audits,
                losses=losses,
            )
            with self._ctx.probe.during(Operation.VOTE):
                all_votes.append(self._ctx.voting.vote(action.attempt, vote, action.voters))
        self._ctx.probe(FaultPoint.AFTER_VOTE)
        with self._ctx.probe.during(Operation.VOTE):
            all_votes.append(self._ctx.voting.confirm())
        return [votes for votes in all_votes if votes is not None]

    def _write_contribution(self, action: AttemptReduce, computed: Sequence[Microbatch]) -> None:
        microbatches: dict[str, list[int]] = defaultdict(list)
        for item in computed:
            microbatches[str(item.shard)].append(item.index)
        record = ContributionRecord(
            group=self._ctx.member.group,
            step=action.step,
            attempt=action.attempt,
            epoch=action.epoch,
            members=[int(member) for member in action.members],
            microbatches=dict(microbatches),
            incarnation=self._ctx.member.incarnation,
            kept=list(action.kept),
        )
        self._ctx.write_if_leader(record)


def _wrong_sums(opinion: GroupOpinion) -> str:
    """Which sums contradict their checksums."""
    found = [(rank, bucket) for rank, bucket in enumerate(opinion.wrong_sums) if bucket is not None]
    return "; ".join(f"rank {rank}: the sum of bucket {bucket} contradicts its checksum" for rank, bucket in found)
