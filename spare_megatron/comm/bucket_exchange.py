"""Sums one rank's gradient buckets over the groups, in order and a few at a time (`core.bucket_window`).

A local sum is judged on the device, copied to a staging buffer and summed over the groups, and the sum replaces the
local one once every group holds it. A commit writes all staged sums, a new attempt only those that are kept. A sum to
which a group brings unsound gradients arrives with their number: it ends the attempt on every rank that receives it.
"""

from collections.abc import Callable

import torch

from spare_megatron.comm.bucket_sums import BucketSums, Staging
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.actions import AttemptReduce
from spare_megatron.core.bucket_window import BucketWindow
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.core.gradient_guard import GradientFinding, GradientGuard, UnsoundGradient
from spare_megatron.mcore.probe import Probe
from spare_megatron.mcore.trainer import GroupTrainer


class BucketExchange:
    """The buckets of the rank at index `position` of its group, attempt by attempt.

    A bucket's gradient norm is an outlier above `outlier_factor` times its usual one; 0 disables the check.
    """

    def __init__(
        self,
        *,
        position: int,
        trainer: GroupTrainer,
        communicator: CrossGroupCommunicator,
        bucket_sums: BucketSums,
        staging: Staging,
        outlier_factor: float,
        probe: Probe,
    ) -> None:
        self._position = position
        self._trainer = trainer
        self._sums = trainer.gradients
        self.communicator = communicator
        self._bucket_sums = bucket_sums
        self._staging = staging
        self._probe = probe
        self._num_buckets = len(self._sums.buckets)
        self._guards = [GradientGuard(outlier_factor) for _ in self._sums.buckets]
        self._finding, self._finder = GradientFinding.SOUND, self._guards[-1]
        self._window = BucketWindow(self._num_buckets, 0)
        self._is_unsound = False  # some group's gradients in the next bucket to complete
        self._first, self._middle = 0, self._num_buckets // 2
        self._staged: dict[int, torch.Tensor] = {}  # in flight, or complete here but perhaps not in all groups

    # ---------------------------------------------------------------------------------------------- what is summed

    @property
    def is_complete(self) -> bool:
        """Whether this rank holds everything that the attempt sums."""
        return self._window.is_complete and self._bucket_sums.is_finished

    @property
    def num_complete(self) -> int:
        """Leading buckets whose sums this rank holds."""
        return self._window.num_complete

    @property
    def squares(self) -> float | None:
        """As in `GroupTrainer.update`, of the last attempt."""
        return self._bucket_sums.squares

    def loss_sum(self) -> float | None:
        """The summed loss of a complete attempt; None if it is incomplete or another stage has it."""
        return self._trainer.loss_sum() if self.is_complete else None

    # ------------------------------------------------------------------------------------------- between attempts

    def start_attempt(self, action: AttemptReduce) -> None:
        """Kept sums replace local sums, the rest is dropped. Raises `RuntimeError` if this rank lacks what is kept."""
        num_kept = action.kept[self._position] if action.kept else 0
        if num_kept > self._window.num_complete:
            raise RuntimeError(f"{num_kept} buckets are kept, and this rank holds {self._window.num_complete}")
        self._write(num_kept)
        # Dropped, not released: abandoned transfers may still write into these buffers.
        self._staged.clear()
        self._sums.mark_kept(num_kept)
        self._window = BucketWindow(self._num_buckets, num_kept)
        self._first, self._middle = num_kept, (num_kept + self._num_buckets) // 2
        self._finding, self._is_unsound = GradientFinding.SOUND, False
        self.communicator.start_attempt()
        self._bucket_sums.start_attempt(action)

    def commit(self) -> None:
        assert self.is_complete, "a commit needs the group's own complete sum"
        self._write(self._num_buckets)

    def _write(self, num_buckets: int) -> None:
        for bucket in sorted(self._staged):
            if bucket < num_buckets:
                self._put(bucket)

    def _put(self, bucket: int) -> None:
        staged = self._staged.pop(bucket)
        self._sums.put(bucket, staged, self._bucket_sums.places(bucket))
        self._staging.release(staged)

    # ------------------------------------------------------------------------------------------ checks of gradients

    def measure_all(self, step: int, num_computed: int) -> None:
        """Has the device judge the local sums of `num_computed` microbatches."""
        for bucket in range(self._first, self._num_buckets):
            self._measure(bucket, step, num_computed)

    def judge(self, step: int, num_computed: int) -> GradientFinding:
        """The finding about the first unsound local sum that this attempt has measured. Waits for the device, once."""
        for bucket, norm in self._sums.norms().items():
            finding = self._guards[bucket].on_norm(step, norm, num_computed)
            if self._finding is GradientFinding.SOUND:
                self._finding, self._finder = finding, self._guards[bucket]
        return self._finding

    def error(self, finding: GradientFinding, step: int) -> UnsoundGradient:
        """The error for a finding of any rank of the group."""
        return self._finder.error(finding, step)

    def _measure(self, bucket: int, step: int, num_computed: int) -> None:
        self._sums.measure(bucket, self._guards[bucket].limit(step, num_computed))

    # --------------------------------------------------------------------------------------------------- an attempt

    def send_ready(self, num_ready: int, step: int, num_computed: int) -> None:
        """Sends the first `num_ready` buckets as far as the window allows. Never waits."""
        if self.communicator.is_ready():
            self._receive()
            self._send(num_ready, lambda bucket: self._before_early(bucket, step, num_computed))

    def sum_rest(self, is_decided: Callable[[], bool], step: int, num_computed: int, *, is_early: bool) -> None:
        """Sums until this rank is complete, the log decides the attempt, or the connection breaks.

        Collective over: rank j of every member group. `is_early`: `send_ready` may have sent some, and buckets are
        measured as they are sent; otherwise all are measured before.
        """

        def before(bucket: int) -> None:
            if is_early:
                self._before_early(bucket, step, num_computed)

        self._receive()
        if self.is_complete or not self.communicator.connect(is_decided):
            return
        while self._send(self._num_buckets, before) and not self._window.is_complete:
            if not self.communicator.wait(is_decided) or not self._receive():
                return
        if self._window.is_complete:
            self._bucket_sums.finish_attempt(is_decided)

    def _before_early(self, bucket: int, step: int, num_computed: int) -> None:
        if bucket == self._first:
            self._probe(FaultPoint.BEFORE_REDUCE)
        self._measure(bucket, step, num_computed)

    def _send(self, num_ready: int, before: Callable[[int], None]) -> bool:
        """Sends buckets as far as the window allows. False if this attempt can send no more."""
        while not self._is_unsound and self._window.may_post(num_ready):
            bucket = self._window.num_posted
            before(bucket)
            if not self._post():
                return False
            if bucket == self._middle:
                self._probe(FaultPoint.IN_REDUCE)
        return not self._is_unsound

    def _post(self) -> bool:
        bucket = self._window.post()
        self._staged[bucket] = staging = self._staging.acquire()
        return self._bucket_sums.post(bucket, self._sums.stage(bucket, staging))

    def _receive(self) -> int:
        """Takes over the sums that are complete now, before the first unsound one; returns the number of both."""
        num_received = 0 if self._is_unsound else self.communicator.poll()
        for _ in range(num_received):
            bucket = self._window.num_complete
            num_unsound = self._sums.on_summed(bucket, self._staged[bucket])
            if num_unsound:
                # The communicator stays until the log moves on: others may still receive this bucket.
                self._is_unsound = True
                self.communicator.evidence = f"bucket {bucket}: the gradients of {num_unsound} groups are unsound"
                break
            self._bucket_sums.on_summed(bucket, self._staged[bucket])
            for everywhere in self._window.complete():
                self._put(everywhere)
        return num_received
