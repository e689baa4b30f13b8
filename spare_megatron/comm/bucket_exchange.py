"""Sums one rank's gradient buckets over the groups, in order and a few at a time (`core.log.bucket_window`).

A local sum is judged on the device, copied to a staging buffer and summed over the groups, and the sum replaces the
local one once every group holds it. A commit writes all staged sums, a new attempt only those that are kept. A sum to
which a group brings unsound gradients arrives with their number: it ends the attempt on every rank that receives it.
Complete sums are checked on the device, and what is wrong is found when the attempt ends.
Ranks of a group post at the same points of backward passes (docs/protocol_sums.md, Order of posts).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.core.log.bucket_window import BucketWindow
from spare_megatron.core.log.gradient_guard import GradientFinding, GradientGuard, UnsoundGradient
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.gradients.gradients import GradientSums
from spare_megatron.mcore.model.probe import Probe


class Staging:
    """A pool of uninitialized flat tensors of one size. Never release those that an abandoned transfer may write."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        if not self._free:
            self._free.append(self._make())
        return self._free[-1].nbytes

    def acquire(self) -> Tensor:
        return self._free.pop() if self._free else self._make()

    def release(self, tensor: Tensor) -> None:
        """Returns a tensor that nothing reads or writes any more."""
        self._free.append(tensor)


class BucketSums:
    """How the buckets of a rank are summed: by all-reduce, every one on every group; `state.stacked` overrides that.
    `is_finished`: everything beyond the bucket sums has been exchanged. `squares`: as `GroupTrainer.update` takes it.
    """

    def __init__(self, sums: GradientSums, communicator: CrossGroupCommunicator) -> None:
        self._sums = sums
        self._communicator = communicator
        self.is_finished = True
        self.squares: Mapping[str, float] | None = None

    def start_attempt(self, action: AttemptReduce) -> None:
        """Starts an attempt. Everything posted in earlier attempts is complete or abandoned."""

    def post(self, bucket: int, staged: torch.Tensor) -> bool:
        """Starts to sum a staged bucket, as `CrossGroupCommunicator.post` does."""
        extras = self._sums.extras(staged)
        if extras.dtype == staged.dtype:
            return self._communicator.post(staged)
        gradients = staged[: len(self._sums.buckets[bucket])]
        return self._communicator.post_shares([(gradients, ())], extras)

    def on_summed(self, bucket: int, staged: torch.Tensor) -> None:
        """Called when a bucket's sum is complete on this rank."""

    def places(self, bucket: int) -> Sequence[slice]:  # noqa: ARG002  (all of any bucket)
        """The ranges of the bucket whose sums this rank receives."""
        return (slice(None),)

    def finish_attempt(self, is_decided: Callable[[], bool]) -> None:
        """Exchanges what the bucket sums do not carry, once all buckets are complete on this rank."""


