"""When a simulated group reports its state in its votes, and which state a newcomer takes over."""

from collections.abc import Mapping

from spare_megatron.core.controller.comparison import NO_DIGEST, majority_holds
from spare_megatron.stacking.layout import GroupId, Member
from tests.protocol.saved import Content


class StateReports:
    """What one group knows of it: other groups may know otherwise, where they had the parameters sooner or later.

    Attributes:
        is_wanted: State is reported in any case when the parameters are there.
        is_due: The next vote reports it, without partitions also what shows in the parameters one update later.
        copied_from: The group that it has that from.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_due = True
        self.copied_from: GroupId | None = None
        self._after_save = -1

    def changed(self) -> None:
        """The state is another one."""
        self.is_due = False
        self.copied_from = None

    def hold(self, step: int) -> None:
        """The parameters are those after so many steps: every other time they are compared."""
        self.is_due = self.is_wanted or not step % 2 or step == self._after_save
        self.is_wanted = False

    def save(self, step: int, *, lacks_params: bool) -> None:
        """What is saved after so many steps is compared, and what comes of it one update later."""
        self._after_save = step + 1
        if lacks_params:
            self.is_wanted = True
        else:
            self.is_due = True


def majority(given: Mapping[Member, Content], num_donors: int) -> Member | None:
    """One of more than half of the donors, who have given the same parameters."""
    published = [content.params or NO_DIGEST for content in given.values()]
    others = [*published, *[None] * (num_donors - len(given))]
    return next((donor for donor, (params, _) in given.items() if params and majority_holds(params, others)), None)
