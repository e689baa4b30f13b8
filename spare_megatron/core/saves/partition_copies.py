"""The copies of state partitions that one rank makes: what to fetch next, and which are complete.

If its one donor is lost, perhaps for wrong state, a copy starts anew from another host. Every commit updates received
pieces, so pieces of different steps fit together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
