"""The copies of state partitions: in a checkpoint, and those that one rank makes.

Each partition of a checkpoint is written by its owner, or if that is lost by the next host, and all else by the saving
group, which publishes the checkpoint once everything is written. If that group, or a partition with all its hosts, is
lost, nothing becomes visible. Two hosts may write the same partition; both write the same bits.

If the one donor of a copy is lost, perhaps for wrong state, the copy starts anew from another host. Every commit
updates received pieces, so pieces of different steps fit together.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.stacking.state_partitions import Hosts, Repair, hosted_by


@dataclass(slots=True)
class _Copy:
    repair: Repair
    num_pieces: int
    since_s: float
    first_step: int
    installed: set[int] = field(default_factory=set)
    whole_at_s: float | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.installed) == self.num_pieces


class PartitionCopies:
    """The copies of one rank of `member`. `num_pieces` gives the pieces of a partition."""

    def __init__(self, member: Member, num_pieces: Callable[[PartitionId], int]) -> None:
        self._member = member
        self._num_pieces = num_pieces
        self._copies: dict[PartitionId, _Copy] = {}

    def assign(
        self, repairs: Sequence[Repair], hosts: Hosts, now_s: float, first_step: int = 0
    ) -> frozenset[PartitionId]:
        """Replaces all earlier requests; copies still requested continue. Returns the partitions to keep locally.

        `repairs` are those of all groups, the most urgent first; `first_step` is as in `StartRepairs`.
        """
        before, self._copies = self._copies, {}
        kept = set(hosted_by(hosts, self._member))
        for repair in repairs:
            if repair.receiver != self._member:
                continue
            copy = before.get(repair.partition)
            if copy is None or copy.repair != repair:
                copy = _Copy(
                    repair=repair,
                    num_pieces=self._num_pieces(repair.partition),
                    since_s=now_s,
                    first_step=first_step if copy is None else copy.first_step,
                )
            else:
                kept.add(repair.partition)
            self._copies[repair.partition] = copy
        return frozenset(kept)

    def next(self) -> tuple[Repair, int] | None:
        """The copy to work on and its next piece; None if all are complete."""
        for copy in self._copies.values():
            if not copy.is_whole:
                return copy.repair, next(piece for piece in range(copy.num_pieces) if piece not in copy.installed)
        return None

    def first_step(self, repair: Repair) -> int:
        """Committed steps that state must include to enter the copy."""
        return self._copies[repair.partition].first_step

    def is_wanted(self, repair: Repair) -> bool:
        copy = self._copies.get(repair.partition)
        return copy is not None and copy.repair == repair

    def install(self, repair: Repair, piece: int, now_s: float) -> None:
        copy = self._copies[repair.partition]
        copy.installed.add(piece)
        if copy.is_whole:
            copy.whole_at_s = now_s

    def whole(self) -> dict[PartitionId, bool]:
        """For each requested partition, in the same order on every rank of the group, whether it is complete here."""
        return {number: self._copies[number].is_whole for number in sorted(self._copies)}

    def made(self, number: PartitionId) -> tuple[Repair, float]:
        """A complete copy, and the seconds from its request to its completion on this rank."""
        copy = self._copies[number]
        # The copy of an empty partition is complete when it is requested.
        whole_at_s = copy.since_s if copy.whole_at_s is None else copy.whole_at_s
        return copy.repair, whole_at_s - copy.since_s

    @property
    def donors(self) -> frozenset[Member]:
        """Members from which pieces are still to be fetched."""
        return frozenset(copy.repair.donor for copy in self._copies.values() if not copy.is_whole)


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
