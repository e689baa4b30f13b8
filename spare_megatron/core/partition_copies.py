"""The copies of slices that one rank has been asked to make: what to fetch next, and which of them are whole.

Each copy comes from one host. Should that be lost, the copy begins anew with another: whoever is fenced may have been
put out for wrong state. What has come is updated with every commit, so that pieces of different steps go together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spare_megatron.stacking.layout import Member, SliceId
from spare_megatron.stacking.state_partitions import Hosts, Repair


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCopy:
    """A copy that has been made.

    Attributes:
        repair: What was asked for.
        repair_s: From when it was asked for to when it was whole here.
    """

    repair: Repair
    repair_s: float


class Copying:
    """The copies of one rank.

    Args:
        member: Its group.
        num_pieces: Pieces of a slice.
    """

    def __init__(self, member: Member, num_pieces: Callable[[SliceId], int]) -> None:
        self._member = member
        self._num_pieces = num_pieces
        self._copies: dict[SliceId, _Copy] = {}

    def assign(self, repairs: Sequence[Repair], hosts: Hosts, now_s: float, first_step: int = 0) -> frozenset[SliceId]:
        """Takes the place of what was asked for before; what is still asked for goes on.

        Args:
            repairs: All copies that any group is to make, the most urgent first.
            hosts: For each slice, who holds the whole state.
            now_s: The present time.
            first_step: As in `StartRepairs`.

        Returns:
            The slices of which what is here is to be kept. Everything else is to be let go.
        """
        before, self._copies = self._copies, {}
        kept = {SliceId(number) for number, row in enumerate(hosts) if self._member in row}
        for repair in repairs:
            if repair.receiver != self._member:
                continue
            copy = before.get(repair.slice)
            if copy is None or copy.repair != repair:
                copy = _Copy(
                    repair=repair,
                    num_pieces=self._num_pieces(repair.slice),
                    since_s=now_s,
                    first_step=first_step if copy is None else copy.first_step,
                )
            else:
                kept.add(repair.slice)
            self._copies[repair.slice] = copy
        return frozenset(kept)

    def next(self) -> tuple[Repair, int] | None:
        """The copy to work on and its next piece; None if all are whole."""
        for copy in self._copies.values():
            if not copy.is_whole:
                return copy.repair, next(piece for piece in range(copy.num_pieces) if piece not in copy.installed)
        return None

    def first_step(self, repair: Repair) -> int:
        """Committed steps that state must have seen to go into the copy."""
        return self._copies[repair.slice].first_step

    def is_wanted(self, repair: Repair) -> bool:
        """Whether the copy is still asked for, from this donor."""
        copy = self._copies.get(repair.slice)
        return copy is not None and copy.repair == repair

    def install(self, repair: Repair, piece: int, now_s: float) -> None:
        """The piece is here."""
        copy = self._copies[repair.slice]
        copy.installed.add(piece)
        if copy.is_whole:
            copy.whole_at_s = now_s

    def whole(self) -> dict[SliceId, bool]:
        """For each slice asked for, in the same order on every rank of the group, whether it is whole here."""
        return {number: self._copies[number].is_whole for number in sorted(self._copies)}

    def made(self, number: SliceId) -> WholeCopy:
        """The copy of a slice that is whole."""
        copy = self._copies[number]
        # One of an empty slice was whole when it was asked for.
        whole_at_s = copy.since_s if copy.whole_at_s is None else copy.whole_at_s
        return WholeCopy(repair=copy.repair, repair_s=whole_at_s - copy.since_s)

    @property
    def donors(self) -> frozenset[Member]:
        """Who is asked for pieces."""
        return frozenset(copy.repair.donor for copy in self._copies.values() if not copy.is_whole)
