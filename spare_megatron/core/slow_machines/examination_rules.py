"""Judges the examination of a machine in quarantine: what it computes, and how fast, beside machines that train.

All of them do the same: a seeded matrix product several times over, copies in memory, and an exchange with the control
store. Times of the product and of copies leave out waits for a processor that other processes of the run have, so that
a machine that trains is a fair yardstick.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.stacking import slowness
from spare_megatron.stacking.layout import MachineId
from spare_megatron.stacking.slowness import excess

NUM_HELPERS = 3
"""Machines that train and do the same, at most: with two of them that agree, the third cannot be at fault for both."""
LIMIT_INTERVALS = 30.0
"""Heartbeat intervals after which what has not been answered counts as no answer."""
_FIRST_WAIT_INTERVALS, _LONGEST_WAIT_INTERVALS = 4.0, 512.0

LEAST_ANSWER_S = 0.02
LEAST_EXCHANGE_S = 0.2
"""Shorter answers and exchanges never fail: on a busy machine they scatter by more than any ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a machine has found in an examination."""

    digests: tuple[str, ...]
    """Of the result of each repetition of the product."""
    product_s: float
    """Of a repetition, the median."""
    copy_s: float
    """Of a copy in memory, the median."""
    answer_s: float
    """Of a request to the control store, the mean."""
    exchange_s: float
    """Of writing and reading a fixed amount there."""


def wait_s(num_failed: int, interval_s: float) -> float:
    """Seconds from a failed examination to the next: doubled by each, up to a limit.

    >>> [wait_s(number, 1.0) for number in (1, 2, 3, 20)]
    [4.0, 8.0, 16.0, 512.0]
    """
    return interval_s * min(_FIRST_WAIT_INTERVALS * 2.0 ** (num_failed - 1), _LONGEST_WAIT_INTERVALS)


def helpers_of(machine: MachineId, number: int, others: Sequence[MachineId]) -> tuple[MachineId, ...]:
    """The machines that do the same in an examination with this number: others of them each time, in turn.

    >>> [helpers_of(1, number, [0, 2, 3, 4, 5]) for number in (0, 1, 2)]
    [(2, 3, 4), (0, 2, 5), (3, 4, 5)]
    """
    after = sorted(others, key=lambda other: (other < machine, other))
    first = number * NUM_HELPERS % max(1, len(after))
    return tuple(sorted((after[first:] + after[:first])[:NUM_HELPERS]))


def judge_examination(own: Figures | None, likes: Mapping[MachineId, Figures]) -> str:
    """Why the machine does not pass, for people; empty if it does. `own`: None if it has not answered in time.

    Digests have to be equal, and equal to those of a majority of the others. A time is compared with the median of
    theirs. Without an answer of any other machine nothing can be compared, and it does not pass.

    >>> figures = Figures(digests=("a", "a"), product_s=1.0, copy_s=1.0, answer_s=0.001, exchange_s=0.01)
    >>> judge_examination(figures, {MachineId(3): figures})
    ''
    """
    if own is None:
        return "the examination did not end in time"
    if len(set(own.digests)) > 1:
        return "it computes the same matrix product to different values"
    if not likes:
        return "no other machine has answered, so that nothing could be compared"
    return _why_wrong(own, likes) or _why_slow(own, likes)


def _why_wrong(own: Figures, likes: Mapping[MachineId, Figures]) -> str:
    consistent = {machine: like.digests[0] for machine, like in likes.items() if len(set(like.digests)) == 1}
    if not consistent:
        return "the other machines compute the same matrix product to different values"
    ranked = Counter(consistent.values()).most_common(2)
    if own.digests[0] != ranked[0][0] or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        others = ", ".join(str(machine) for machine, digest in sorted(consistent.items()) if digest != own.digests[0])
        return f"its matrix products differ from those of machine{'s' if ',' in others else ''} {others}"
    return ""


def _why_slow(own: Figures, likes: Mapping[MachineId, Figures]) -> str:
    for what, name, limit, least_s in (
        ("matrix product", "product_s", slowness.FAILED, 0.0),
        ("copy in memory", "copy_s", slowness.FAILED, 0.0),
        ("answer of the store", "answer_s", slowness.LINK, LEAST_ANSWER_S),
        ("exchange with the store", "exchange_s", slowness.LINK, LEAST_EXCHANGE_S),
    ):
        found = excess(getattr(own, name), [getattr(like, name) for like in likes.values()])
        if found.exceeds(limit, least_s):
            return f"a {what} takes {found.ratio:.1f} times as long as on the others"
    return ""
