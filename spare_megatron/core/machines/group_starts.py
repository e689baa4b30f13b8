"""When, on which nodes and from whose state a lost group is started again."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from spare_megatron.core.log.actions import AdmitGroups
from spare_megatron.stacking.layout import GroupId, Member

_STABLE_INTERVALS = 4.0
"""A group that was up for this many heartbeat intervals before its loss counts as stable."""

_LONG_INTERVALS = 512.0
"""An incarnation that was up for this many is no short one: it does not count, nor do those before it any more."""

_LONGEST_WAIT_INTERVALS = 64.0
_FRESH_INTERVALS = 1.0
"""A node is present if its heartbeat moved within this time, below the limit for silence."""


def restart_delay_s(num_restarts: int, most_restarts: int, num_short: int, interval_s: float) -> float | None:
    """Seconds from the fence of a group to its next start; None after `most_restarts` restarts.

    `num_short`: restarts since the last incarnation of _STABLE_INTERVALS or more. The first has no delay; then it
    doubles.

    >>> [restart_delay_s(n, 5, n, 1.0) for n in range(6)]
    [0.0, 1.0, 2.0, 4.0, 8.0, None]
    >>> restart_delay_s(4, 5, 0, 1.0)
    0.0
    """
    if num_restarts >= most_restarts:
        return None
    wait_intervals = 0.0 if num_short == 0 else min(2.0 ** (num_short - 1), _LONGEST_WAIT_INTERVALS)
    return wait_intervals * interval_s


class NextStart(NamedTuple):
    """The next start of a lost group: seconds from its fence; spares only for the first after a stable incarnation."""

    delay_s: float
    takes_spares: bool


class RestartBudget:
    """How often and when a machine starts its groups again: `most_restarts` of each in a row after short incarnations,
    below _LONG_INTERVALS, that this machine has ended. The counts go with the machine to another place.
    """

    def __init__(self, most_restarts: int, interval_s: float) -> None:
        self.most_restarts = most_restarts
        self._interval_s = interval_s
        self._groups: tuple[GroupId, ...] = ()
        self._num_restarts: Counter[GroupId] = Counter()
        self._num_short: Counter[GroupId] = Counter()

    def hold(self, groups: Collection[GroupId]) -> None:
        """The machine's place has these groups from now on, as many as the one before.

        >>> budget = RestartBudget(most_restarts=2, interval_s=1.0)
        >>> for group in map(GroupId, (0, 5, 0)):
        ...     budget.hold([group])
        ...     print(budget.spend(group, 1.0, is_free=False))
        NextStart(delay_s=0.0, takes_spares=True)
        NextStart(delay_s=0.0, takes_spares=True)
        None
        """
        counts, self._groups = [self._num_restarts[group] for group in self._groups], tuple(sorted(groups))
        self._num_restarts = Counter(dict(zip(self._groups, counts, strict=False)))
        self._num_short.clear()

    def spend(self, group: GroupId, up_s: float, *, is_free: bool, is_own: bool = True) -> NextStart | None:
        """Counts a restart of a group that was up for `up_s` seconds; None if it is given up instead.

        A restart is free after a wipe-out, where all groups restart, and if the group is asked to come back. It does
        not count either if another machine has ended the incarnation (`is_own`); only the delays grow.

        >>> budget = RestartBudget(most_restarts=1, interval_s=1.0)
        >>> [budget.spend(GroupId(0), 9.0, is_free=is_free) for is_free in (False, False, True)]
        [NextStart(delay_s=0.0, takes_spares=True), None, NextStart(delay_s=0.0, takes_spares=True)]
        """
        if up_s >= _STABLE_INTERVALS * self._interval_s:
            self._num_short[group] = 0
        if up_s >= _LONG_INTERVALS * self._interval_s:
            self._num_restarts[group] = 0
        num_short = self._num_short[group]
        counts = is_own and not is_free
        num_restarts, most_restarts = (self._num_restarts[group], self.most_restarts) if counts else (0, 1)
        delay_s = restart_delay_s(num_restarts, most_restarts, num_short, self._interval_s)
        if delay_s is None:
            return None
        self._num_restarts[group] += counts
        self._num_short[group] += 1
        return NextStart(delay_s, takes_spares=num_short == 0)


def in_order_to_give(admission: AdmitGroups, newcomer: Member) -> tuple[Member, ...]:
    """Groups that an admitted group asks for its state, in order: its donor, then the others.

    >>> members = tuple(Member(group) for group in (0, 1, 2, 3))
    >>> admission = AdmitGroups(step=5, members=members[1:2], donors=members[2:3], earlier=(*members[:1], *members[2:]))
    >>> [donor.group for donor in in_order_to_give(admission, members[1])]
    [2, 3, 0]
    """
    first = admission.earlier.index(admission.donors[admission.members.index(newcomer)])
    return (*admission.earlier[first:], *admission.earlier[:first])


class PartReadiness:
    """Whether all nodes of a group are present, so that its next incarnation can start on all of them together."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._beats: dict[int, tuple[str | None, float]] = {}  # the last beat, and when it moved

    def poll(self, ready: Collection[int], beats: Mapping[int, str | None], now_s: float) -> bool:
        """Whether the nodes of `beats` are in `ready` and present at this monotonic time; None is no heartbeat."""
        for node in beats:
            beat, since_s = self._beats.get(node, (beats[node], -math.inf))  # the first beat seen may be stale
            self._beats[node] = (beat, since_s) if beats[node] in (None, beat) else (beats[node], now_s)
        fresh_s = _FRESH_INTERVALS * self._interval_s
        return all(node in ready and now_s - self._beats[node][1] < fresh_s for node in beats)
