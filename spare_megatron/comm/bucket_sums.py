"""The staging buffers of one rank: for the buckets of its reductions, and in between for the rounds of its gathers."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.actions import AttemptReduce
from spare_megatron.mcore.gradients import NUM_EXTRAS
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, SliceId
from spare_megatron.stacking.state_partitions import Ownership, recipients


class Staging:
    """A few flat tensors of one size, made when they are first needed and used again.

    What takes part in a transfer that is given up is not to be given back, for it may still be written.

    Args:
        make: Makes one, uninitialized.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of each."""
        if not self._free:
            self._free.append(self._make())
        return self._free[-1].nbytes

    def take(self) -> Tensor:
        """A tensor that nobody else uses."""
        return self._free.pop() if self._free else self._make()

    def give_back(self, tensor: Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._free.append(tensor)


class BucketSums(Protocol):
    """The sums of the buckets of one rank.

    Attributes:
        is_concluded: Whether all is here that takes more than the sums of the buckets.
        squares: As in `GroupTrainer.update`.
    """

    is_concluded: bool
    squares: float | None

    def begin(self, action: AttemptReduce, /) -> None:
        """An attempt begins. What was posted before is settled."""

    def post(self, bucket: int, staged: torch.Tensor, /) -> bool:
        """Starts to sum a staged bucket, as `CrossGroupCommunicator.post` does."""

    def arrived(self, bucket: int, staged: torch.Tensor, /) -> None:
        """The bucket is complete here."""

    def places(self, bucket: int, /) -> Sequence[slice]:
        """Where in the bucket sums come to this rank."""

    def conclude(self, is_decided: Callable[[], bool], /) -> None:
        """Exchanges what takes more than the sums of the buckets. All of these are complete here."""


class AllReducedBuckets:
    """Everybody gets everything."""

    is_concluded = True
    squares: float | None = None

    def __init__(self, communicator: CrossGroupCommunicator) -> None:
        self._communicator = communicator

    def begin(self, _action: AttemptReduce) -> None:
        """Nothing depends on who takes part."""

    def post(self, _bucket: int, staged: torch.Tensor) -> bool:
        """All of it is summed as one."""
        return self._communicator.post(staged)

    def arrived(self, _bucket: int, _staged: torch.Tensor) -> None:
        """It is here as a whole."""

    def places(self, _bucket: int) -> Sequence[slice]:
        """Everywhere."""
        return (slice(None),)

    def conclude(self, _is_decided: Callable[[], bool]) -> None:
        """Nothing is missing."""


class ScatteredBuckets:
    """Every slice's gradients go to those who update it.

    Args:
        group: This rank's group.
        trainer: The rank's part of the model, with stacked state.
        communicator: The rank's cross-group communicator.
    """

    def __init__(self, group: GroupId, trainer: GroupTrainer, communicator: CrossGroupCommunicator) -> None:
        assert trainer.stacked is not None, "only slices have recipients"
        self._group = group
        self._sums = trainer.gradients
        self._parts = trainer.gradient_parts()
        self._num_slices = trainer.stacked.slices.num_slices
        self._device = trainer.stacked.device
        self._communicator = communicator
        self._ownership: Ownership | None = None
        self._recipients: tuple[tuple[GroupId, ...], ...] = ()
        self._squares: dict[int, list[tuple[SliceId, torch.Tensor]]] = {}
        self.is_concluded = False
        self.squares: float | None = None

    def begin(self, action: AttemptReduce) -> None:
        """Sums go to the recipients of this attempt."""
        assert action.ownership is not None, "only slices have recipients"
        if action.ownership is not self._ownership:
            self._ownership, self._recipients = action.ownership, recipients(action.ownership)
        self.is_concluded, self.squares = False, None

    def post(self, bucket: int, staged: torch.Tensor) -> bool:
        """Each part is summed for itself."""
        parts = self._parts[bucket]
        shares = [(staged[p.place], () if p.number is None else self._recipients[p.number]) for p in parts]
        return self._communicator.post_shares(shares, staged[-NUM_EXTRAS:])

    def arrived(self, bucket: int, staged: torch.Tensor) -> None:
        """Whoever has the sum keeps its squares: who owns the slice in the end, is not known yet."""
        self._squares[bucket] = [
            (part.number, self._sums.squares(staged[place]))
            for part in self._parts[bucket]
            for place in part.counted
            if part.number is not None and self._group in self._recipients[part.number]
        ]

    def places(self, bucket: int) -> Sequence[slice]:
        """What this group gets."""
        return [
            part.place
            for part in self._parts[bucket]
            if part.number is None or self._group in self._recipients[part.number]
        ]

    def conclude(self, is_decided: Callable[[], bool]) -> None:
        """Lets all know the squares of every slice, from its owner: added to zeros alone, whoever that is.

        Collective over: rank j of every member group.
        """
        by_slice = torch.zeros(self._num_slices, dtype=torch.float64, device=self._device)
        for bucket in range(len(self._parts)):
            for number, squares in self._squares[bucket]:
                if self._recipients[number][0] == self._group:
                    by_slice[number] += squares
        posted = self._communicator.post(by_slice) and self._communicator.wait(is_decided)
        if posted and self._communicator.poll():
            self.squares, self.is_concluded = float(by_slice.sum()), True


def make_bucket_sums(group: GroupId, trainer: GroupTrainer, communicator: CrossGroupCommunicator) -> BucketSums:
    """Scattered over NCCL, where the state is stacked.

    gloo's sums for one member take as long as those for all, though they send fewer bytes (benchmarks/RESULTS.md).
    """
    if trainer.stacked is None or trainer.stacked.device.type == "cpu":
        return AllReducedBuckets(communicator)
    return ScatteredBuckets(group, trainer, communicator)
