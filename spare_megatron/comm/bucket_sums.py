"""How a rank's gradient buckets are summed over groups, and the staging buffers for it."""

from collections.abc import Callable, Mapping, Sequence

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
