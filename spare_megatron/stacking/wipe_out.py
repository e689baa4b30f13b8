"""Wipe-outs: a shard or a state partition has no surviving host, so that only a checkpoint or a snapshot helps.

Whatever assigns work or state after a loss checks here first. The controller turns both exceptions into StopWipeOut,
`core.controller.restart` decides what follows, and `core.saves.survival` estimates how long a run lasts until the next
one.
"""

from collections.abc import Collection, Sequence
from typing import Self

from spare_megatron.stacking.layout import GroupId, Member, PartitionId, ShardId
from spare_megatron.stacking.placement import Placement


class WipeOut(Exception):
    """Some shards, named in ascending order, have no surviving host."""

    def __init__(self, shards: tuple[ShardId, ...]) -> None:
        super().__init__(f"no surviving host for shards {', '.join(map(str, shards))}")
        self.shards = shards

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[ShardId, ...]]]:
        return type(self), (self.shards,)


class StateWipeOut(Exception):
    """Some state partitions, named in ascending order, have no surviving host."""

    def __init__(self, partitions: tuple[PartitionId, ...]) -> None:
        super().__init__(f"no surviving host for partitions {', '.join(map(str, partitions))}")
        self.partitions = partitions

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[PartitionId, ...]]]:
        return type(self), (self.partitions,)


def require_hosts(placement: Placement, alive: frozenset[GroupId], needed: Collection[int] | None = None) -> None:
    """Raises WipeOut if a needed shard (None: any) has no host that is alive.

    >>> ring = Placement(hosts=((0, 2), (1, 0), (2, 1)))
    >>> require_hosts(ring, frozenset({GroupId(0)}), needed=(0, 1))
    >>> require_hosts(ring, frozenset({GroupId(0)}))
    Traceback (most recent call last):
    spare_megatron.stacking.wipe_out.WipeOut: no surviving host for shards 2
    """
    lost = tuple(shard for shard in placement.uncovered(alive) if needed is None or shard in needed)
    if lost:
        raise WipeOut(lost)


def require_state(hosts: Sequence[Collection[Member]]) -> None:
    """Raises StateWipeOut if a state partition has no host left.

    >>> require_state([[Member(GroupId(0))], []])
    Traceback (most recent call last):
    spare_megatron.stacking.wipe_out.StateWipeOut: no surviving host for partitions 1
    """
    lost = tuple(PartitionId(number) for number, row in enumerate(hosts) if not row)
    if lost:
        raise StateWipeOut(lost)
