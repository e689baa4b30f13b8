"""Gradient sums that go only to the groups that update or copy a state partition."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from spare_megatron.comm.bucket_exchange import BucketSums
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, PartitionId
from spare_megatron.stacking.state_partitions import Ownership, recipients


class ScatteredBuckets(BucketSums):
    """Sums the gradients of each state partition only for the groups that host or copy it; needs stacked state."""

    def __init__(self, group: GroupId, trainer: GroupTrainer, communicator: CrossGroupCommunicator) -> None:
        assert trainer.stacked is not None, "only stacked state has recipients"
        super().__init__(trainer.slabs[0].gradients, communicator)
        self._group = group
        self._parts = trainer.gradient_parts()
        self._sums.divide([[part.place for part in parts] for parts in self._parts])
        parts = [part for of_bucket in self._parts for part in of_bucket]
        pairs = {(part.number, name) for part in parts if part.number is not None for _, name in part.counted}
        self._places = {pair: place for place, pair in enumerate(sorted(pairs))}
        self._device = trainer.stacked.device
        self._ownership: Ownership | None = None
        self._recipients: tuple[tuple[GroupId, ...], ...] = ()
        self._squares: dict[int, list[tuple[tuple[PartitionId, str], torch.Tensor]]] = {}

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
            ((part.number, name), self._sums.squares(staged[place]))
            for part in self._parts[bucket]
            for place, name in part.counted
            if part.number is not None and self._group in self._recipients[part.number]
        ]

    def places(self, bucket: int) -> Sequence[slice]:
        return [
            part.place
            for part in self._parts[bucket]
            if part.number is None or self._group in self._recipients[part.number]
        ]

    def finish_attempt(self, is_decided: Callable[[], bool]) -> None:
        """Sums the owners' squared gradients of all partitions, by parts of the model. Only one group has any of a
        partition, so no order of additions matters. Collective over: rank j of every member group.
        """
        by_pair = torch.zeros(len(self._places) or 1, dtype=torch.float64, device=self._device)
        for bucket in range(len(self._parts)):
            for pair, squares in self._squares[bucket]:
                if self._recipients[pair[0]][0] == self._group:
                    by_pair[self._places[pair]] += squares
        posted = self._communicator.post(by_pair) and self._communicator.wait(is_decided)
        if posted and self._communicator.poll():
            found: dict[str, float] = defaultdict(float)
            for (_, name), squares in zip(self._places, by_pair.tolist(), strict=False):
                found[name] += squares
            self.squares, self.is_finished = found, True


def make_bucket_sums(group: GroupId, trainer: GroupTrainer, communicator: CrossGroupCommunicator) -> BucketSums:
    """Chooses how to sum: scattered for stacked optimizer state over NCCL, else all-reduce (benchmarks/RESULTS.md)."""
    if trainer.stacked is None or trainer.stacked.device.type == "cpu":
        return BucketSums(trainer.slabs[0].gradients, communicator)
    return ScatteredBuckets(group, trainer, communicator)
