"""What must hold of groups whose own checks have found their numbers wrong."""

from collections.abc import Collection
from typing import Any

from spare_megatron.core.log.entries import Entry, Fence, Retry
from spare_megatron.core.log.votes import WRONG_NUMBERS
from tests.protocol.incarnations import Incarnation
from tests.protocol.violation import Violation

FOUND = "rank 0: a product"


class FindingObserver:
    """Sees who has stated that, and which entries follow."""

    def __init__(self) -> None:
        self._is_fenced = False  # some group, in this step

    def begin(self) -> None:
        """Another step begins, or the evaluation before it is decided."""
        self._is_fenced = False

    def fenced(self, fence: Fence, writer: str, stated: Collection[Incarnation], members: Collection[Any]) -> bool:
        """A fence is written for what the group has found itself. Whether the run ends, since it is the second one.

        Args:
            fence: The fence.
            writer: Who writes it.
            stated: Those that have voted so in this attempt, in time.
            members: Of this moment.
        """
        fenced = (fence.group, fence.incarnation)
        if fenced not in members or set(stated) != {fenced}:
            raise Violation(
                f"{writer} fences {fenced} of {set(members)}, and {set(stated)} have found themselves wrong"
            )
        if not fence.discard:
            raise Violation(f"{writer} fences {fenced}, and keeps sums that it has found wrong")
        is_second, self._is_fenced = self._is_fenced, True
        return is_second

    def halted(self, reason: str, writer: str, stated: Collection[Incarnation]) -> None:
        if len(stated) < 2:
            raise Violation(f"{writer} halts the run, and only {set(stated)} have found themselves wrong: {reason}")

    def decided(self, entry: Entry, writer: str, stated: Collection[Incarnation], members: Collection[Any]) -> None:
        """No sum stays of an attempt that a group has stated it in, which is fenced before anything is decided."""
        if left := [one for one in stated if one in members]:
            raise Violation(f"{writer} writes {entry}, and {left} have found themselves wrong")
        is_void = isinstance(entry, Retry) and (entry.recompute or any(one.differs for one in entry.disputes))
        if stated and not is_void:
            raise Violation(f"{writer} writes {entry}, and keeps sums that {set(stated)} have found wrong")


def is_own_finding(entry: Entry) -> bool:
    return isinstance(entry, Fence) and entry.error == WRONG_NUMBERS
