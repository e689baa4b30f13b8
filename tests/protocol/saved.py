"""What the groups of a history have saved, and whether it is right."""

from collections.abc import Collection

from spare_megatron.core.topology import Member
from tests.protocol.slices import WRONG
from tests.protocol.violation import Violation

AT_FIRST = "at first"
"""The parameters with which a run begins."""


class Saved:
    """The checkpoints of one history.

    Attributes:
        params: By committed steps, what there is to start again from. That it is wrong is not simulated.
    """

    def __init__(self) -> None:
        self.params = {0: AT_FIRST}
        self._visible: dict[int, tuple[Member, str]] = {}
        self._is_right_at_end = False

    def saved(self, member: Member, step: int, params: str) -> None:
        """A member has saved its parameters, in the place of what was saved of as many steps before."""
        self._visible[step] = member, params
        if not params.startswith(WRONG):
            self.params[step] = params

    def refused(self, process: str, step: int, member: Member, doubtful: Collection[str] | None) -> None:
        """What the member has saved after so many steps is not to be used.

        Args:
            process: Who says so.
            step: The steps.
            member: The member.
            doubtful: Processes that may have wrong parameters; None for all.
        """
        saved_by, params = self._visible.get(step, (None, ""))
        if saved_by != member:
            return
        is_doubtful = doubtful is None or f"{member.group}.{member.incarnation}" in doubtful
        if not is_doubtful and not params.startswith(WRONG):
            raise Violation(f"{process} refuses what {member} has saved after {step} steps, and it is right")
        del self._visible[step]

    def finished(self, params: str) -> None:
        """A process has these parameters at the end of the run."""
        self._is_right_at_end |= not params.startswith(WRONG)

    def ended(self, num_steps: int) -> None:
        """The run is over."""
        member, params = self._visible.get(num_steps, (None, ""))
        if params.startswith(WRONG) and self._is_right_at_end:
            raise Violation(f"what {member} has saved after the last step is wrong, and nobody says so")
