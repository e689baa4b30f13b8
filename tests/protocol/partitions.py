"""Optimizer state in partitions: what one simulated group holds of it, and what an observer of the log knows of all.

The observer shares no code with `stacking.state_partitions`. What must hold beyond the invariants of every run:

1. A group that the log names as a host of a partition has all of its state, after each update that of the present step.
2. No group releases a copy before r_o others are known to be right, the one that takes its place included.
3. Parameters are put together from owners that hold them, and are whole before a group computes, saves or ends.
4. A run ends in a state wipe-out if and only if some partition has lost all hosts.

State and parameters that come from a corruption carry a mark wherever they go. What carries none is right.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

from spare_megatron.core.log.actions import StartRepairs
from spare_megatron.core.log.votes import PartitionDigest, Vote
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, Repair, first_ownership
from tests.protocol.violation import Violation

NUM_PIECES = 2
"""A piece, which is copied as one, is a part of a partition."""

WRONG = "!"
"""The mark."""

State = tuple[str, ...]
"""Of a partition, piece by piece."""


def marked(of: Iterable[str], text: str) -> str:
    """The digest of a text that comes from these, with their mark if one of them has it."""
    mark = WRONG if any(one.startswith(WRONG) for one in of) else ""
    return mark + hashlib.sha256(text.encode()).hexdigest()


def _updated(index: int, piece: int, before: str, change: str) -> str:
    return marked([before], f"{index}|{piece}|{before}|{change}")


class PartitionStates:
    """What one group holds.

    Attributes:
        num_updates: Steps that its state holds; -1 in a later incarnation that has been given none.
        repairs: The copies that it is to make for itself.
        first_steps: Of each copy, the steps that its pieces must have seen.
    """

    def __init__(self, member: Member, hosted: Iterable[int]) -> None:
        self.num_updates = -1 if member.incarnation else 0
        self.repairs: tuple[Repair, ...] = ()
        self.first_steps: dict[int, int] = {}
        self._member = member
        self._pieces: dict[int, dict[int, str]] = {index: dict.fromkeys(range(NUM_PIECES), "") for index in hosted}
        self._hosted = frozenset(self._pieces)  # as the log has it
        self._unproven: frozenset[int] = frozenset()

    def update(self, change: str) -> None:
        """Of all there is, also of copies that are still being made."""
        self.num_updates += 1
        for index, pieces in self._pieces.items():
            for piece, before in pieces.items():
                pieces[piece] = _updated(index, piece, before, change)

    def proven(self, copies: Iterable[PartitionCopy]) -> None:
        """These have been compared, as the log has it."""
        self._unproven -= {copy.partition for copy in copies if copy.member == self._member}

    def corrupt(self, random: Random, num_partitions: int, name: str) -> bool:
        """A piece of a copy changes to what no other group has, unless its partition is not here."""
        index = random.randrange(num_partitions)
        if self.whole(index) is None:
            return False
        self._pieces[index][random.randrange(NUM_PIECES)] = f"{WRONG} in {name}"
        return True

    def digests(self, *, is_compared: bool) -> tuple[PartitionDigest, ...]:
        """What a vote says of the partitions that the log has here."""
        whole = {index: self.whole(index) or () for index in sorted(self._hosted) if is_compared}
        return tuple(
            PartitionDigest(PartitionId(index), marked(state, repr(state)), index not in self._unproven)
            for index, state in whole.items()
        )

    def assign(self, action: StartRepairs) -> list[Repair]:
        """Releases what it is not to have. Returns the copies that are new."""
        mine = tuple(copy for copy in action.copies if copy.receiver == self._member)
        hosted = frozenset(index for index, row in enumerate(action.hosts) if self._member in row)
        copied = {repair.partition for repair in self.repairs} & (hosted - self._hosted)
        self._unproven = (self._unproven | copied) & hosted
        self._hosted = hosted
        new = [repair for repair in mine if repair not in self.repairs]
        self.first_steps = {copy.partition: self.first_steps.get(copy.partition, action.first_step) for copy in mine}
        self.repairs = mine
        # A copy begins anew with another donor: the one before may have been fenced for wrong state.
        wanted = {repair.partition for repair in mine if repair not in new} | hosted
        self._pieces = {index: pieces for index, pieces in self._pieces.items() if index in wanted}
        return new

    def load(self, step: int, states: Mapping[int, State]) -> None:
        """Goes on from a checkpoint."""
        self.num_updates, self.repairs, self.first_steps = step, (), {}
        self._pieces = {index: dict(enumerate(state)) for index, state in states.items()}
        self._hosted = frozenset(self._pieces)

    @property
    def held(self) -> tuple[int, ...]:
        """Partitions of which something is here."""
        return tuple(self._pieces)

    def whole(self, index: int) -> State | None:
        """The state of a partition, if all of it is here."""
        pieces = self._pieces.get(index, {})
        return tuple(pieces[piece] for piece in range(NUM_PIECES)) if len(pieces) == NUM_PIECES else None

    def restored(self) -> tuple[int, ...]:
        """Partitions that it was to copy and has copied."""
        return tuple(repair.partition for repair in self.repairs if self.whole(repair.partition) is not None)

    def install(self, index: int, piece: int, step: int, content: str) -> bool:
        """Installs a piece, unless it is of another step. Returns whether it did."""
        if step != self.num_updates:
            return False
        self._pieces.setdefault(index, {})[piece] = content
        return True


class PartitionObserver:
    """Folds who hosts what, and compares what processes hold.

    Args:
        hosts: For each partition the groups that host it at first; empty without partitions.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._hosts = [{(int(group), 0) for group in row} for row in hosts]
        self.redundancy = max(map(len, hosts), default=0)
        self._hosted_after: dict[int, list[frozenset[tuple[int, int]]]] = {}  # by attempt
        self._generation = 0  # restarts
        # By restarts, partition and step.
        self._states = {(0, index, 0): ("",) * NUM_PIECES for index in range(len(hosts))}
        self._was_wiped_out = False
        self._uncompared: set[tuple[int, tuple[int, int]]] = set()  # copies
        self.counts: Counter[str] = Counter()

    @property
    def is_wiped_out(self) -> bool:
        return not all(self._hosts)

    @property
    def was_wiped_out(self) -> bool:
        """Now or before a restart."""
        return self._was_wiped_out or self.is_wiped_out

    @property
    def num_partitions(self) -> int:
        return len(self._hosts)

    @property
    def exist(self) -> bool:
        return bool(self._hosts)

    def lost(self, incarnations: Collection[tuple[int, int]]) -> None:
        for row in self._hosts:
            row -= set(incarnations)

    def restarted(self, step: int, members: Iterable[tuple[int, int]]) -> None:
        """Training goes on from a checkpoint with these members. `state_partitions` says who hosts what."""
        if not self.exist:
            return
        self._was_wiped_out = self.was_wiped_out
        before, self._generation = self._generation, self._generation + 1
        kept = {key: state for key, state in self._states.items() if key[0] == before and key[2] <= step}
        self._states |= {(self._generation, index, at): state for (_, index, at), state in kept.items()}
        setup = PartitionSetup(num_groups=len(self._hosts), redundancy=self.redundancy)
        ownership = first_ownership(setup, [Member(group, incarnation) for group, incarnation in members])
        self._hosts = [set(row) for row in ownership.hosts]

    def saved(self, generation: int, step: int, hosted: Iterable[int]) -> dict[int, State]:
        """The states of partitions as a checkpoint has them."""
        return {index: self._states[generation, index, step] for index in hosted}

    def released(self, copies: Iterable[PartitionCopy], votes: Mapping[tuple[int, int], Vote]) -> None:
        """Members release copies, with the commit that these votes of all members decide.

        All hosts have to have compared the partition, one that takes the place included, and enough have to be left.
        """
        for index, member in copies:
            reporters = {
                incarnation
                for incarnation, vote in votes.items()
                if any(one.partition == index for one in vote.partition_digests)
            }
            row = self._hosts[index]
            if tuple(member) not in row or not row <= reporters:
                raise Violation(f"{member} releases partition {index}, hosted by {row} and compared by {reporters}")
            row.remove(tuple(member))
            if len(row) < min(self.redundancy, len(votes)):
                raise Violation(f"{member} releases partition {index}, which then has {row}")
            self.counts["released"] += 1

    def compared(self, votes: Mapping[tuple[int, int], Vote]) -> None:
        """An attempt with these votes is committed."""
        for incarnation, vote in votes.items():
            self._uncompared -= {(digest.partition, incarnation) for digest in vote.partition_digests}

    def drained(self, drained: Collection[tuple[int, int]], num_staying: int) -> None:
        """Members leave: enough others have to host what they did, by copies that have been compared."""
        for index, row in enumerate(self._hosts):
            able = {host for host in row - set(drained) if (index, host) not in self._uncompared}
            if row & set(drained) and len(able) < min(self.redundancy, num_staying):
                raise Violation(f"{set(drained)} are drained, and partition {index} has the hosts {able}")
            self.counts["handed over"] += len(row & set(drained))
            row -= set(drained)

    def proven(self, copies: Iterable[PartitionCopy], votes: Mapping[tuple[int, int], Vote]) -> None:
        """Copies have been compared, with the commit that these votes of all members decide: with every other host."""
        for index, member in copies:
            reporters = {
                incarnation
                for incarnation, vote in votes.items()
                if any(one.partition == index for one in vote.partition_digests)
            }
            if not self._hosts[index] <= reporters or tuple(member) not in reporters or len(reporters) < 2:
                raise Violation(
                    f"the copy of partition {index} by {member} is proven, and compared by {reporters} alone"
                )
            self.counts["proven"] += 1

    def committed(self, attempt: int, restored: Iterable[PartitionCopy], members: Collection[tuple[int, int]]) -> None:
        """An attempt is committed by these members, with copies that count from now on."""
        for index, member in restored:
            if member in members:
                self._hosts[index].add(tuple(member))
                self._uncompared.add((index, tuple(member)))
                self.counts["restored"] += 1
        self._hosted_after[attempt] = [frozenset(row) for row in self._hosts]

    def updated(
        self,
        process: str,
        incarnation: tuple[int, int],
        generation: int,
        attempt: int,
        held: PartitionStates,
        change: str,
    ) -> None:
        """A process has applied what an attempt brought."""
        for index, row in enumerate(self._hosted_after[attempt]):
            before = self._states[generation, index, held.num_updates - 1]
            after = tuple(_updated(index, piece, state, change) for piece, state in enumerate(before))
            self._states[generation, index, held.num_updates] = after
            if incarnation in row:
                self._holds(process, index, generation, held)

    def voted(self, process: str, generation: int, restored: Iterable[int], held: PartitionStates) -> None:
        """A process says that it has copied these partitions."""
        for index in restored:
            self._holds(process, index, generation, held)

    def _holds(self, process: str, index: int, generation: int, held: PartitionStates) -> None:
        state, step = held.whole(index), held.num_updates
        if state is None or self._is_strange(state, generation, index, step):
            raise Violation(f"{process} counts as a host of partition {index}, without its state after {step} steps")

    def _is_strange(self, state: State, generation: int, index: int, step: int) -> bool:
        """Whether it is neither right nor corrupted."""
        is_corrupted = any(piece.startswith(WRONG) for piece in state)
        return not is_corrupted and state != self._states[generation, index, step]

    def gathered(
        self,
        process: str,
        generation: int,
        owners: Sequence[Member],
        posted: Mapping[str, Mapping[int, State | None]],
        held: PartitionStates,
    ) -> str:
        """A process has received what all members sent. Returns its parameters, with those that it computed itself."""
        params: list[State] = []
        for index, owner in enumerate(owners):
            sender = f"{owner.group}.{owner.incarnation}"
            state = posted.get(sender, {}).get(index)
            if state is None or self._is_strange(state, generation, index, held.num_updates):
                raise Violation(f"{process} gathers parameters without partition {index}, which {sender} owns")
            params.append(held.whole(index) or state)
        self.counts["gather"] += 1
        return marked([piece for state in params for piece in state], repr(params))
