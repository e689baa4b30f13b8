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
    """Folds commits, verdicts and restarts of a run in the order of its log.

    The run begins with `first_step` committed steps, which count as audited. What a group that is lost has computed
    since its last audit is known once it is back and has been audited; until then it holds nothing up.
    """

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._of_group: dict[GroupId, int] = {}  # committed steps with its last audit in which it agreed
        self._members: Collection[GroupId] = ()
        self._limit: int | None = None  # what a group that was wrong has spoiled since is in all later states

    @property
    def num_steps(self) -> int:
        """Committed steps up to which all groups have been audited."""
        least = min((self._of_group.get(group, self._first_step) for group in self._members), default=self._first_step)
        return least if self._limit is None else min(least, self._limit)

    def on_commit(self, step: int, computed: Iterable[Computed], members: Collection[GroupId]) -> None:
        """The members commit the step, in which groups have computed audited microbatches to equal values."""
        self._members = members
        for group in compared(computed, members):
            self._of_group[group] = step + 1

    def on_wrong(self, group: GroupId) -> None:
        """The group is fenced, as what it has computed or the state that it holds is wrong."""
        last = self._of_group.get(group, self._first_step)
        self._limit = last if self._limit is None else min(self._limit, last)

    def on_restart(self, step: int) -> None:
        """Training restarts from the state after this many committed steps."""
        self._of_group = {group: min(last, step) for group, last in self._of_group.items()}
        if self._limit is not None and step <= self._limit:
            self._limit = None


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
