"""Copies of slices of the optimizer state that are under way in a simulated run."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from spare_megatron.core.slices import Repair
from spare_megatron.core.topology import GroupId, SliceId


class Copies:
    """When which copy is whole. A receiver makes its copies one after another.

    Args:
        copy_s: Seconds that one takes; None if none is ever made.
    """

    def __init__(self, copy_s: float | None) -> None:
        self._copy_s = inf if copy_s is None else copy_s
        self._whole_at_s: dict[Repair, float] = {}

    def start(self, copies: Sequence[Repair], now_s: float) -> None:
        """These are to be made. What is under way goes on; a copy whose donor is lost starts over from another."""
        under_way = {copy: self._whole_at_s[copy] for copy in copies if copy in self._whole_at_s}
        free_at_s: dict[GroupId, float] = defaultdict(lambda: now_s)
        for copy, at_s in under_way.items():
            free_at_s[copy.receiver.group] = max(free_at_s[copy.receiver.group], at_s)
        for copy in copies:
            if copy not in under_way:
                free_at_s[copy.receiver.group] += self._copy_s
                under_way[copy] = free_at_s[copy.receiver.group]
        self._whole_at_s = under_way

    def whole(self, now_s: float) -> dict[GroupId, tuple[SliceId, ...]]:
        """Receiver -> the slices of which it has a whole copy by now that the log does not know of."""
        found: dict[GroupId, tuple[SliceId, ...]] = {}
        for copy, at_s in self._whole_at_s.items():
            if at_s <= now_s:
                found[copy.receiver.group] = (*found.get(copy.receiver.group, ()), copy.slice)
        return found
