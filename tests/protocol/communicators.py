"""Simulated cross-group communicators: they connect when all members have come, and break in the middle of anything.

A reduction sums what all members posted. Its result is delivered to each member by itself: once some member has gone or
given up, some members may have the whole sum while others never get it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.stacking.plans import Microbatch
from tests.protocol.violation import Violation

Sums = Mapping[str, tuple[Microbatch, ...]]
"""What each process brought into a reduction."""


@dataclass(slots=True)
class Reduction:
    """One collective of a communicator.

    Attributes:
        name: What the first member called it.
        posted: What each process brought.
    """

    name: str
    posted: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Communicator:
    """One communicator, as all its members see it.

    Attributes:
        key: Its name in the store; it stands for those of all positions.
        members: The groups it connects.
        processes: Those that have come, one of each group.
        dead: Those that have ended.
        reductions: By position.
    """

    key: int
    members: tuple[int, ...]
    processes: dict[int, str] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    reductions: dict[int, list[Reduction]] = field(default_factory=lambda: defaultdict(list))
    num_posted: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def is_built(self) -> bool:
        """Every member has come."""
        return len(self.processes) == len(self.members)

    def join(self, group: int, process: str) -> None:
        """A process comes to the rendezvous, at any time after it began to build, even after it has released it.

        Raises:
            Violation: Its group has come before.
        """
        if group in self.processes:
            raise Violation(f"communicator {self.key} is built twice: by {self.processes[group]} and by {process}")
        self.processes[group] = process

    def post(self, process: str, name: str, brought: Any, position: int) -> Reduction:
        """A member starts its next collective among the ranks that hold this position.

        Raises:
            Violation: It is another one for others.
        """
        reductions, number = self.reductions[position], self.num_posted[process, position]
        self.num_posted[process, position] += 1
        if number == len(reductions):
            reductions.append(Reduction(name))
        reduction = reductions[number]
        if reduction.name != name:
            raise Violation(f"{reduction.name} and {name} meet in one collective of {self.key}")
        reduction.posted[process] = brought
        return reduction

    def may_complete(self, reduction: Reduction) -> bool:
        return len(reduction.posted) == len(self.members)

    @property
    def has_dead(self) -> bool:
        """The end of a member shows on its connections; that a living one has given up does not."""
        return bool(self.dead)


class Communicators:
    """All of a run, by name."""

    def __init__(self) -> None:
        self._all: dict[int, Communicator] = {}

    def named(self, key: int, members: tuple[int, ...]) -> Communicator:
        """The communicator of this name.

        Raises:
            Violation: The name stands for other groups.
        """
        communicator = self._all.setdefault(key, Communicator(key, members))
        if communicator.members != members:
            raise Violation(f"communicator {key} is built for {communicator.members} and again for {members}")
        return communicator

    def died(self, group: int, process: str) -> None:
        """A process is gone, and with it its end of all connections."""
        for communicator in self._all.values():
            if communicator.processes.get(group, process) == process:
                communicator.dead.add(process)
