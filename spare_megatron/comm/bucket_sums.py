"""Strategies for summing a rank's gradient buckets over groups, and the staging buffers they use."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.mcore.gradients.gradients import GradientSums


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


class BucketSums(Protocol):
    """How the buckets of one rank are summed over groups, and which sums this rank receives.

    `is_finished`: everything beyond the bucket sums has been exchanged. `squares`: as `GroupTrainer.update` takes it.
    """

    is_finished: bool
    squares: float | None

    def start_attempt(self, action: AttemptReduce, /) -> None:
        """Starts an attempt. Everything posted in earlier attempts is complete or abandoned."""

    def post(self, bucket: int, staged: torch.Tensor, /) -> bool:
        """Starts to sum a staged bucket, as `CrossGroupCommunicator.post` does."""

    def on_summed(self, bucket: int, staged: torch.Tensor, /) -> None:
        """Called when a bucket's sum is complete on this rank."""

    def places(self, bucket: int, /) -> Sequence[slice]:
        """The ranges of the bucket whose sums this rank receives."""

    def finish_attempt(self, is_decided: Callable[[], bool], /) -> None:
        """Exchanges what the bucket sums do not carry, once all buckets are complete on this rank."""


class AllReducedBuckets:
    """Sums every bucket on every group by all-reduce."""

    is_finished = True
    squares: float | None = None

    def __init__(self, sums: GradientSums, communicator: CrossGroupCommunicator) -> None:
        self._sums = sums
        self._communicator = communicator

    def start_attempt(self, _action: AttemptReduce) -> None:
        pass

    def post(self, bucket: int, staged: torch.Tensor) -> bool:
        extras = self._sums.extras(staged)
        if extras.dtype == staged.dtype:
            return self._communicator.post(staged)
        gradients = staged[: len(self._sums.buckets[bucket])]
        return self._communicator.post_shares([(gradients, ())], extras)

    def on_summed(self, _bucket: int, _staged: torch.Tensor) -> None:
        pass

    def places(self, _bucket: int) -> Sequence[slice]:
        return (slice(None),)

    def finish_attempt(self, _is_decided: Callable[[], bool]) -> None:
        pass