@dataclass(kw_only=True)
class BucketExchange:
    """The buckets of the slab at `position`, attempt by attempt. `lanes`: the positions that hold the same part of the
    model. A gradient norm is an outlier above `outlier_factor` times its usual one; 0 disables the check.
    """

    position: int
    lanes: Sequence[int]
    is_alone: bool
    sums: GradientSums
    communicator: CrossGroupCommunicator
    bucket_sums: BucketSums
    staging: Staging
    outlier_factor: float
    probe: Probe

    def __post_init__(self) -> None:
        self._num_buckets = len(self.sums.buckets)
        self._guards = [GradientGuard(self.outlier_factor) for _ in self.sums.buckets]
        self.finding, self._finder = GradientFinding.SOUND, self._guards[-1]
        self._window = BucketWindow(self._num_buckets, 0)
        self._is_unsound = False  # some group's gradients in the next bucket to complete
        self._first, self._middle = 0, self._num_buckets // 2
        self._wrong: tuple[int, ...] = ()
        self.at_hand: torch.Tensor | None = None  # gradients of the bucket that a fault point is about
        self._staged: dict[int, torch.Tensor] = {}  # in flight, or complete here but perhaps not in all groups
        self._may_go_on = True  # whether this attempt may send more
        self._attempt = self._step = -1
        self.is_early = False  # whether buckets of this attempt may be sent while others are computed
        self._num_computed = 0  # microbatches in the local sums of this attempt
        self._num_posted_bytes = 0  # before this step

    # ---------------------------------------------------------------------------------------------- what is summed

    @property
    def is_complete(self) -> bool:
        """Whether this rank holds everything that the attempt sums, and nothing of it has been found wrong."""
        return self._window.is_complete and self.bucket_sums.is_finished and not self._wrong

    @property
    def has_given_up(self) -> bool:
        """Whether the attempt has ended here without all sums, but not by an unsound one, which others may yet need."""
        has_all = self._window.is_complete and self.bucket_sums.is_finished
        return not (has_all or self._is_unsound)

    @property
    def num_complete(self) -> int:
        """Leading buckets whose sums this rank holds."""
        return self._window.num_complete

    @property
    def squares(self) -> Mapping[str, float] | None:
        """As in `GroupTrainer.update`, of the last attempt."""
        return self.bucket_sums.squares

    # ------------------------------------------------------------------------------------------- between attempts

    def start_attempt(self, action: AttemptReduce) -> None:
        """Kept sums replace local ones, the rest is dropped; once per attempt. RuntimeError if one is missing."""
        if action.attempt == self._attempt:
            return
        self._attempt, self._step, self.is_early = action.attempt, action.step, False
        num_kept = action.kept[self.position] if action.kept else 0
        num_kept_by_all = min(action.kept[lane] for lane in self.lanes) if action.kept else 0
        if num_kept > self._window.num_complete:
            raise RuntimeError(f"{num_kept} buckets are kept, and this rank holds {self._window.num_complete}")
        self._write(num_kept)
        # Dropped, not released: abandoned transfers may still write into these buffers.
        self._staged.clear()
        self.sums.mark_kept(num_kept, num_kept_by_all)
        self._window = BucketWindow(self._num_buckets, num_kept)
        self._first, self._middle = num_kept, (num_kept + self._num_buckets) // 2
        self.finding, self._is_unsound, self._may_go_on = GradientFinding.SOUND, False, True
        self._wrong = ()
        self.communicator.start_attempt()
        self.bucket_sums.start_attempt(action)

    def commit(self) -> int:
        """Replaces local sums by the committed ones; returns the bytes given to sums over groups since the last one."""
        assert self.is_complete, "a commit needs the group's own complete sum"
        self._write(self._num_buckets)
        before, self._num_posted_bytes = self._num_posted_bytes, self.communicator.num_posted_bytes
        return self._num_posted_bytes - before

    def _write(self, num_buckets: int) -> None:
        for bucket in sorted(self._staged):
            if bucket < num_buckets:
                self._put(bucket)

    def _put(self, bucket: int) -> None:
        staged = self._staged.pop(bucket)
        self.sums.put(bucket, staged, self.bucket_sums.places(bucket))
        self.staging.release(staged)

    # ------------------------------------------------------------------------------------------ checks of gradients

    def on_restart(self, step: int) -> None:
        """As `GradientGuard.on_restart`."""
        for guard in self._guards:
            guard.on_restart(step)

    def measure_all(self, num_computed: int) -> None:
        """Has the device judge the local sums of `num_computed` microbatches."""
        self._num_computed = num_computed
        for bucket in range(self._first, self._num_buckets):
            self.sums.measure(bucket, self._limit(bucket))

    def judge(self) -> GradientFinding:
        """The finding about the first unsound local sum that this attempt has measured. Waits for the device, once."""
        for bucket, norm in self.sums.norms().items():
            finding = self._guards[bucket].on_norm(self._step, norm, self._num_computed)
            if finding is not GradientFinding.SOUND and not self.is_early:
                self.sums.check_local(bucket)  # it will not be staged
            if self.finding is GradientFinding.SOUND:
                self.finding, self._finder = finding, self._guards[bucket]
        return self.finding

    def first_wrong_sum(self) -> int | None:
        """The first bucket whose sum contradicts its checksum in this attempt. Waits for the device, once."""
        self._wrong = self._wrong or self.sums.wrong_sums()
        return min(self._wrong, default=None)

    def wrong_numbers(self) -> str:
        """As `GradientSums.wrong_numbers`."""
        return self.sums.wrong_numbers()

    def error(self, finding: GradientFinding) -> UnsoundGradient:
        """The error for a finding of any rank of the group."""
        return self._finder.error(finding, self._step)

    def _limit(self, bucket: int) -> float:
        return self._guards[bucket].limit(self._step, self._num_computed)

    # --------------------------------------------------------------------------------------------------- an attempt

    def begin_early(self, num_computed: int) -> None:
        """Allows `send_ready` in this attempt, whose local sums will hold `num_computed` microbatches."""
        self.is_early, self._num_computed = True, num_computed

    def send_ready(self, num_ready: int, is_decided: Callable[[], bool]) -> None:
        """Sends the first `num_ready` buckets from within a backward pass. A rank alone in its group sends as far as
        the window allows and never waits. Others wait for the communicator and the window, so that all post at the same
        point.
        """
        if self.is_alone:
            if self.communicator.is_ready():
                self._receive()
                self._send(num_ready)
        elif self._may_go_on and self._window.num_posted < num_ready:
            with self.probe.during(Operation.REDUCE, in_backward=True):
                self._send_all(num_ready, is_decided)

    def sum_rest(self, is_decided: Callable[[], bool]) -> None:
        """Sums until this rank is complete, the log decides the attempt, or the connection breaks and it sends no more.
        Collective over: rank j of every member group.
        """
        self._receive()
        if self.is_complete:
            return
        self._send_all(self._num_buckets, is_decided)
        while self._may_go_on and not self._window.is_complete:
            self._may_go_on = self._await_sum(is_decided)
        if self._may_go_on:
            self.bucket_sums.finish_attempt(is_decided)

    def _send_all(self, num_ready: int, is_decided: Callable[[], bool]) -> None:
        """Sends the first `num_ready` buckets, waiting for the communicator and the window."""
        self._receive()
        self._may_go_on = self._may_go_on and self.communicator.connect(is_decided)
        while self._may_go_on:
            self._may_go_on = self._send(num_ready)
            if self._window.num_posted >= num_ready:
                return
            self._may_go_on = self._may_go_on and self._await_sum(is_decided)

    def _await_sum(self, is_decided: Callable[[], bool]) -> bool:
        return not self._is_unsound and self.communicator.wait(is_decided) and self._receive() > 0

    def _send(self, num_ready: int) -> bool:
        """Sends buckets as far as the window allows; False if the connection breaks. An unsound sum stops the window on
        all ranks that receive it: so all send the same, whenever they learn of it.
        """
        while self._window.may_post(num_ready):
            bucket = self._window.num_posted
            if self.is_early and bucket == self._first:
                self.probe(FaultPoint.BEFORE_REDUCE)
            if not self._post():
                return False
            if bucket == self._middle:
                self.probe(FaultPoint.IN_REDUCE)
        return True

    def _post(self) -> bool:
        bucket = self._window.post()
        self._staged[bucket] = staging = self.staging.acquire()
        staged = self.sums.stage(bucket, staging, self._limit(bucket) if self.is_early else None)
        self._show(bucket, staged, FaultPoint.STAGED)
        self.sums.check_staged(bucket, staged)
        return self.bucket_sums.post(bucket, staged)

    def _show(self, bucket: int, staged: torch.Tensor, phase: FaultPoint) -> None:
        self.at_hand = staged[: len(self.sums.buckets[bucket])]
        self.probe(phase)
        self.at_hand = None

    def _receive(self) -> int:
        """Takes over the sums that are complete now, before the first unsound one; returns the number of both."""
        num_received = 0 if self._is_unsound else self.communicator.poll()
        for _ in range(num_received):
            bucket = self._window.num_complete
            num_unsound = self.sums.on_summed(bucket, self._staged[bucket])
            if num_unsound:
                # The communicator stays until the log moves on: others may still receive this bucket.
                self._is_unsound = True
                self.communicator.evidence = f"bucket {bucket}: the gradients of {num_unsound} groups are unsound"
                break
            self._show(bucket, self._staged[bucket], FaultPoint.SUMMED)
            self.sums.check(bucket, self._staged[bucket], self.bucket_sums.places(bucket))
            self.bucket_sums.on_summed(bucket, self._staged[bucket])
            for everywhere in self._window.complete():
                self._put(everywhere)
        return num_received
