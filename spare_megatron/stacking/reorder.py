"""New owners for the microbatches of lost groups: least makespan, then least cold work, then fewest moves.

A microbatch is cold for a group that does not host its shard. Groups compute cold microbatches only where `fetch` is
given: the time from the start of a step or patch until a group has their data, in thousandths of the time of one
microbatch. A group with h hosted and c > 0 cold microbatches needs the time of max(h + c, fetch / 1000 + c).

Where surviving groups differ in `paces`, the makespan is a time: the largest pace x rounds of any group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.matching import Spread, SpreadProblem, least_spread
from spare_megatron.stacking.paces import EVEN, LIKE, ONE_BY_ONE, Paces
from spare_megatron.stacking.placement import BoolArray, IntArray, Placement, read_only
from spare_megatron.stacking.plans import Microbatch, Owners

ReorderPath = Literal["unchanged", "orphans", "chains"]

_COLD = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reorder:
    """Owners after a reorder."""

    owners: Owners
    """Read-only, shape (num_shards, m): the owner of each microbatch."""
    makespan: int
    """Largest number of microbatches of any group."""
    num_moves: int
    """Microbatches whose owner changed, those of lost groups included, and all cold ones."""
    path: ReorderPath
    """`orphans` if only microbatches without a surviving owner moved, else `chains`."""


def even_owners(placement: Placement, num_microbatches: int, alive: frozenset[GroupId] | None = None) -> Owners:
    """Microbatch i of a shard for its host i mod r, and those of hosts that are not alive (all are, if None) for the
    others in turn. Read-only, shape (num_shards, m).

    If all are alive each group has m, of min(r, m) shards: those of one that is lost go to the other hosts of all of
    them, up to r (r - 1) groups in a Golomb placement, so that a patch takes a fraction of what m microbatches of one
    shard would. A shard without a host keeps its owners.

    >>> from spare_megatron.stacking.placement import make_placement
    >>> placement = make_placement("golomb", 4, 2, 1)
    >>> even_owners(placement, 4).tolist()[1], even_owners(placement, 4, frozenset({0, 2, 3})).tolist()[1]
    ([1, 0, 1, 0], [0, 0, 0, 0])
    """
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches per shard; a shard needs at least 1")
    hosts, turns = placement.host_array, np.arange(num_microbatches) % placement.redundancy
    owners = hosts[:, turns].astype(np.int32)
    if alive is None:
        return read_only(owners)
    is_alive = placement.alive_mask(alive)[hosts]
    num_alive = is_alive.sum(axis=1, keepdims=True)
    first = np.take_along_axis(hosts, np.argsort(~is_alive, axis=1, kind="stable"), axis=1)
    is_orphan = ~is_alive[:, turns] & (num_alive > 0)
    number = is_orphan.cumsum(axis=1) - 1 + np.arange(len(hosts))[:, None]  # begins with another host in each shard
    others = np.take_along_axis(first, number % np.maximum(num_alive, 1), axis=1)
    return read_only(np.where(is_orphan, others, owners).astype(np.int32))


def reorder_microbatches(
    placement: Placement, alive: frozenset[GroupId], owners: Owners, *, fetch: int | None = None, paces: Paces = EVEN
) -> Reorder:
    """Owners of least makespan among surviving groups, then with the least cold work, then with the fewest moves.

    The present owners, of shape (num_shards, m), may come from any earlier state. A microbatch whose owner is not a
    surviving host of its shard always moves. Groups with ids from `num_groups` on host nothing: their work is cold.
    Without `fetch` a shard without a surviving host raises WipeOut; with it, only the loss of all groups does.

    All optima are exact (`stacking.matching`). Ties: a host keeps its lowest indices; the others go in ascending order
    of index to hosts in ascending order of id. The last of a shard are its cold ones, which go over all shards to
    groups likewise. Cost: O(N (m + r) r) and, per length of displacement chains, a maximum flow over their pairs.
    """
    if owners.ndim != 2 or len(owners) != placement.num_groups:
        raise ValueError(f"owners of shape {owners.shape} do not fit {placement.num_groups} shards")
    is_alive = placement.alive_mask(alive)
    if fetch is None or not alive:
        placement.require_hosts(alive)
    kept = np.where(is_alive[placement.host_array], _count_owned(placement, owners), 0)
    demand = np.full(placement.num_groups, owners.shape[1], dtype=np.int64)
    spread = least_spread(_problem(placement, is_alive, demand, kept.ravel(), fetch, paces))
    num_orphans = int(demand.sum() - kept.sum())
    path: ReorderPath = "chains" if spread.num_moves > num_orphans else "orphans" if num_orphans else "unchanged"
    changed = _hand_over(placement, owners, kept, spread)
    return Reorder(
        owners=read_only(changed),
        makespan=int(np.bincount(changed.ravel()).max()),
        num_moves=spread.num_moves,
        path=path,
    )


def patch_work(
    placement: Placement,
    alive: frozenset[GroupId],
    orphans: Sequence[Microbatch],
    *,
    fetch: int | None = None,
    paces: Paces = EVEN,
) -> dict[GroupId, tuple[Microbatch, ...]]:
    """Spreads the microbatches that lost groups still owed in this step over surviving hosts of their shards and, with
    `fetch`, over all survivors, by group.

    The patch alone has the least makespan, then the least cold work. Groups and microbatches are ascending; ties and
    WipeOut as in `reorder_microbatches`, within a shard lower indices to lower ids of hosts.
    """
    items = sorted(orphans)
    if len(set(items)) != len(items):
        raise ValueError("an orphaned microbatch is named twice; it would be counted twice")
    shards = np.array([item.shard for item in items], dtype=np.int64)
    demand = np.bincount(shards, minlength=placement.num_groups).astype(np.int64)
    if fetch is None or not alive:
        placement.require_hosts(alive, {item.shard for item in items})
    nothing = np.zeros(placement.host_array.size, dtype=np.int64)
    spread = least_spread(_problem(placement, placement.alive_mask(alive), demand, nothing, fetch, paces))
    flow = spread.flow.reshape(placement.host_array.shape)
    groups = _groups_in_order(placement.host_array, flow, spread.cold, spread.lent)
    work: dict[GroupId, list[Microbatch]] = {}
    for item, group in zip(items, groups, strict=True):
        work.setdefault(GroupId(int(group)), []).append(item)
    return {group: tuple(work[group]) for group in sorted(work)}


def _problem(
    placement: Placement, is_alive: BoolArray, demand: IntArray, kept: IntArray, fetch: int | None, paces: Paces
) -> SpreadProblem:
    """To spread this demand, of which each pair keeps a part. Rounds count only where groups are unlike."""
    unlike = paces.among(is_alive)
    pace, lacking = (LIKE, 0) if unlike is None else unlike
    return SpreadProblem(
        placement=placement,
        is_alive=is_alive,
        demand=demand,
        free=kept,
        pace=pace,
        rounds=ONE_BY_ONE if unlike is None else paces.rounds,
        lacking=lacking,
        fetch=fetch,
    )


def _count_owned(placement: Placement, owners: Owners) -> IntArray:
    """For each shard and each of its hosts, the microbatches the host owns now."""
    # Transposed, because sums over the first axis are several times faster.
    by_index = np.ascontiguousarray(owners.T)
    hosts = placement.host_array.T.astype(owners.dtype)
    columns = [np.add.reduce(by_index == column, axis=0, dtype=np.int16) for column in hosts]
    return np.stack(columns, axis=1).astype(np.int64)


def _groups_in_order(hosts: IntArray, counts: IntArray, cold: IntArray, lent: IntArray) -> IntArray:
    """Shard by shard, each host repeated by its count, in ascending order of ids, then the groups of its cold units:
    over all shards each group repeated by what it takes of them, in ascending order of ids.
    """
    by_id = np.argsort(hosts, axis=1)
    groups = np.column_stack((np.take_along_axis(hosts, by_id, 1), np.full(len(hosts), _COLD)))
    times = np.column_stack((np.take_along_axis(counts, by_id, 1), cold))
    ordered = np.repeat(groups.ravel(), times.ravel())
    ordered[ordered == _COLD] = np.repeat(np.arange(lent.size), lent)
    return ordered


def _hand_over(placement: Placement, owners: Owners, kept: IntArray, spread: Spread) -> Owners:
    """The present owners, changed so that each group owns as many microbatches of each shard as the spread says."""
    flow = spread.flow.reshape(kept.shape)
    stays = np.minimum(kept, flow)
    rows = np.flatnonzero(stays.sum(axis=1) < owners.shape[1])
    hosts, old = placement.host_array[rows], owners[rows]
    is_kept = np.zeros(old.shape, dtype=np.bool_)
    for column in range(placement.redundancy):
        mine = old == hosts[:, [column]]
        is_kept |= mine & (np.cumsum(mine, axis=1) <= stays[rows, column][:, None])
    old[~is_kept] = _groups_in_order(hosts, flow[rows] - stays[rows], spread.cold[rows], spread.lent)
    changed = owners.copy()
    changed[rows] = old
    return changed
