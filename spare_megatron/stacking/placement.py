"""Placement: which groups host which shard. Fixed for a run.

A cyclic placement hosts shard s on groups (s - o) mod N for a few offsets o; two shards d apart share as many hosts as
pairs of offsets differ by d mod N, with a modular Golomb ruler at most one. Failure domains are `groups_per_domain`
groups of consecutive ids; no two hosts of a shard share one if r groups_per_domain <= N.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.golomb import check_groups_per_domain, check_redundancy, golomb_offsets
from spare_megatron.stacking.layout import GroupId, ShardId

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
T = TypeVar("T", np.int32, np.int64)
PlacementKind = Literal["golomb", "consecutive"]


class WipeOut(Exception):
    """Some shards, in ascending order, have no surviving host: only their return, a checkpoint or a snapshot helps."""

    def __init__(self, shards: tuple[ShardId, ...]) -> None:
        super().__init__(shards)
        self.shards = shards

    def __str__(self) -> str:
        return f"no surviving host for shards {', '.join(map(str, self.shards))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The hosts of every shard: `redundancy` of as many groups as shards. Every group hosts `redundancy` shards and is
    the home of exactly one; anything else raises ValueError.

    >>> ring = Placement(hosts=((0, 2), (1, 0), (2, 1)))
    >>> ring.stack(0), ring.redundancy, ring.max_shared_hosts
    ((0, 1), 2, 1)
    """

    hosts: tuple[tuple[GroupId, ...], ...]
    """`hosts[shard]`: its home group first, then in the order of the offsets."""
    host_array: IntArray = field(init=False, repr=False, compare=False)
    """The same as a read-only array of shape (num_groups, redundancy)."""
    pair_array: IntArray = field(init=False, repr=False, compare=False)
    """Read-only, same shape. Row `group` holds the flat indices of the group in `host_array`, that is
    shard * redundancy + position among the shard's hosts; home shard first."""

    def __post_init__(self) -> None:
        if len({len(row) for row in self.hosts}) != 1 or not self.hosts[0]:
            raise ValueError("every shard needs the same number of hosts, and at least one")
        hosts = np.array(self.hosts, dtype=np.int64)
        num_groups, redundancy = hosts.shape
        by_group = np.argsort(hosts.T.ravel(), kind="stable")
        ids = np.arange(num_groups)
        if not (
            np.array_equal(np.sort(hosts[:, 0]), ids)
            and np.array_equal(hosts.T.ravel()[by_group], np.repeat(ids, redundancy))
            and bool((np.diff(np.sort(hosts, axis=1), axis=1) > 0).all())
        ):
            raise ValueError(
                f"each of the {num_groups} groups has to be the home (first host) of one shard and to host "
                f"{redundancy} different shards"
            )
        # by_group is column-major (home shards first); pairs are row-major.
        pairs = (by_group % num_groups) * redundancy + by_group // num_groups
        object.__setattr__(self, "host_array", read_only(hosts))
        object.__setattr__(self, "pair_array", read_only(pairs.reshape(num_groups, redundancy)))

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return partial(Placement, hosts=self.hosts), ()

    @property
    def num_groups(self) -> int:
        return len(self.hosts)

    @property
    def redundancy(self) -> int:
        return len(self.hosts[0])

    def stack(self, group: GroupId) -> tuple[ShardId, ...]:
        """The shards of a group: its home shard first, then in the order of the offsets."""
        return tuple(ShardId(int(pair) // self.redundancy) for pair in self.pair_array[group])

    @property
    def stack_array(self) -> IntArray:
        """All stacks, shape (num_groups, redundancy)."""
        return self.pair_array // self.redundancy

    @property
    def max_shared_hosts(self) -> int:
        """The most hosts that two different shards share; above 1, a difference of offsets repeats.

        Cost: O(r^2) for cyclic placements, otherwise O(N r^2 log(N r)).
        """
        num_groups, r = self.num_groups, self.redundancy
        offsets = -self.host_array[0] % num_groups
        if np.array_equal((np.arange(num_groups)[:, None] - offsets) % num_groups, self.host_array):
            shared = np.bincount(((offsets[:, None] - offsets) % num_groups).ravel(), minlength=num_groups)
            return int(shared[1:].max(initial=0))
        stacks = self.stack_array
        first, second = np.nonzero(~np.eye(r, dtype=bool))
        keys = (stacks[:, first] * num_groups + stacks[:, second]).ravel()
        return int(np.unique(keys, return_counts=True)[1].max(initial=0))

    def max_hosts_in_domain(self, groups_per_domain: int) -> int:
        """The most hosts of a shard in one domain; 1 is the best, and possible if r groups_per_domain <= N."""
        check_groups_per_domain(groups_per_domain)
        domains = np.sort(self.host_array // groups_per_domain, axis=1)
        most = 1
        while (domains[:, most:] == domains[:, : self.redundancy - most]).any():
            most += 1
        return most

    def alive_mask(self, alive: frozenset[GroupId]) -> BoolArray:
        """Whether each group is alive. Ids from `num_groups` on, of groups that host nothing, make it longer."""
        ids = np.fromiter(alive, dtype=np.int64, count=len(alive))
        if ids.min(initial=0) < 0:
            raise ValueError(f"group ids begin with 0, got {ids.min()}")
        mask = np.zeros(max(self.num_groups, int(ids.max(initial=0)) + 1), dtype=np.bool_)
        mask[ids] = True
        return mask

    def uncovered(self, alive: frozenset[GroupId]) -> tuple[ShardId, ...]:
        """Shards without a surviving host, ascending; any of them is a wipe-out. Cost: O(N r)."""
        lost = ~self.alive_mask(alive)[self.host_array].any(axis=1)
        return tuple(ShardId(int(shard)) for shard in np.flatnonzero(lost))

    def require_hosts(self, alive: frozenset[GroupId], needed: Collection[int] | None = None) -> None:
        """Raises WipeOut if a needed shard (None: any) has no host that is alive.

        >>> ring = Placement(hosts=((0, 2), (1, 0), (2, 1)))
        >>> ring.require_hosts(frozenset({GroupId(0)}), needed=(0, 1))
        >>> ring.require_hosts(frozenset({GroupId(0)}))
        Traceback (most recent call last):
        spare_megatron.stacking.placement.WipeOut: no surviving host for shards 2
        """
        lost = tuple(shard for shard in self.uncovered(alive) if needed is None or shard in needed)
        if lost:
            raise WipeOut(lost)


def make_placement(kind: PlacementKind, num_groups: int, redundancy: int, groups_per_domain: int = 1) -> Placement:
    """The cyclic placement of N groups and shards, r hosts each. Raises ValueError if the arguments do not fit.

    `golomb` has the offsets of a modular Golomb ruler; `consecutive` 0 to r - 1, for comparison. A domain, d groups of
    consecutive ids (the last one may have fewer), holds at most ceil(r min(d, N) / N) hosts of a shard.

    >>> make_placement("golomb", 7, 3).hosts[0]
    (0, 6, 4)
    """
    if kind not in ("golomb", "consecutive"):
        raise ValueError(f"placement kind {kind!r} is unknown; known: 'golomb', 'consecutive'")
    check_redundancy(num_groups, redundancy)
    check_groups_per_domain(groups_per_domain)
    if kind == "golomb":
        offsets = golomb_offsets(num_groups, redundancy, groups_per_domain)
    elif groups_per_domain == 1:
        offsets = tuple(range(redundancy))
    else:
        raise ValueError(
            f"groups_per_domain={groups_per_domain} keeps hosts apart, and placement=consecutive puts them beside each "
            "other; set placement to golomb or groups_per_domain to 1"
        )
    return Placement(
        hosts=tuple(tuple(GroupId((shard - o) % num_groups) for o in offsets) for shard in range(num_groups))
    )


def read_only(array: npt.NDArray[T]) -> npt.NDArray[T]:
    array.setflags(write=False)
    return array
