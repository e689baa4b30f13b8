"""The present order: who owns which microbatch until a group is lost."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from spare_megatron.core.placement import Placement
from spare_megatron.core.reorder import Owners, initial_owners, patch_work, reorder_microbatches
from spare_megatron.core.stepplan import Microbatch, Work
from spare_megatron.core.topology import GroupId, ShardId

Granularity = Literal["microbatch", "stack"]


class Order(Protocol):
    """Owners of all microbatches, at one of the two granularities."""

    @property
    def work(self) -> Work:
        """What each surviving group computes in a step."""

    def without_lost(self, alive: frozenset[GroupId]) -> "Order":
        """The order after the losses that leave these groups, with the fewest moves.

        Raises:
            WipeOut: Some shard has no surviving host.
        """

    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch]) -> Work:
        """The orphans spread over these groups with the least makespan of the patch alone.

        Raises:
            WipeOut: Some shard of an orphan has no surviving host.
        """


def initial_order(placement: Placement, num_microbatches: int, granularity: Granularity) -> Order:
    """The order while nothing is lost: every group owns its home shard."""
    return SingleMicrobatches(placement, initial_owners(placement, num_microbatches))


class SingleMicrobatches:
    """Each microbatch has an owner of its own."""

    def __init__(self, placement: Placement, owners: Owners) -> None:
        self._placement = placement
        self._owners = owners
        self.work = _work_of(owners)

    def without_lost(self, alive: frozenset[GroupId]) -> "SingleMicrobatches":
        return SingleMicrobatches(self._placement, reorder_microbatches(self._placement, alive, self._owners).owners)

    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch]) -> Work:
        return Work(patch_work(self._placement, alive, orphans))


def _work_of(owners: Owners) -> Work:
    """Each owner's microbatches in ascending order."""
    by_owner = np.argsort(owners, axis=None, kind="stable")
    shards, indices = np.divmod(by_owner, owners.shape[1])
    groups, starts = np.unique(owners.ravel()[by_owner], return_index=True)
    items = [Microbatch(ShardId(s), k) for s, k in zip(shards.tolist(), indices.tolist(), strict=True)]
    ends = [*starts.tolist()[1:], len(items)]
    return Work(
        {GroupId(g): items[start:end] for g, start, end in zip(groups.tolist(), starts.tolist(), ends, strict=True)}
    )
