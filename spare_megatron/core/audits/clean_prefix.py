"""How far the steps of a run are audited: the states that no lasting fault found so far or later can have spoiled.

A lasting fault of a group began after the last audit in which the group agreed with another one. So what the group has
computed in the steps before that audit is right, and a checkpoint holds right state if that is so for every group.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Microbatch

Computed = tuple[GroupId, Microbatch]
"""A group has computed an audited microbatch."""


class AuditedSteps:
    """Folds commits, verdicts, restarts and undos of a run in the order of its log.

    The run begins with `first_step` committed steps, which count as audited. What a group that is lost has computed
    since its last audit is known once it is back and has been audited; until then it holds nothing up.
    """

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._of_group: dict[GroupId, int] = {}  # committed steps with its last audit in which it agreed
        self._members: Collection[GroupId] = ()
        self._num_committed = first_step
        self._spoiled_after: dict[GroupId, int] = {}  # what a wrong group has computed since is in all later states

    @property
    def num_steps(self) -> int:
        """The number of committed steps, from the beginning, in which all groups have been audited since."""
        least = min((self._of_group.get(group, self._first_step) for group in self._members), default=self._first_step)
        return min(least, *self._spoiled_after.values()) if self._spoiled_after else least

    @property
    def spoiled_by(self) -> list[GroupId]:
        """The groups that were found wrong, and have computed committed steps since their last audit."""
        return sorted(self._spoiled_after)

    def on_commit(self, step: int, computed: Iterable[Computed], members: Collection[GroupId]) -> None:
        """The members commit the step, in which groups have computed audited microbatches to equal values."""
        self._members, self._num_committed = members, step + 1
        for group in compared(computed, members):
            self._of_group[group] = step + 1

    def on_wrong(self, group: GroupId) -> None:
        """The group is fenced, as what it has computed or the state that it holds is wrong."""
        last = self._of_group.get(group, self._first_step)
        if last < self._num_committed:
            self._spoiled_after[group] = min(last, self._spoiled_after.get(group, last))

    def on_restart(self, step: int) -> None:
        """Training goes on from the state after this many committed steps, by a restart or an undo."""
        self._num_committed = step
        self._of_group = {group: min(last, step) for group, last in self._of_group.items()}
        self._spoiled_after = {group: last for group, last in self._spoiled_after.items() if last < step}


def compared(computed: Iterable[Computed], members: Collection[GroupId]) -> set[GroupId]:
    """The members that have computed a microbatch that another member has computed, too.

    >>> shared, alone = Microbatch(0, 1), Microbatch(2, 3)
    >>> sorted(compared([(0, shared), (1, shared), (2, alone), (3, shared)], [0, 1, 2]))
    [0, 1]
    """
    groups_of: dict[Microbatch, set[GroupId]] = defaultdict(set)
    for group, microbatch in computed:
        if group in members:
            groups_of[microbatch].add(group)
    return {group for groups in groups_of.values() if len(groups) > 1 for group in groups}
