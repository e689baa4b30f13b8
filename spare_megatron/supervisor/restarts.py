"""Which groups of a node are started again, and when: what `core.rejoin` needs to know of their lives."""

import math
import time
from collections import Counter
from collections.abc import Callable

from spare_megatron.core.rejoin import LONG_LIFE_INTERVALS, restart_delay_s, takes_spares
from spare_megatron.process.timers import Timers
from spare_megatron.stacking.layout import GroupId


class GroupRestarts:
    """The lives of a node's groups.

    Args:
        most_restarts: How many a group gets, beside those after wipe-outs.
        interval_s: The heartbeat interval.
        whole_groups: Groups that have all of their ranks on the node.
        agenda: For groups that have to wait.
        wait_for_parts: Told of each other group that may be started again as far as this node is concerned. Whoever is
            told calls `start` when all of its nodes are there.
        start: Starts a group again; told whether it takes spares.

    Attributes:
        coming_back: Lost groups that are about to be started again.
        not_admitted: These, and those that are started and have yet to be taken in.
        wiped_out_at_s: Monotonic time at which the whole run had to start again, while it has not.
        has_begun: Some group has been ready, so that losses are masked.
        is_over: The run has ended for some group, and nobody waits for those that come back.
    """

    def __init__(
        self,
        *,
        most_restarts: int,
        interval_s: float,
        whole_groups: frozenset[GroupId],
        agenda: Timers,
        wait_for_parts: Callable[[GroupId], None],
        start: Callable[[GroupId, bool], None],
    ) -> None:
        self._most_restarts = most_restarts
        self._interval_s = interval_s
        self._whole_groups = whole_groups
        self._agenda = agenda
        self._wait_for_parts = wait_for_parts
        self._start = start
        self._up_since_s: dict[GroupId, float] = {}
        self._num_restarts: Counter[GroupId] = Counter()
        self._short_lives: Counter[GroupId] = Counter()
        self._takes_spares: dict[GroupId, bool] = {}
        self._ended: set[GroupId] = set()  # fenced, or ready to start again after a wipe-out
        self.coming_back: set[GroupId] = set()
        self.not_admitted: set[GroupId] = set()
        self.wiped_out_at_s: float | None = None
        self.has_begun = False
        self.is_over = False

    def up(self, group: GroupId) -> None:
        """Its ranks are ready."""
        self.has_begun = True
        self._up_since_s[group] = time.monotonic()

    def admitted(self, group: GroupId) -> None:
        """It takes part again."""
        self.not_admitted.discard(group)
        self.wiped_out_at_s = None

    def ended(self, group: GroupId) -> None:
        """Nothing keeps the group from being started again after a wipe-out."""
        self._ended.add(group)

    def fenced(self, group: GroupId) -> bool:
        """It is lost for all; False if it might have come back and is given up."""
        self._ended.add(group)
        is_wanted = self._most_restarts > 0 or self.wiped_out_at_s is not None
        return not is_wanted or self.is_over or self._bring_back(group)

    def missed(self, group: GroupId) -> None:
        """The life that the group waits for here is lost already where it has begun; the next one may follow."""
        self.coming_back.discard(group)
        self.fenced(group)

    def wiped_out(self) -> None:
        """The whole run starts again: so do all groups here that have ended, and the others as they do."""
        self.wiped_out_at_s = self.wiped_out_at_s or time.monotonic()
        for group in sorted(self._ended):
            self._bring_back(group)

    def _bring_back(self, group: GroupId) -> bool:
        """Has the group started again, at once or later; False if it is to stay away."""
        is_wiped_out = self.wiped_out_at_s is not None
        if self.is_over:
            return False
        if group in self.coming_back:
            return True
        if time.monotonic() - self._up_since_s.pop(group, math.inf) >= LONG_LIFE_INTERVALS * self._interval_s:
            self._short_lives[group] = 0
        short_lives = self._short_lives[group]
        # When the whole run starts again no group is given up, and none is charged with a restart.
        num_restarts, most_restarts = (0, 1) if is_wiped_out else (self._num_restarts[group], self._most_restarts)
        delay_s = restart_delay_s(num_restarts, most_restarts, short_lives, self._interval_s)
        if delay_s is None:
            return False
        self._num_restarts[group] += not is_wiped_out
        self._short_lives[group] += 1
        self._takes_spares[group] = takes_spares(short_lives)
        self.coming_back.add(group)
        self.not_admitted.add(group)
        next_stage = self.start if group in self._whole_groups else self._wait_for_parts
        self._agenda.after(delay_s, lambda: next_stage(group))
        return True

    def start(self, group: GroupId) -> None:
        """Nothing keeps the group from being started again."""
        self.coming_back.discard(group)
        if not self.is_over:
            self._ended.discard(group)
            self._start(group, self._takes_spares[group])

    @property
    def awaits_other_nodes(self) -> bool:
        """Whether some group cannot come back before other nodes are there."""
        return not self.coming_back <= self._whole_groups
