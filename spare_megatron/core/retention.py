"""Which checkpoints are kept."""

from collections.abc import Collection, Iterable


def superseded(
    steps: Iterable[int], doubtful: Collection[int], keep_last: int, keep_every_steps: int | None
) -> frozenset[int]:
    """The checkpoints that are of no use any more.

    Only those that are known to be right supersede others. One that is not stays until a later one is: it may turn out
    to be wrong, and then there is nothing else.

    Checkpoints need not lie at multiples of anything, so one is kept for good out of every `keep_every_steps` steps:
    the first in each such stretch.

    Args:
        steps: Committed steps that each checkpoint holds.
        doubtful: Of these, those that are not known to be right.
        keep_last: How many of the newest that are right are kept; at least 1.
        keep_every_steps: Length of the stretches; None keeps only the newest.

    >>> sorted(superseded([10, 20, 30, 40, 50], [50], 2, None))
    [10, 20]
    >>> sorted(superseded([10, 20, 30, 40, 50], [20, 50], 1, 25))
    [20]
    """
    all_steps = frozenset(steps)
    right = sorted(all_steps.difference(doubtful))
    kept = {step for step in all_steps if not right or step > right[-1]} | set(right[-keep_last:])
    if keep_every_steps is not None:
        first_of: dict[int, int] = {}
        for step in right:
            first_of.setdefault(step // keep_every_steps, step)
        kept |= set(first_of.values())
    return all_steps - kept
