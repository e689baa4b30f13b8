"""Which groups host which shard. Fixed for a run.

A cyclic placement hosts shard s on the groups (s - o) mod N for a few offsets o. Two shards d apart then share as
many hosts as there are pairs of offsets that differ by d mod N, so offsets of a modular Golomb ruler
(`stacking.golomb`)
let any two shards share at most one host, and the loss of a few groups never falls on the same few neighbours.

Groups may stand in domains (racks, power): `groups_per_domain` groups of consecutive ids each, that may be lost
together. Then no two hosts of a shard are in one domain where that is possible, which is r groups_per_domain <= N.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.golomb import check_groups_per_domain, check_redundancy
from spare_megatron.stacking.golomb import golomb_offsets as golomb_offsets
from spare_megatron.stacking.layout import GroupId, ShardId

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
PlacementKind = Literal["golomb", "consecutive"]


class WipeOut(Exception):
    """Some shards have no surviving host: only a checkpoint helps.

    Attributes:
        shards: Those shards, in ascending order.
    """

    def __init__(self, shards: tuple[ShardId, ...]) -> None:
        super().__init__(f"no surviving host for shards {', '.join(map(str, shards))}")
        self.shards = shards

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[ShardId, ...]]]:
        return type(self), (self.shards,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The hosts of every shard.

    There are as many shards as groups; every shard has `redundancy` hosts, every group hosts `redundancy` shards
    and is the home of exactly one.

    Attributes:
        hosts: `hosts[shard]`, the shard's home group first, then in the order of the offsets.
        host_array: The same as a read-only array of shape (num_groups, redundancy).
        pair_array: Read-only, same shape. Row `group` holds the flat indices into `host_array` at which the group
            stands, that is shard * redundancy + position of the group among the shard's hosts; home shard first.

    Raises:
        ValueError: The hosts are not of this form.

    >>> ring = Placement(hosts=((0, 2), (1, 0), (2, 1)))
    >>> ring.stack(0), ring.redundancy, ring.max_shared_hosts
    ((0, 1), 2, 1)
    """

    hosts: tuple[tuple[GroupId, ...], ...]
    host_array: IntArray = field(init=False, repr=False, compare=False)
    pair_array: IntArray = field(init=False, repr=False, compare=False)

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
        # by_group counts column by column (home shards first); a pair counts row by row.
        pairs = (by_group % num_groups) * redundancy + by_group // num_groups
        object.__setattr__(self, "host_array", _read_only(hosts))
        object.__setattr__(self, "pair_array", _read_only(pairs.reshape(num_groups, redundancy)))

    def __reduce__(self) -> tuple[object, tuple[tuple[tuple[GroupId, ...], ...]]]:
        return _placement, (self.hosts,)

    @property
    def num_groups(self) -> int:
        return len(self.hosts)

    @property
    def redundancy(self) -> int:
        return len(self.hosts[0])

    def stack(self, group: GroupId) -> tuple[ShardId, ...]:
        """The shards a group holds, its home shard first, then in the order of the offsets."""
        return tuple(ShardId(int(pair) // self.redundancy) for pair in self.pair_array[group])

    @property
    def stack_array(self) -> IntArray:
        """All stacks, of shape (num_groups, redundancy)."""
        return self.pair_array // self.redundancy

    @property
    def max_shared_hosts(self) -> int:
        """The most hosts that two different shards have in common; 0 when no two share any.

        1 is the best a redundancy of 2 or more allows. More means that the offsets had to repeat a difference.
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
        """The most hosts of a shard that one domain holds; 1 is the best, and possible if r groups_per_domain <= N.

        Raises:
            ValueError: There is less than one group in a domain.
        """
        check_groups_per_domain(groups_per_domain)
        domains = np.sort(self.host_array // groups_per_domain, axis=1)
        most = 1
        while (domains[:, most:] == domains[:, : self.redundancy - most]).any():
            most += 1
        return most

    def alive_mask(self, alive: frozenset[GroupId]) -> BoolArray:
        """`mask[group]`: is the group alive?

        Raises:
            ValueError: An id is not that of a group.
        """
        ids = np.fromiter(alive, dtype=np.int64, count=len(alive))
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_groups):
            raise ValueError(f"group ids go from 0 to {self.num_groups - 1}, got {ids.min()} to {ids.max()}")
        mask = np.zeros(self.num_groups, dtype=np.bool_)
        mask[ids] = True
        return mask

    def uncovered(self, alive: frozenset[GroupId]) -> tuple[ShardId, ...]:
        """The shards without a surviving host, in ascending order: not empty means wipe-out. Cost: O(N r)."""
        lost = ~self.alive_mask(alive)[self.host_array].any(axis=1)
        return tuple(ShardId(int(shard)) for shard in np.flatnonzero(lost))


def make_placement(kind: PlacementKind, num_groups: int, redundancy: int, groups_per_domain: int = 1) -> Placement:
    """The cyclic placement of a kind.

    Args:
        kind: "golomb" for offsets of a modular Golomb ruler; "consecutive" for offsets 0 to r - 1, which exists for
            comparison.
        num_groups: Data-parallel groups N, at least 1; as many shards.
        redundancy: Hosts per shard r, from 1 to N.
        groups_per_domain: Groups of consecutive ids in a domain d, at least 1; the last domain may have fewer. Of the
            hosts of a shard at most ceil(r min(d, N) / N) are in one domain; `Placement.max_hosts_in_domain` tells.

    Raises:
        ValueError: The redundancy or the domains do not fit, or the kind is unknown.

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
            f"spare.groups_per_domain={groups_per_domain} keeps hosts apart, and spare.placement=consecutive puts them "
            "beside each other; set spare.placement to golomb or spare.groups_per_domain to 1"
        )
    return Placement(
        hosts=tuple(tuple(GroupId((shard - o) % num_groups) for o in offsets) for shard in range(num_groups))
    )


def _placement(hosts: tuple[tuple[GroupId, ...], ...]) -> Placement:
    return Placement(hosts=hosts)


def _read_only(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array
