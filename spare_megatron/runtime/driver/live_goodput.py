"""Where the time of a run has gone so far, as its driver is told of it."""

from array import array
from collections import deque
from collections.abc import Mapping
from statistics import median

from spare_megatron.journal.goodput import cause_of

_QUIET_STEPS = 101
"""Of so many of the last steps with all groups the median is what a step takes when nothing happens."""


class LiveGoodput:
    """Useful time, and losses by the names that `journal.goodput` has for them. All of it adds up to the time passed.

    Nothing is kept but sums and 17 bytes a step: steps that a restart throws away have been of no use. A fault that
    costs no group is not told apart from `scatter` here.

    Args:
        num_groups: Groups of the run.
        began_s: When it began.
    """

    def __init__(self, num_groups: int, began_s: float) -> None:
        self._num_groups = num_groups
        self._began_s = self._at_s = began_s
        self._quiet_s: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._met: set[str] = set()
        self._has_newcomers = False
        self._names: list[str] = []
        self._useful_s, self._lost_s, self._cause = array("d"), array("d"), array("b")  # of each step
        self._sum_s = 0.0
        self._sums_s: dict[str, float] = {}

    def lost(self) -> None:
        """A group is lost."""
        self._met.add("fence")

    def came_back(self) -> None:
        """A group takes part again."""
        self._has_newcomers = True

    def restarted(self, num_thrown_away: int) -> None:
        """Training starts again, without the last committed steps, of which some may be from before this run."""
        self._met.add("restart")
        for _ in range(min(num_thrown_away, len(self._cause))):
            useful_s, lost_s = self._useful_s.pop(), self._lost_s.pop()
            self._sum_s -= useful_s
            self._add(self._names[self._cause.pop()], -lost_s)
            self._add("rework", useful_s + lost_s)

    def committed(self, at_s: float, step_s: float, num_alive: int) -> None:
        """A step is committed.

        Args:
            at_s: When.
            step_s: How long it took.
            num_alive: Groups that took part.
        """
        passed_s, self._at_s = at_s - self._at_s, at_s
        if num_alive == self._num_groups or not self._quiet_s:
            self._quiet_s.append(step_s)
        useful_s = min(passed_s, step_s, median(self._quiet_s))
        cause = cause_of(self._met, is_first=not self._useful_s, has_newcomers=self._has_newcomers)
        cause = cause or ("fewer_groups" if num_alive < self._num_groups else "scatter")
        if cause not in self._names:
            self._names.append(cause)
        self._useful_s.append(useful_s)
        self._lost_s.append(passed_s - useful_s)
        self._cause.append(self._names.index(cause))
        self._sum_s += useful_s
        self._add(cause, passed_s - useful_s)
        self._met.clear()
        self._has_newcomers = False

    @property
    def goodput(self) -> float:
        """Useful time over the time until the last commit."""
        passed_s = self._at_s - self._began_s
        return self._sum_s / passed_s if passed_s > 0 else 0.0

    @property
    def lost_s(self) -> Mapping[str, float]:
        """What the rest went to, seconds."""
        return self._sums_s

    def _add(self, name: str, spent_s: float) -> None:
        self._sums_s[name] = self._sums_s.get(name, 0.0) + spent_s
