"""When a lost group is started again, on which nodes, whether in processes that wait for that, and from whose state."""

import math
from collections.abc import Collection, Mapping

from spare_megatron.core.actions import AdmitGroups
from spare_megatron.stacking.layout import Member

LONG_LIFE_INTERVALS = 4.0
"""A group that was up for this many heartbeat intervals before it was lost has shown that it can be."""

_LONGEST_WAIT_INTERVALS = 64.0
_FRESH_INTERVALS = 1.0
"""A node whose beat has moved this lately is there. Less than after which it is found silent: one that is lost right
after the group has begun its next life on all nodes is found then, and costs it that life."""


def restart_delay_s(num_restarts: int, most_restarts: int, num_short_lives: int, interval_s: float) -> float | None:
    """Seconds from the fence of a group until it is started again; None if it is given up.

    At once if it was up for a while, then after longer and longer times: a group that is lost whenever it has come
    back costs the others a recovery and an admission each time.

    Args:
        num_restarts: Restarts of the group so far.
        most_restarts: How many a group gets.
        num_short_lives: Restarts in a row, up to now, after which it was lost within LONG_LIFE_INTERVALS.
        interval_s: The heartbeat interval.

    >>> [restart_delay_s(n, 5, n, 1.0) for n in range(6)]
    [0.0, 1.0, 2.0, 4.0, 8.0, None]
    >>> restart_delay_s(4, 5, 0, 1.0)
    0.0
    """
    if num_restarts >= most_restarts:
        return None
    wait_intervals = 0.0 if num_short_lives == 0 else min(2.0 ** (num_short_lives - 1), _LONGEST_WAIT_INTERVALS)
    return wait_intervals * interval_s


def takes_spares(num_short_lives: int) -> bool:
    """Whether a group that is started again may have the processes that wait for some group to be lost.

    A group that was lost soon after its last return has waited for longer than new processes take to start. It would
    use spares up that others need at once.

    >>> [takes_spares(num_short_lives) for num_short_lives in range(3)]
    [True, False, False]
    """
    return num_short_lives == 0


def in_order_to_give(admission: AdmitGroups, newcomer: Member) -> tuple[Member, ...]:
    """Whom a group that is admitted asks for its state: its donor, and each next one where that does not give it.

    All of them have the same state, until an update that needs the newcomer.

    >>> members = tuple(Member(group) for group in (0, 1, 2, 3))
    >>> admission = AdmitGroups(step=5, members=members[1:2], donors=members[2:3], earlier=(*members[:1], *members[2:]))
    >>> [donor.group for donor in in_order_to_give(admission, members[1])]
    [2, 3, 0]
    """
    first = admission.earlier.index(admission.donors[admission.members.index(newcomer)])
    return (*admission.earlier[first:], *admission.earlier[:first])


class Gathering:
    """Whether all nodes of a group are there, so that its next life may begin on all of them together.

    Each node says so for its ranks when the time is over that `restart_delay_s` has them wait. What one has said that
    is lost since counts for nothing until it is back.

    Args:
        nodes: That have ranks of the group.
        interval_s: The heartbeat interval.
    """

    def __init__(self, nodes: Collection[int], interval_s: float) -> None:
        self._nodes = tuple(nodes)
        self._interval_s = interval_s
        self._beats: dict[int, tuple[str | None, float]] = {}  # the last one, and when it came

    def look(self, ready: Collection[int], beats: Mapping[int, str | None], now_s: float) -> bool:
        """Whether all are there.

        Args:
            ready: Nodes whose present supervisors have said so.
            beats: Of all nodes of the group; None for one that does not beat.
            now_s: Monotonic time.
        """
        for node in self._nodes:
            beat, since_s = self._beats.get(node, (beats[node], -math.inf))  # one that stands still is no sign of life
            self._beats[node] = (beat, since_s) if beats[node] in (None, beat) else (beats[node], now_s)
        fresh_s = _FRESH_INTERVALS * self._interval_s
        return all(node in ready and now_s - self._beats[node][1] < fresh_s for node in self._nodes)
