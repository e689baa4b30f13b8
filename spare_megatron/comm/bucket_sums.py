"""Strategies for summing a rank's gradient buckets over groups, and the staging buffers they use."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.mcore.gradients.gradients import GradientSums
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, PartitionId
from spare_megatron.stacking.state_partitions import Ownership, recipients


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


class ScatteredBuckets:
    """Sums the gradients of each state partition only for the groups that host or copy it; needs stacked state."""

    def __init__(self, group: GroupId, trainer: GroupTrainer, communicator: CrossGroupCommunicator) -> None:
        assert trainer.stacked is not None, "only stacked state has recipients"
        self._group = group
        self._sums = trainer.gradients
        self._parts = trainer.gradient_parts()
        self._sums.divide([[part.place for part in parts] for parts in self._parts])
        self._num_partitions = trainer.stacked.partitions.num_partitions
        self._device = trainer.stacked.device
        self._communicator = communicator
        self._ownership: Ownership | None = None
        self._recipients: tuple[tuple[GroupId, ...], ...] = ()
        self._squares: dict[int, list[tuple[PartitionId, torch.Tensor]]] = {}
        self.is_finished = False
        self.squares: float | None = None

    def start_attempt(self, action: AttemptReduce) -> None:
        assert action.ownership is not None, "only stacked state has recipients"
        if action.ownership is not self._ownership:
            self._ownership, self._recipients = action.ownership, recipients(action.ownership)
        self._communicator.connect_pairs({(owner, other) for owner, *others in self._recipients for other in others})
        self.is_finished, self.squares = False, None

    def post(self, bucket: int, staged: torch.Tensor) -> bool:
        parts = self._parts[bucket]
        shares = [(staged[p.place], () if p.number is None else self._recipients[p.number]) for p in parts]
        return self._communicator.post_shares(shares, self._sums.extras(staged))

    def on_summed(self, bucket: int, staged: torch.Tensor) -> None:
        """Stores the squares of every partition received here; the final owner is not known yet."""
        self._squares[bucket] = [
            (part.number, self._sums.squares(staged[place]))
            for part in self._parts[bucket]
            for place in part.counted
            if part.number is not None and self._group in self._recipients[part.number]
        ]

    def places(self, bucket: int) -> Sequence[slice]:
        return [
            part.place
            for part in self._parts[bucket]
            if part.number is None or self._group in self._recipients[part.number]
        ]

    def finish_attempt(self, is_decided: Callable[[], bool]) -> None:
        """Sums the owners' squared gradients of all partitions. Collective over: rank j of every member group."""
        by_partition = torch.zeros(self._num_partitions, dtype=torch.float64, device=self._device)
        for bucket in range(len(self._parts)):
            for number, squares in self._squares[bucket]:
                if self._recipients[number][0] == self._group:
                    by_partition[number] += squares
        posted = self._communicator.post(by_partition) and self._communicator.wait(is_decided)
        if posted and self._communicator.poll():
            self.squares, self.is_finished = float(by_partition.sum()), True


def make_bucket_sums(group: GroupId, trainer: GroupTrainer, communicator: CrossGroupCommunicator) -> BucketSums:
    """Chooses how to sum: scattered for stacked optimizer state over NCCL, else all-reduce (benchmarks/RESULTS.md)."""
    if trainer.stacked is None or trainer.stacked.device.type == "cpu":
        return AllReducedBuckets(trainer.gradients, communicator)
    return ScatteredBuckets(group, trainer, communicator)
