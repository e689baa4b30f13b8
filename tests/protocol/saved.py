"""What the groups of a history have saved, and whether it is right."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from spare_megatron.stacking.layout import Member
from tests.protocol.partitions import WRONG
from tests.protocol.violation import Violation

AT_FIRST = "at first"
"""The parameters with which a run begins."""


class Content(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        params: The parameters.
        spoiled: By what: what belongs to them, and shows in them one update later, is wrong. Empty if it is right.
    """

    params: str
    spoiled: str

    @property
    def is_wrong(self) -> bool:
        return bool(self.spoiled) or self.params.startswith(WRONG)


class Saved:
    """The checkpoints of one history.

    Attributes:
        params: By committed steps, what there is to start again from. That it is wrong is not simulated.
    """

    def __init__(self) -> None:
        self.params = {0: AT_FIRST}
        self._aside: dict[tuple[int, Member], Content] = {}
        self._visible: dict[int, tuple[Member, Content]] = {}
        self._is_right_at_end = False
        self._num_dropped = 0
        self._drained: dict[Member, int] = {}  # after so many committed steps
        self._heads: dict[tuple[int, Member], int] = {}  # entries of the log when a save began
        self._undos: list[tuple[int, int]] = []  # entry, and the steps that are left

    @property
    def visible(self) -> Collection[int]:
        """Committed steps of what can be seen, and is not refused."""
        return tuple(self._visible)

    def undone(self, index: int, step: int) -> None:
        """By this entry what is saved of later steps is void."""
        self._undos.append((index, step))

    def _is_undone(self, step: int, member: Member) -> bool:
        return any(index >= self._heads.get((step, member), index + 1) and left < step for index, left in self._undos)

    def begun(self, member: Member, step: int, content: Content, head: int) -> None:
        """A member writes what it holds after so many steps, where no other process sees it."""
        self._aside[step, member] = content
        self._heads[step, member] = head
        self.drained((), step)

    def drained(self, members: Iterable[tuple[int, int]], step: int) -> None:
        """Members leave after so many steps: what they have saved is to be compared before, in two of them."""
        self._drained |= dict.fromkeys(members, step)
        visible = {(step, member) for step, (member, _) in self._visible.items()}
        for saved, member in (*self._aside, *visible):
            if self._drained.get(member, saved + 2) < saved + 2:
                raise Violation(f"{member} is drained too soon to compare what it saved after {saved} steps")

    def published(self, member: Member, step: int) -> None:
        """What it has written takes the place of what was saved of as many steps before, unless it is gone."""
        content = self._aside.pop((step, member), None)
        if content is None:
            return
        self._visible[step] = member, content
        if not content.is_wrong:
            self.params[step] = content.params

    def dropped(self, steps: Collection[int]) -> None:
        """What was saved after so many steps is superseded, and removed."""
        for step in steps:
            self._visible.pop(step, None)
            self.params.pop(step, None)
        self._num_dropped += len(steps)

    def refused(self, process: str, step: int, member: Member, suspect: Collection[str] | None) -> None:
        """What the member has saved after so many steps is not to be used.

        Args:
            process: Who says so.
            step: The steps.
            member: The member.
            suspect: Processes that may have wrong parameters; None for all.
        """
        saved_by, content = self._visible.get(step, (None, None))
        if saved_by == member:
            del self._visible[step]
            if self._is_undone(step, member):
                return
            if self._num_dropped and not self._visible:
                raise Violation(f"{process} refuses all that is left, and what was right before has been removed")
        else:
            content = self._aside.pop((step, member), None)
        is_suspect = suspect is None or f"{member.group}.{member.incarnation}" in suspect
        is_suspect |= self._is_undone(step, member)
        if content is not None and not is_suspect and not content.is_wrong:
            raise Violation(f"{process} refuses what {member} has saved after {step} steps, and it is right")

    def finished(self, content: Content) -> None:
        """A process holds this at the end of the run."""
        self._is_right_at_end |= not content.is_wrong

    def ended(self, num_steps: int, fenced: Collection[str]) -> None:
        """The run is over.

        Args:
            num_steps: The steps that it has committed.
            fenced: Processes whose state was found to be wrong.
        """
        for step, (member, content) in self._visible.items():
            if content.is_wrong and f"{member.group}.{member.incarnation}" in fenced:
                raise Violation(f"what {member} saved after {step} steps before it was fenced is wrong, and is used")
            if self._is_undone(step, member):
                raise Violation(f"what {member} saved after {step} steps is undone, and is used")
        member, content = self._visible.get(num_steps, (None, Content("", "")))
        if content.is_wrong and self._is_right_at_end:
            raise Violation(f"what {member} has saved after the last step is wrong, and is not reported")
