"""What must hold of groups that cannot take part in sums for lack of a resource of their own."""

from collections.abc import Mapping

from spare_megatron.core.log.entries import Retry
from spare_megatron.core.log.votes import Vote
from tests.protocol.incarnations import Incarnation
from tests.protocol.violation import Violation

LACKING = "it lacks a resource"
"""Failure of a group that cannot connect, or post, for a reason of its own."""


class ShortageObserver:
    """Sees the votes of each attempt and what follows from them."""

    def __init__(self) -> None:
        self._before: frozenset[Incarnation] = frozenset()  # that have failed so in this step

    def begin(self) -> None:
        """Another step begins."""
        self._before = frozenset()

    def fenced(self, fenced: Incarnation, writer: str, votes: Mapping[Incarnation, Vote | None]) -> None:
        failing = _failing(votes)
        if fenced not in self._again(failing, votes):
            raise Violation(f"{writer} fences {fenced} for lack of a resource; now {set(failing)} lack one")

    def halted(self, reason: str, writer: str, votes: Mapping[Incarnation, Vote | None]) -> None:
        if not _failing(votes) & self._before == votes.keys():
            raise Violation(f"{writer} halts the run: {reason}")

    def retried(self, entry: Retry, writer: str, votes: Mapping[Incarnation, Vote | None]) -> None:
        failing = _failing(votes)
        if {failure.group for failure in entry.failures} != {group for group, _ in failing}:
            raise Violation(f"{writer} writes {entry} though {set(failing)} lack a resource")
        if again := self._again(failing, votes):
            raise Violation(f"{writer} writes {entry} though {set(again)} lack a resource again")
        self._before |= failing

    def _again(
        self, failing: frozenset[Incarnation], votes: Mapping[Incarnation, Vote | None]
    ) -> frozenset[Incarnation]:
        """Those that are to be fenced: they fail again, unless all members fail, of which none stands out."""
        return frozenset() if failing == votes.keys() else failing & self._before


def _failing(votes: Mapping[Incarnation, Vote | None]) -> frozenset[Incarnation]:
    return frozenset(member for member, vote in votes.items() if vote is not None and vote.failure)
