"""Judges the examination of a machine in quarantine: what it computes, keeps and transfers, and how fast, beside
machines that train.

What has known results has to have these. All machines compute the same seeded products and copies, whose times leave
out waits for a processor that other processes of the run have, so that a machine that trains is a fair yardstick.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.stacking import slowness
from spare_megatron.stacking.layout import MachineId
from spare_megatron.stacking.slowness import excess

NUM_HELPERS = 3
"""Machines that train and do the same, at most: with two of them that agree, the third cannot be at fault for both."""
LIMIT_INTERVALS, LEAST_LIMIT_S = 30.0, 120.0
"""Heartbeat intervals after which what has not been answered counts as no answer, and at least so many seconds for the
examined machine, which works on all of its GPUs in turn.
"""
TRANSFER_INTERVALS, TRANSFER_S = 8.0, 4.0
"""What transfers between machines may take: these intervals, and seconds for each device."""
STEP_INTERVALS = 6.0
"""How long a machine that trains waits for the end of a step, and training then at most for its checks."""
_FIRST_WAIT_INTERVALS, _LONGEST_WAIT_INTERVALS = 4.0, 512.0

LEAST_ANSWER_S = 0.02
LEAST_EXCHANGE_S = 0.2
"""Shorter answers and exchanges never fail: on a busy machine they scatter by more than any ratio."""
_USUAL_CLOCK = ": power cap"
"""A GPU under full load reaches its power cap; its time says whether that is too slow."""


class Load(NamedTuple):
    """What an examination computes from, and injected faults: it drifts, and takes `factor` times as long."""

    seed: int
    leaves_waits_out: bool
    """Waits for processors that others use are no part of its times."""
    drifts: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a machine has found in an examination."""

    digests: tuple[str, ...]
    """Of the result of the seeded product on each device."""
    product_s: float
    """Of a repetition, the median."""
    copy_s: float
    """Of a copy in memory, the median."""
    answer_s: float
    """Of a request to the control store, the mean."""
    exchange_s: float
    """Of writing and reading a fixed amount there."""
    wrong: tuple[str, ...] = ()
    """Errors in results that are known beforehand, each with the device and what failed."""
    reduced: tuple[tuple[str, str], ...] = ()
    """Devices whose clock was reduced under load; to what, and why, as in `machine.gpus.reduced_clocks`."""
    after_step: int = -1
    """The step after which the first rank of the machine waited for all this; -1 if none did."""
    model: str = ""
    """Of its devices. Another one has other times, and may compute a product to other bits."""
    linked: tuple[MachineId, ...] | None = None
    """The other machines with which transfers have ended; None: not this machine was examined."""


def wait_s(num_failed: int, interval_s: float) -> float:
    """Seconds from a failed examination to the next: doubled by each, up to a limit.

    >>> [wait_s(number, 1.0) for number in (1, 2, 3, 20)]
    [4.0, 8.0, 16.0, 512.0]
    """
    return interval_s * min(_FIRST_WAIT_INTERVALS * 2.0 ** (num_failed - 1), _LONGEST_WAIT_INTERVALS)


def helpers_of(position: int, number: int, others: Sequence[MachineId]) -> tuple[MachineId, ...]:
    """The machines that do the same in an examination with this number: others of them each time, in turn, and for each
    `position` of a machine among those in quarantine.

    >>> [helpers_of(0, number, [0, 2, 3, 4, 5]) for number in (0, 1, 2)]
    [(0, 2, 3), (0, 4, 5), (2, 3, 4)]
    """
    first = (position + number) * NUM_HELPERS % max(1, len(others))
    return tuple(sorted((sorted(others)[first:] + sorted(others)[:first])[:NUM_HELPERS]))


def judge_examination(own: Figures | None, likes: Mapping[MachineId, Figures]) -> str:
    """Why the machine does not pass, for people; empty if it does. `own`: None if it has not answered in time.

    Digests have to be equal, and equal to those of a majority of the others. A time is compared with the median of
    theirs. Digests and times of products and copies count of machines with the same model of device alone. Heat, the
    hardware or a power brake may reduce a clock only if they do so for most of the others, too. Without an answer of
    any other machine nothing can be compared, and it does not pass.

    >>> figures = Figures(digests=("a", "a"), product_s=1.0, copy_s=1.0, answer_s=0.001, exchange_s=0.01)
    >>> judge_examination(figures, {MachineId(3): figures})
    ''
    """
    if own is None:
        return "the examination did not end in time"
    if own.wrong:
        return own.wrong[0]
    if len(set(own.digests)) > 1:
        return "its devices compute the same matrix product to different values"
    if not likes:
        return "no other machine has answered, so that nothing could be compared"
    reason = _why_wrong(own, likes) or _why_slow(own, likes) or _why_reduced(own, likes)
    if not reason and own.linked is not None and not likes.keys() & own.linked:
        return "no transfer of known content with another machine has ended"
    return reason


def _why_wrong(own: Figures, likes: Mapping[MachineId, Figures]) -> str:
    sound = {machine: like for machine, like in likes.items() if not like.wrong}
    if not sound:  # perhaps by what the examined machine has sent to them
        return f"machine {min(likes)} has found that {likes[min(likes)].wrong[0]}"
    alike = {machine: like.digests for machine, like in sound.items() if like.model == own.model}
    if not alike:
        return ""
    consistent = {machine: digests[0] for machine, digests in alike.items() if len(set(digests)) == 1}
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
        alike = [like for like in likes.values() if limit == slowness.LINK or like.model == own.model]
        found = excess(getattr(own, name), [getattr(like, name) for like in alike or [own]])
        if found.exceeds(limit, least_s):
            return f"a {what} takes {found.ratio:.1f} times as long as on the others"
    return ""


def _why_reduced(own: Figures, likes: Mapping[MachineId, Figures]) -> str:
    found, *others = (
        [f"{device} has {clock}" for device, clock in of.reduced if not clock.endswith(_USUAL_CLOCK)]
        for of in (own, *likes.values())
    )
    is_common = 2 * sum(map(bool, others)) > len(others)
    return f"under load {found[0]}, and most other machines have no such device" if found and not is_common else ""
