"""What slow means: a time over that of its like, the median of the same work elsewhere. One table of limits."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

DEALT = 1.084
"""A group whose pace stays that far above that of its like is dealt less work."""
NAMED, NAMED_SHARE = 1.2, 0.1
"""What takes that much longer, and so much of a step more, is named as what holds the run back."""
FAILED = 1.5
"""A machine that takes that much longer for the same product or copy does not pass its examination."""
LINK = 5.0
"""Of what crosses a network, whose times scatter more."""


class Excess(NamedTuple):
    own: float
    like: float

    @property
    def ratio(self) -> float:
        return self.own / self.like if self.like else 0.0

    def exceeds(self, limit: float, least: float = 0.0) -> bool:
        return self.own > max(limit * self.like, least)


def excess(own: float, likes: Sequence[float]) -> Excess:
    """Compares a time with those of at least one other."""
    return Excess(own, median(likes))
