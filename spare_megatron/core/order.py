"""The present order: who owns which microbatch until a group is lost."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from spare_megatron.core.placement import Placement
from spare_megatron.core.reorder import initial_owners, patch_work, reorder_microbatches
from spare_megatron.core.stack_reorder import StackOrder, reorder_stacks
from spare_megatron.core.stack_reorder import initial_order as initial_stacks
from spare_megatron.core.stepplan import Microbatch, Owners, Work, work_of
from spare_megatron.core.topology import GroupId

Granularity = Literal["microbatch", "stack"]


class Order(Protocol):
    """Owners of all microbatches, at one of the two granularities."""

    @property
    def work(self) -> Work:
        """What each surviving group computes in a step."""

    def for_groups(self, alive: frozenset[GroupId]) -> "Order":
        """The order for just these groups, some lost or back since this one, with the fewest moves.

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
    if granularity == "stack":
        home = initial_owners(placement, 1)[:, 0]
        return WholeShards(placement, initial_stacks(placement), home, num_microbatches)
    return SingleMicrobatches(placement, initial_owners(placement, num_microbatches))


class SingleMicrobatches:
    """Each microbatch has an owner of its own."""

    def __init__(self, placement: Placement, owners: Owners) -> None:
        self._placement = placement
        self._owners = owners
        self.work = Work(owners)

    def for_groups(self, alive: frozenset[GroupId]) -> "SingleMicrobatches":
        return SingleMicrobatches(self._placement, reorder_microbatches(self._placement, alive, self._owners).owners)

    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch]) -> Work:
        return work_of(patch_work(self._placement, alive, orphans), self._owners.shape)


class WholeShards:
    """Each shard has one owner, as in the SPARe paper. A patch hands out whole shards, too."""

    def __init__(self, placement: Placement, stacks: StackOrder, owners: Owners, num_microbatches: int) -> None:
        self._placement = placement
        self._stacks = stacks
        self._num_microbatches = num_microbatches
        self.work = Work(np.repeat(owners[:, None], num_microbatches, axis=1))

    def for_groups(self, alive: frozenset[GroupId]) -> "WholeShards":
        reorder = reorder_stacks(self._placement, alive, self._stacks)
        return WholeShards(self._placement, reorder.order, reorder.owners, self._num_microbatches)

    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch]) -> Work:
        shards = patch_work(
            self._placement, alive, [Microbatch(shard, 0) for shard in sorted({o.shard for o in orphans})]
        )
        one_each = work_of(shards, (self._placement.num_groups, 1))
        return Work(np.repeat(one_each.owners, self._num_microbatches, axis=1))
