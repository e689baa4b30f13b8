"""Which checkpoints are kept."""

from collections.abc import Iterable


def superseded(steps: Iterable[int], keep_last: int, keep_every_steps: int | None) -> frozenset[int]:
    """The checkpoints that are of no use any more.

    Checkpoints need not lie at multiples of anything, so one is kept for good out of every `keep_every_steps` steps:
    the first in each such stretch.

    Args:
        steps: Committed steps that each checkpoint holds.
        keep_last: How many of the newest are kept; at least 1.
        keep_every_steps: Length of the stretches; None keeps only the newest.

    >>> sorted(superseded([10, 20, 30, 40, 50], 2, None))
    [10, 20, 30]
    >>> sorted(superseded([10, 20, 30, 40, 50], 1, 25))
    [20, 40]
    """
    ascending = sorted(steps)
    kept = set(ascending[-keep_last:])
    if keep_every_steps is not None:
        first_of: dict[int, int] = {}
        for step in ascending:
            first_of.setdefault(step // keep_every_steps, step)
        kept |= set(first_of.values())
    return frozenset(ascending) - kept
