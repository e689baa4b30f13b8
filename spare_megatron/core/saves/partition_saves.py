"""Which group writes which state partition of a checkpoint, and when the checkpoint is complete.

Each partition is written by its owner, or if that is lost by the next host, and all else by the saving group, which
publishes the checkpoint once everything is written. If that group, or a partition with all its hosts, is lost, nothing
becomes visible. Two hosts may write the same partition; both write the same bits.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.stacking.layout import Member, PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePartitions:
    """Write these state partitions and report it."""

    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Everything is written: make the checkpoint visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    reason: str


def next_move(
    save: SaveCheckpoint, member: Member, written: Collection[PartitionId], lost: Collection[Member]
) -> WritePartitions | Publish | Abandon | None:
    """What a group, a host of some partition or the saving one, is to do next for a save; None while others act.
    `written`: partitions that groups report as written.

    >>> from spare_megatron.stacking.layout import GroupId
    >>> a, b, c = (Member(GroupId(group)) for group in range(3))
    >>> ring = ((a, c), (a, b), (b, c))
    >>> save = SaveCheckpoint(step=4, member=a, voters=(a, b, c), epoch=0, hosts=ring, owners=(a, b, c))
    >>> next_move(save, a, [], [])
    WritePartitions(partitions=(0,))
    >>> next_move(save, a, [], [b])
    WritePartitions(partitions=(0, 1))
    >>> next_move(save, c, [2], [])
    """
    if save.member in lost:
        return Abandon(reason=f"group {save.member.group}, which saves, is lost")
    writers = dict(_writers(save, lost))
    missing = [number for number in writers if number not in written]
    gone = [number for number in missing if writers[number] is None]
    if gone:
        return Abandon(reason=f"all hosts of partitions {gone} were lost before any had written them")
    mine = tuple(number for number in missing if writers[number] == member)
    if mine:
        return WritePartitions(partitions=mine)
    return Publish() if member == save.member and not missing else None


def _writers(save: SaveCheckpoint, lost: Collection[Member]) -> Iterator[tuple[PartitionId, Member | None]]:
    """For each partition, its first writer that is not lost: the owner, then its other hosts."""
    for index, (owner, hosts) in enumerate(zip(save.owners, save.hosts, strict=True)):
        left = [host for host in (owner, *hosts) if host not in lost]
        yield PartitionId(index), left[0] if left else None
