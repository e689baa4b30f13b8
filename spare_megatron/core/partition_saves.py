"""Who writes which slice of a checkpoint, and when all of it is there.

The group whose turn it is saves the parameters and all else. The state of every slice is written by one of its hosts,
all of which keep a copy of it as of that step: by its owner, and if that is lost, by the next host. Each tells what it
has written. The group whose turn it is makes the checkpoint visible when everything is there. If it is lost, or a slice
with all its hosts, the save has failed, and nothing of it is ever visible. Two hosts may write the same slice, where
one has heard of a loss sooner: both write the same bits.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from spare_megatron.core.actions import SaveCheckpoint
from spare_megatron.stacking.layout import Member, SliceId


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShare:
    """Slices that a group has written.

    Attributes:
        member: The group.
        slices: What it has written.
    """

    member: Member
    slices: tuple[SliceId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSlices:
    """Write these, and tell it."""

    slices: tuple[SliceId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Everything is there: make it one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """The save has failed."""

    reason: str


def next_move(
    save: SaveCheckpoint, member: Member, shares: Collection[WriteShare], lost: Collection[Member]
) -> WriteSlices | Publish | Abandon | None:
    """What a group is to do next for a save; None while others have something to do.

    Args:
        save: The save.
        member: The group; a host of some slice, or the one that saves.
        shares: What has been told.
        lost: The groups that the log has lost since the save was begun.

    >>> from spare_megatron.stacking.layout import GroupId
    >>> a, b, c = (Member(GroupId(group)) for group in range(3))
    >>> ring = ((a, c), (a, b), (b, c))
    >>> save = SaveCheckpoint(step=4, member=a, voters=(a, b, c), epoch=0, hosts=ring, owners=(a, b, c))
    >>> next_move(save, a, [], [])
    WriteSlices(slices=(0,))
    >>> next_move(save, a, [], [b])
    WriteSlices(slices=(0, 1))
    >>> next_move(save, c, [WriteShare(member=c, slices=(2,))], [])
    """
    written = {number for share in shares for number in share.slices}
    if save.member in lost:
        return Abandon(reason=f"group {save.member.group}, which saves, is lost")
    writers = dict(_writers(save, lost))
    missing = [number for number in writers if number not in written]
    gone = [number for number in missing if writers[number] is None]
    if gone:
        return Abandon(reason=f"all hosts of slices {gone} are lost, which nobody had written")
    mine = tuple(number for number in missing if writers[number] == member)
    if mine:
        return WriteSlices(slices=mine)
    return Publish() if member == save.member and not missing else None


def _writers(save: SaveCheckpoint, lost: Collection[Member]) -> Iterator[tuple[SliceId, Member | None]]:
    """Of each slice the first of its owner and its other hosts that is not lost."""
    for index, (owner, hosts) in enumerate(zip(save.owners, save.hosts, strict=True)):
        left = [host for host in (owner, *hosts) if host not in lost]
        yield SliceId(index), left[0] if left else None
