"""Which groups of a node are started again, and when: what `core.rejoin` needs to know of their lives."""

import math
import time
from collections import Counter

from spare_megatron.core.rejoin import LONG_LIFE_INTERVALS, restart_delay_s
from spare_megatron.core.topology import GroupId


class Restarts:
    """The lives of a node's groups.

    Args:
        most_restarts: How many a group gets.
        interval_s: The heartbeat interval.

    Attributes:
        coming_back: Lost groups that are about to be started again.
        not_admitted: These, and those that are started and have yet to be taken in.
    """

    def __init__(self, most_restarts: int, interval_s: float) -> None:
        self._most_restarts = most_restarts
        self._interval_s = interval_s
        self._up_since_s: dict[GroupId, float] = {}
        self._num_restarts: Counter[GroupId] = Counter()
        self._short_lives: Counter[GroupId] = Counter()
        self.coming_back: set[GroupId] = set()
        self.not_admitted: set[GroupId] = set()

    def up(self, group: GroupId) -> None:
        """Its ranks are ready."""
        self._up_since_s[group] = time.monotonic()

    def delay_s(self, group: GroupId, *, is_wiped_out: bool = False) -> float | None:
        """Seconds until the group is to be started again; None if it is given up.

        Args:
            group: The group.
            is_wiped_out: The whole run starts again. Then no group is given up, and none is charged with a restart.
        """
        if time.monotonic() - self._up_since_s.pop(group, math.inf) >= LONG_LIFE_INTERVALS * self._interval_s:
            self._short_lives[group] = 0
        num_restarts, most_restarts = (0, 1) if is_wiped_out else (self._num_restarts[group], self._most_restarts)
        delay_s = restart_delay_s(num_restarts, most_restarts, self._short_lives[group], self._interval_s)
        if delay_s is not None:
            self._num_restarts[group] += not is_wiped_out
            self._short_lives[group] += 1
            self.coming_back.add(group)
            self.not_admitted.add(group)
        return delay_s
