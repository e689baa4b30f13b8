"""One rank's attempts to reduce a step: it checks its gradients, sums them over the groups and votes.

Buckets go in order, a few in flight (`core.bucket_window`): a local sum is checked, copied to a staging buffer and
summed over the groups, and replaces the local sum once every group holds it. A commit then writes all staged sums, a
retry only those that are kept. Buckets are sent after everything is computed and checked; with overlap, as soon as the
backward pass of the attempt's last microbatch has finished them, if the group has a microbatch to compute.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from spare_megatron.comm.bucket_sums import BucketSums, Staging
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.actions import AttemptReduce, StartRepairs
from spare_megatron.core.bucket_window import BucketWindow
from spare_megatron.core.entries import SaveEnd
from spare_megatron.core.events import Event, VotesRead
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.core.gradient_guard import GradientFinding, GradientGuard
from spare_megatron.core.votes import Digests, Vote
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import ContributionRecord, VoteRecord, digest_of_work
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.stacking.layout import GroupId, PartitionId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.state.transfer.partition_copier import GroupRepairs
from spare_megatron.voting.agreement import GroupOpinion
from spare_megatron.voting.voting import Voting


class Reduction:
    """Sums one rank's gradient buckets over the groups, attempt by attempt. It decides nothing.

    Args:
        position: The rank's index inside its group.
        bucket_sums: Which part of each summed bucket each group receives.
        repairs: Copies missing state partitions, whose completion votes report; None without partitions.
        outlier_factor: A bucket's gradient norm is an outlier above this multiple of its usual one; 0 disables the
            check.
        overlaps: Whether buckets are sent while others are computed.
    """

    def __init__(
        self,
        *,
        position: int,
        trainer: GroupTrainer,
        voting: Voting,
        communicator: CrossGroupCommunicator,
        bucket_sums: BucketSums,
        staging: Staging,
        repairs: GroupRepairs | None,
        journal: JournalWriter,
        probe: RankProbe,
        outlier_factor: float,
        overlaps: bool,
    ) -> None:
        self._position = position
        self._sums = trainer.gradients
        self._trainer = trainer
        self._agreement, self._voting = voting.agreement, voting
        self._communicator = communicator
        self._bucket_sums = bucket_sums
        self._staging = staging
        self._repairs = repairs
        self._journal = journal
        self._probe = probe
        self._guards = [GradientGuard(outlier_factor) for _ in self._sums.buckets]
        self._overlaps = overlaps
        self._attempt = -1
        self._has_left_early = False  # whether buckets of this attempt may be sent while computing
        self._finding, self._finder = GradientFinding.SOUND, self._guards[-1]
        self._window = BucketWindow(len(self._sums.buckets), 0)
        self._first, self._middle = 0, len(self._sums.buckets) // 2
        self._staged: dict[int, torch.Tensor] = {}  # in flight, or complete here but perhaps not in all groups
        self.save_ends: list[SaveEnd] = []
        """Finished saves of the group, which its votes report until a commit records them."""
        self.loss_sum = math.nan
        """The summed loss of the last attempt, on every rank of the group; NaN unless it was complete."""
        self.compute_s: Sequence[float] = ()
        """Seconds that each rank of the group computed for the last attempt; empty if the group abstained."""

    @property
    def ready_at_s(self) -> float | None:
        """Monotonic time at which the last attempt's communicator was ready; None if it never was."""
        return self._communicator.ready_at_s

    @property
    def squares(self) -> float | None:
        """As in `GroupTrainer.update`, of the last attempt."""
        return self._bucket_sums.squares

    def build_communicator(self, key: int, members: Sequence[GroupId]) -> None:
        self._communicator.begin_build(key, members)

    def start_repairs(self, action: StartRepairs) -> None:
        assert self._repairs is not None, "only slices are repaired"
        self._repairs.start(action)

    # ------------------------------------------------------------------------------------------ between attempts

    def begin(self, action: AttemptReduce) -> None:
        """Settles the previous attempt, before the patch of this one is computed.

        Kept sums replace local sums, the rest is dropped. Raises `RuntimeError` if this rank does not hold all that is
        kept.
        """
        if self._attempt == action.attempt:
            return
        self._attempt = action.attempt
        num_kept = action.kept[self._position] if action.kept else 0
        if num_kept > self._window.num_complete:
            raise RuntimeError(f"{num_kept} buckets are kept, and this rank holds {self._window.num_complete}")
        self._write(num_kept)
        # Dropped, not given back: abandoned transfers may still write into these buffers.
        self._staged.clear()
        self._sums.keep(num_kept)
        self._window = BucketWindow(len(self._sums.buckets), num_kept)
        self._first, self._middle = num_kept, (num_kept + len(self._sums.buckets)) // 2
        self._has_left_early = False
        self._finding = GradientFinding.SOUND
        self._communicator.begin()
        self._bucket_sums.begin(action)

    def leave_early(self, action: AttemptReduce, brought: Sequence[Microbatch]) -> Callable[[int], None] | None:
        """Allows buckets to be sent while the last microbatches of the attempt are computed.

        Call it on all ranks of the group, after `begin` and before computing. The leader journals the contribution
        `brought`, all microbatches that the local sums will hold. What other ranks send depends on the leader's
        computation, so that nothing is sent before the record. Returns None without overlap, else a callback for the
        backward passes that takes the number of finished buckets.
        """
        if not self._overlaps:
            return None
        self._write_contribution(action, brought)
        self._has_left_early = True

        def advance(num_ready: int) -> None:
            # Never blocks: what cannot be sent or received now is sent or received later.
            if self._communicator.is_ready():
                self._take_in()
                self._send(num_ready, action.step, len(brought))

        return advance

    def commit(self) -> None:
        """Replaces the local sums by the sums of the committed attempt."""
        assert self._is_complete, "a commit needs the group's own complete sum"
        self._write(len(self._sums.buckets))
        self.save_ends.clear()

    def _write(self, num_buckets: int) -> None:
        for bucket in sorted(self._staged):
            if bucket < num_buckets:
                self._put(bucket)

    def _put(self, bucket: int) -> None:
        staged = self._staged.pop(bucket)
        self._sums.put(bucket, staged, self._bucket_sums.places(bucket))
        self._staging.give_back(staged)

    # ------------------------------------------------------------------------------------------------ an attempt

    def attempt(
        self, action: AttemptReduce, computed: Sequence[Microbatch], *, digests: Callable[[], Digests], head: int
    ) -> list[Event]:
        """Sums what is not kept over the groups and casts the group's vote.

        `computed` are the microbatches in the local sums. `digests` returns the state digests for the vote and is
        called after the reduction. `head` counts the log entries folded so far; the next one ends the attempt. Returns
        all votes on the leader that cast the last one; else nothing.

        Collective over: all ranks of the group, and rank j of every member group.

        Raises:
            UnsoundGradient: This group's gradient is not finite or an outlier.
        """
        self.begin(action)
        if not self._has_left_early:
            self._probe(FaultPoint.BEFORE_REDUCE)
            self._judge_all(action.step, len(computed))
            self._agree_on_finding(action.step)  # before the record: a group that raises here contributes nothing
            self._write_contribution(action, computed)
            # No rank sends before the leader's record: a sum may be kept though the leader is lost.
            self._agree_on_finding(action.step)
        with self._probe.during(Operation.REDUCE):
            self._reduce(action.step, len(computed), head)
        if self._has_left_early:
            self._agree_on_finding(action.step)
        if self._is_complete:
            self._probe(FaultPoint.AFTER_REDUCE)
        return self._vote(action, digest_of_work(computed), digests())

    @property
    def _is_complete(self) -> bool:
        return self._window.is_complete and self._bucket_sums.is_concluded

    def _judge_all(self, step: int, num_computed: int) -> None:
        for bucket in range(self._first, len(self._guards)):
            if not self._is_sound(bucket, step, num_computed):
                break

    def _is_sound(self, bucket: int, step: int, num_computed: int) -> bool:
        """Checks a local sum. After a finding the rank sends nothing more in this attempt."""
        self._finder = self._guards[bucket]
        self._finding = self._finder.judge(step, self._sums.norm(bucket), num_computed)
        return self._finding is GradientFinding.SOUND

    def _agree_on_finding(self, step: int) -> None:
        """Raises `UnsoundGradient` if a rank's gradients are not finite or far larger than usual.

        Collective over: all ranks of the group, so that all raise together. An unsound bucket is never sent.
        """
        with self._probe.during(Operation.SETTLE):
            finding = GradientFinding(self._agreement.highest(self._finding))
        if finding is not GradientFinding.SOUND:
            raise self._finder.error(finding, step)

    def _reduce(self, step: int, num_computed: int, head: int) -> None:
        """Sums until this rank is complete, the log decides the attempt, or the connection breaks."""

        def is_decided() -> bool:
            # A group that could not gather this step's parameters adds nothing, so that the sums cannot complete.
            is_in_vain = self._repairs is not None and self._agreement.is_broken(head)
            return is_in_vain or self._agreement.is_written(head)

        self._take_in()
        if self._is_complete or not self._communicator.connect(is_decided):
            return
        while self._send(len(self._sums.buckets), step, num_computed) and not self._window.is_complete:
            if not self._communicator.wait(is_decided) or not self._take_in():
                return
        if self._window.is_complete:
            self._bucket_sums.conclude(is_decided)

    def _send(self, num_ready: int, step: int, num_computed: int) -> bool:
        """Sends finished buckets as far as the window allows. False if this attempt can send no more."""
        while self._window.may_post(num_ready):
            bucket = self._window.num_posted
            if self._has_left_early:
                if self._finding is not GradientFinding.SOUND:
                    return False
                if bucket == self._first:
                    self._probe(FaultPoint.BEFORE_REDUCE)
                if not self._is_sound(bucket, step, num_computed):
                    return False
            if not self._post():
                return False
            if bucket == self._middle:
                self._probe(FaultPoint.IN_REDUCE)
        return True

    def _post(self) -> bool:
        bucket = self._window.post()
        self._staged[bucket] = staging = self._staging.take()
        return self._bucket_sums.post(bucket, self._sums.stage(bucket, staging))

    def _take_in(self) -> int:
        """Takes in the sums that have arrived and returns their number."""
        num_come = self._communicator.poll()
        for _ in range(num_come):
            arrived = self._window.num_complete
            self._sums.arrived(arrived, self._staged[arrived])
            self._bucket_sums.arrived(arrived, self._staged[arrived])
            for bucket in self._window.complete():
                self._put(bucket)
        return num_come

    def _vote(self, action: AttemptReduce, work_digest: str, digests: Digests) -> list[Event]:
        is_complete = self._is_complete
        with self._probe.during(Operation.SETTLE):
            opinion = self._agreement.settle(
                is_complete=is_complete,
                num_complete=self._window.num_complete,
                work_digest=work_digest,
                loss_sum=self._trainer.loss_sum() if is_complete else None,
                compute_s=self._probe.compute_s(),
            )
        self.loss_sum, self.compute_s = opinion.loss_sum, opinion.compute_s
        restored = () if self._repairs is None else self._repairs.restored()
        return self._cast(action, opinion, work_digest, digests, restored=restored)

    def abstain(self, action: AttemptReduce, evidence: str) -> list[Event]:
        """Votes without reducing, as the group lacks parameters. Collective over: all ranks of the group."""
        self.begin(action)
        self._communicator.evidence, self.compute_s = evidence, ()
        opinion = GroupOpinion(is_complete=False, loss_sum=math.nan, num_complete=())
        return self._cast(action, opinion, digest_of_work([]), Digests(), lacks_params=True)

    def _cast(
        self,
        action: AttemptReduce,
        opinion: GroupOpinion,
        work_digest: str,
        digests: Digests,
        *,
        lacks_params: bool = False,
        restored: tuple[PartitionId, ...] = (),
    ) -> list[Event]:
        all_votes: list[VotesRead | None] = []
        if self._agreement.is_leader:
            record = VoteRecord(
                group=self._agreement.member.group,
                step=action.step,
                attempt=action.attempt,
                is_complete=opinion.is_complete,
                work_digest=work_digest,
                evidence=self._communicator.evidence,
                incarnation=self._agreement.member.incarnation,
                num_complete=list(opinion.num_complete),
            )
            self._journal.write(record)
            vote = Vote(
                is_complete=opinion.is_complete,
                plan_digest=action.plan_digest,
                params_digest=digests.params,
                num_complete=opinion.num_complete,
                lacks_params=lacks_params,
                restored=restored,
                save_ends=tuple(self.save_ends),
                slice_digests=digests.partitions,
                state_digest=digests.state,
                copied_from=digests.copied_from,
            )
            with self._probe.during(Operation.VOTE):
                all_votes.append(self._voting.vote(action.attempt, vote, action.voters))
        self._probe(FaultPoint.AFTER_VOTE)
        with self._probe.during(Operation.VOTE):
            all_votes.append(self._voting.confirm())
        return [votes for votes in all_votes if votes is not None]

    def _write_contribution(self, action: AttemptReduce, computed: Sequence[Microbatch]) -> None:
        if not self._agreement.is_leader:
            return
        microbatches: dict[str, list[int]] = defaultdict(list)
        for item in computed:
            microbatches[str(item.shard)].append(item.index)
        record = ContributionRecord(
            group=self._agreement.member.group,
            step=action.step,
            attempt=action.attempt,
            epoch=action.epoch,
            members=[int(member) for member in action.members],
            microbatches=dict(microbatches),
            incarnation=self._agreement.member.incarnation,
            kept=list(action.kept),
        )
        self._journal.write(record)
