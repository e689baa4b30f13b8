"""New owners for the microbatches of lost groups: least makespan, then fewest moves."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.matching import SpreadProblem, least_spread
from spare_megatron.stacking.placement import IntArray, Placement
from spare_megatron.stacking.plans import NO_OWNER, Microbatch, Owners
from spare_megatron.stacking.wipe_out import require_hosts

ReorderPath = Literal["unchanged", "orphans", "chains"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reorder:
    """Owners after a reorder.

    Attributes:
        owners: Read-only, shape (num_shards, m): the owner of each microbatch.
        makespan: Largest number of microbatches of any group.
        num_moves: Microbatches whose owner changed, those of lost groups included.
        path: "orphans" if only microbatches without a surviving owner moved, else "chains".
    """

    owners: Owners
    makespan: int
    num_moves: int
    path: ReorderPath


def least_load(num_groups: int, num_alive: int, num_microbatches: int) -> int:
    """Lower bound on the makespan of any placement: ceil(N m / alive), with m microbatches per shard.

    >>> least_load(200, 199, 16)
    17
    """
    return -(-num_groups * num_microbatches // num_alive)


def initial_owners(placement: Placement, num_microbatches: int) -> Owners:
    """Owners before any loss: each group owns its home shard. Read-only, shape (num_shards, m)."""
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches per shard; a shard needs at least 1")
    return _read_only(np.repeat(placement.host_array[:, :1], num_microbatches, axis=1).astype(np.int32))


def reorder_microbatches(
    placement: Placement, alive: frozenset[GroupId], owners: Owners, *, left_out: Sequence[ShardId] = ()
) -> Reorder:
    """Owners of least makespan among surviving groups and, at that makespan, with the fewest moves.

    The present owners, of shape (num_shards, m), may come from any earlier state. A microbatch whose owner is not a
    surviving host of its shard always moves. Shards `left_out` keep their owners; any other without a host raises
    WipeOut.

    Notes:
        Both optima are exact: see `stacking.matching`. Ties: a host keeps its lowest indices; the others go in
            ascending order of index to hosts in ascending order of id. Cost: O(N (m + r) r) and, per length of
            displacement chains, one maximum flow over the pairs they touch.
    """
    if owners.ndim != 2 or len(owners) != placement.num_groups:
        raise ValueError(f"owners of shape {owners.shape} do not fit {placement.num_groups} shards")
    is_alive = placement.alive_mask(alive)
    require_hosts(placement, alive, set(range(placement.num_groups)).difference(left_out))
    kept = np.where(is_alive[placement.host_array], _count_owned(placement, owners), 0)
    demand = np.full(placement.num_groups, owners.shape[1], dtype=np.int64)
    kept[list(left_out)] = demand[list(left_out)] = 0
    problem = SpreadProblem(
        placement=placement, is_alive=is_alive, demand=demand, free=kept.ravel(), start=kept.ravel()
    )
    spread = least_spread(problem)
    num_orphans = int(demand.sum() - kept.sum())
    path: ReorderPath = "chains" if spread.cost > num_orphans else "orphans" if num_orphans else "unchanged"
    return Reorder(
        owners=_read_only(_hand_over(placement, owners, kept, spread.flow.reshape(kept.shape))),
        makespan=int(np.bincount(placement.host_array.ravel(), weights=spread.flow).max()),
        num_moves=spread.cost,
        path=path,
    )


def patch_work(
    placement: Placement, alive: frozenset[GroupId], orphans: Sequence[Microbatch]
) -> dict[GroupId, tuple[Microbatch, ...]]:
    """Spreads the microbatches that lost groups still owed in this step over surviving hosts of their shards, by group.

    The patch alone has the least makespan. Groups and microbatches are ascending; ties as in `reorder_microbatches`,
    within a shard lower indices to lower group ids. Raises WipeOut if a shard has no surviving host.
    """
    items = sorted(orphans)
    if len(set(items)) != len(items):
        raise ValueError("an orphaned microbatch is named twice; it would be counted twice")
    shards = np.array([item.shard for item in items], dtype=np.int64)
    demand = np.bincount(shards, minlength=placement.num_groups).astype(np.int64)
    require_hosts(placement, alive, {item.shard for item in items})
    nothing = np.zeros(placement.host_array.size, dtype=np.int64)
    problem = SpreadProblem(
        placement=placement, is_alive=placement.alive_mask(alive), demand=demand, free=nothing, start=nothing
    )
    flow = least_spread(problem).flow.reshape(placement.host_array.shape)
    work: dict[GroupId, list[Microbatch]] = {}
    for item, group in zip(items, _groups_in_order(placement.host_array, flow), strict=True):
        work.setdefault(GroupId(int(group)), []).append(item)
    return {group: tuple(work[group]) for group in sorted(work)}


def assign_to_least_loaded(owners: Owners, items: Sequence[Microbatch], alive: frozenset[GroupId]) -> Owners:
    """Owners with some microbatches assigned to the least loaded surviving groups (at least one), hosts or not.

    Ties go to the lowest id; items in ascending order. No load exceeds the larger of its earlier value and ceil(total /
    alive), so the makespan is least. Cost: O(n log N) for n items.
    """
    changed = owners.copy()
    for item in items:
        changed[item.shard, item.index] = NO_OWNER
    present = np.bincount(changed[changed != NO_OWNER].ravel(), minlength=len(owners))
    loads = [(int(present[group]), group) for group in sorted(alive)]
    heapq.heapify(loads)
    for item in sorted(items):
        load, group = loads[0]
        changed[item.shard, item.index] = group
        heapq.heapreplace(loads, (load + 1, group))
    return _read_only(changed)


def _count_owned(placement: Placement, owners: Owners) -> IntArray:
    """For each shard and each of its hosts, the microbatches the host owns now."""
    # Transposed, because sums over the first axis are several times faster.
    by_index = np.ascontiguousarray(owners.T)
    hosts = placement.host_array.T.astype(owners.dtype)
    columns = [np.add.reduce(by_index == column, axis=0, dtype=np.int16) for column in hosts]
    return np.stack(columns, axis=1).astype(np.int64)


def _groups_in_order(hosts: IntArray, counts: IntArray) -> IntArray:
    """Shard by shard, each host repeated by its count; hosts of a shard in ascending order of ids."""
    by_id = np.argsort(hosts, axis=1)
    return np.repeat(np.take_along_axis(hosts, by_id, 1).ravel(), np.take_along_axis(counts, by_id, 1).ravel())


def _hand_over(placement: Placement, owners: Owners, kept: IntArray, flow: IntArray) -> Owners:
    """The present owners, changed so that each host owns as many microbatches of each shard as the flow says."""
    stays = np.minimum(kept, flow)
    rows = np.flatnonzero(stays.sum(axis=1) < flow.sum(axis=1))
    hosts, old = placement.host_array[rows], owners[rows]
    is_kept = np.zeros(old.shape, dtype=np.bool_)
    for column in range(placement.redundancy):
        mine = old == hosts[:, [column]]
        is_kept |= mine & (np.cumsum(mine, axis=1) <= stays[rows, column][:, None])
    old[~is_kept] = _groups_in_order(hosts, flow[rows] - stays[rows])
    changed = owners.copy()
    changed[rows] = old
    return changed


def _read_only(array: Owners) -> Owners:
    array.setflags(write=False)
    return array
