"""Optimizer state in slices: what one simulated group holds of it, and what an observer of the log knows of all.

The observer shares no code with `core.slices`. What must hold beyond the invariants of every run:

1. Whoever the log names as a host of a slice has all of its state, after every update that of the present step.
2. Parameters are put together from owners that hold them, and are whole before a group computes, saves or ends.
3. A run ends in a state wipe-out if and only if some slice has lost all hosts.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from spare_megatron.core.slices import Hosts, Repair, SliceCopy
from spare_megatron.core.topology import Member
from tests.protocol.violation import Violation

NUM_PIECES = 2
"""What is copied as one is a part of a slice."""

State = tuple[str, ...]
"""Of a slice, piece by piece."""


class SliceStates:
    """What one group holds.

    Attributes:
        num_updates: Steps that its state holds.
        repairs: The copies that it is to make for itself.
    """

    def __init__(self, member: Member, hosted: Iterable[int]) -> None:
        self.num_updates = 0
        self.repairs: tuple[Repair, ...] = ()
        self._member = member
        self._pieces: dict[int, dict[int, str]] = {index: dict.fromkeys(range(NUM_PIECES), "") for index in hosted}

    def update(self, change: str) -> None:
        """Of all there is, also of copies that are still being made."""
        self.num_updates += 1
        for index, pieces in self._pieces.items():
            for piece, before in pieces.items():
                pieces[piece] = hashlib.sha256(f"{index}|{piece}|{before}|{change}".encode()).hexdigest()

    def assign(self, repairs: Sequence[Repair], hosts: Hosts) -> list[Repair]:
        """Lets go of what it is not to have. Returns the repairs that are new."""
        mine = tuple(repair for repair in repairs if repair.receiver == self._member)
        new = [repair for repair in mine if repair not in self.repairs]
        self.repairs = mine
        wanted = {repair.slice for repair in mine}
        wanted |= {index for index, row in enumerate(hosts) if self._member in row}
        self._pieces = {index: pieces for index, pieces in self._pieces.items() if index in wanted}
        return new

    def whole(self, index: int) -> State | None:
        """The state of a slice, if all of it is here."""
        pieces = self._pieces.get(index, {})
        return tuple(pieces[piece] for piece in range(NUM_PIECES)) if len(pieces) == NUM_PIECES else None

    def restored(self) -> tuple[int, ...]:
        """Slices that it was to copy and has copied."""
        return tuple(repair.slice for repair in self.repairs if self.whole(repair.slice) is not None)

    def install(self, index: int, piece: int, step: int, content: str) -> bool:
        """Takes in a piece, unless it is of another step. Returns whether it did."""
        if step != self.num_updates:
            return False
        self._pieces.setdefault(index, {})[piece] = content
        return True


class SliceObserver:
    """Folds who hosts what, and compares what processes hold.

    Args:
        hosts: For each slice the groups that host it at first; none without slices.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._hosts = [{(int(group), 0) for group in row} for row in hosts]
        self._hosted_after: dict[int, list[frozenset[tuple[int, int]]]] = {}
        self._states: dict[tuple[int, int], State] = {}
        self.counts: Counter[str] = Counter()

    @property
    def is_wiped_out(self) -> bool:
        return not all(self._hosts)

    @property
    def exist(self) -> bool:
        return bool(self._hosts)

    def lost(self, lives: Collection[tuple[int, int]]) -> None:
        for row in self._hosts:
            row -= set(lives)

    def committed(self, step: int, restored: Iterable[SliceCopy], members: Collection[tuple[int, int]]) -> None:
        """A step is committed by these members, with copies that count from now on."""
        for index, member in restored:
            if member in members:
                self._hosts[index].add(tuple(member))
                self.counts["restored"] += 1
        self._hosted_after[step] = [frozenset(row) for row in self._hosts]

    def updated(self, process: str, life: tuple[int, int], step: int, held: SliceStates) -> None:
        """A process has applied a step."""
        for index, row in enumerate(self._hosted_after[step]):
            if life in row:
                self._holds(process, index, step + 1, held.whole(index))

    def voted(self, process: str, step: int, restored: Iterable[int], held: SliceStates) -> None:
        """A process says that it has copied these slices."""
        for index in restored:
            self._holds(process, index, step, held.whole(index))

    def _holds(self, process: str, index: int, step: int, state: State | None) -> None:
        if state is None or state != self._states.setdefault((index, step), state):
            raise Violation(f"{process} counts as a host of slice {index}, without its state after {step} steps")

    def gathered(
        self, process: str, step: int, owners: Sequence[Member], posted: Mapping[str, Mapping[int, State | None]]
    ) -> str:
        """A process has received what all members sent. Returns the parameters that these are."""
        params = []
        for index, owner in enumerate(owners):
            sender = f"{owner.group}.{owner.incarnation}"
            state = posted.get(sender, {}).get(index)
            if state is None or state != self._states.get((index, step), state):
                raise Violation(f"{process} gathers parameters without slice {index}, which {sender} owns")
            params.append(state)
        self.counts["gather"] += 1
        return hashlib.sha256(repr(params).encode()).hexdigest()
