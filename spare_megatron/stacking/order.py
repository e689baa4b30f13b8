"""The current assignment of microbatches to owners, at microbatch or shard granularity."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.paces import EVEN, Paces
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.plans import Microbatch, Owners, Work, work_of
from spare_megatron.stacking.reorder import even_owners, patch_work, reorder_microbatches
from spare_megatron.stacking.stack_reorder import StackOrder, reorder_stacks
from spare_megatron.stacking.stack_reorder import initial_order as initial_stacks

Granularity = Literal["microbatch", "stack"]


class Order(ABC):
    """Owners of all microbatches. `unit` microbatches of a shard change owner together: one, or all of the shard."""

    def __init__(self, placement: Placement, owners: Owners, unit: int) -> None:
        self._placement = placement
        self._unit = unit
        self.work = Work(owners)
        """The work of each surviving group in a step."""

    @abstractmethod
    def for_groups(self, alive: frozenset[GroupId], paces: Paces = EVEN) -> "Order":
        """The order for exactly these groups at these paces. Raises WipeOut."""

    @abstractmethod
    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch], paces: Paces = EVEN) -> Work:
        """The orphans spread over these groups with the least makespan of the patch alone. Raises WipeOut."""

    def probing(self, group: GroupId) -> Work:
        """The work, but for its least part that the group can take from another; the order stays as it is."""
        hosted = np.flatnonzero((self._placement.host_array == group).any(axis=1))
        owners = self.work.owners.copy()
        owners[hosted[0] if hosted.size else 0, : self._unit] = group  # one that hosts no shard reads all data
        return Work(owners)


def initial_order(
    placement: Placement, num_microbatches: int, granularity: Granularity, *, fetch: int | None = None
) -> Order:
    """The order before any loss: every group has parts of min(r, m) shards that it hosts, as equal as microbatches are
    whole, and of whole shards its home shard.

    With `fetch`, as in `stacking.reorder`, any group may compute any microbatch, also groups beyond those of the
    placement, which host nothing; ValueError at stack granularity.
    """
    if granularity == "stack" and fetch is not None:
        raise ValueError("groups that can read all data take single microbatches: set the granularity to microbatch")
    if granularity == "stack":
        home = even_owners(placement, 1)[:, 0]
        return WholeShards(placement, initial_stacks(placement), home, num_microbatches)
    return SingleMicrobatches(placement, even_owners(placement, num_microbatches), fetch)


class Dealing:
    """Deals the microbatches of each step, or of each evaluation, to the groups that take part."""

    def __init__(self, first: Order, all_groups: tuple[GroupId, ...]) -> None:
        self._first = first
        self._all_groups = all_groups
        self.start_over()

    def start_over(self) -> None:
        """Returns to the order before any loss."""
        self._order, self._dealt_to = self._first, (self._all_groups, EVEN)

    def work(self, members: tuple[GroupId, ...], paces: Paces = EVEN, probe: GroupId | None = None) -> Work:
        """The work of exactly these groups at these paces. Raises WipeOut.

        If `probe` would compute nothing, it takes the least part of the work that it can.
        """
        if self._dealt_to != (members, paces):
            self._order, self._dealt_to = self._order.for_groups(frozenset(members), paces), (members, paces)
        work = self._order.work
        return work if probe is None or work.of(probe) else self._order.probing(probe)

    def patch(self, members: tuple[GroupId, ...], orphans: Sequence[Microbatch], paces: Paces = EVEN) -> Work:
        """The orphans spread over these groups. Raises WipeOut."""
        return self._order.patch(frozenset(members), orphans, paces)


class SingleMicrobatches(Order):
    """Owners follow from the groups and their paces alone: the least makespan, by the fewest moves from even ones."""

    def __init__(self, placement: Placement, owners: Owners, fetch: int | None) -> None:
        super().__init__(placement, owners, unit=1)
        self._fetch = fetch

    def for_groups(self, alive: frozenset[GroupId], paces: Paces = EVEN) -> "SingleMicrobatches":
        even = even_owners(self._placement, self.work.owners.shape[1], alive)
        reorder = reorder_microbatches(self._placement, alive, even, fetch=self._fetch, paces=paces)
        return SingleMicrobatches(self._placement, reorder.owners, self._fetch)

    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch], paces: Paces = EVEN) -> Work:
        work = patch_work(self._placement, alive, orphans, fetch=self._fetch, paces=paces)
        return work_of(work, self.work.owners.shape)


class WholeShards(Order):
    """Each shard has one owner, as in the SPARe paper. A patch assigns whole shards, too."""

    def __init__(self, placement: Placement, stacks: StackOrder, owners: Owners, num_microbatches: int) -> None:
        super().__init__(placement, np.repeat(owners[:, None], num_microbatches, axis=1), unit=num_microbatches)
        self._stacks = stacks

    def for_groups(self, alive: frozenset[GroupId], paces: Paces = EVEN) -> "WholeShards":
        reorder = reorder_stacks(self._placement, alive, self._stacks, paces=paces.in_units_of(self._unit))
        return WholeShards(self._placement, reorder.order, reorder.owners, self._unit)

    def patch(self, alive: frozenset[GroupId], orphans: Sequence[Microbatch], paces: Paces = EVEN) -> Work:
        lost = [Microbatch(shard, 0) for shard in sorted({orphan.shard for orphan in orphans})]
        shards = patch_work(self._placement, alive, lost, paces=paces.in_units_of(self._unit))
        one_each = work_of(shards, (self._placement.num_groups, 1))
        return Work(np.repeat(one_each.owners, self._unit, axis=1))
