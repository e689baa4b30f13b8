"""Suspect microbatches: their loss is far from what losses have been, and another host computes them before the commit.

The group that has counted one votes with the digest of its loss. The entry Retry asks it and another host to compute
the microbatch, too. If all agree, it is the data, and the sum is committed as it is; else `audits.judge` decides over
these statements (docs/protocol_wrong_numbers.md, Suspect microbatches).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from spare_megatron.core.audits.audits import MAX_ROUNDS, Dispute, MicrobatchDigest, Statement, Verdict, question
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Microbatch, Numbered

WINDOW_STEPS = 32
LEAST_STEPS = 8
"""Losses are judged after this many steps, unless they are not finite."""

_FACTOR = 12.0
_LEAST_DISTANCE = 0.01
"""Smallest median distance, as a share of the median: losses may all be alike."""

MOST_AT_ONCE = 4
"""Suspects that one attempt has computed again, beside those of the attempt before."""
MOST_NAMED = 16
"""Suspects that a group names in a vote."""
STEPS_PER_QUESTION = 32
"""Committed steps that allow one further attempt with suspects."""
MOST_QUESTIONS = 4
"""Attempts with suspects that may follow each other."""


class Suspect(NamedTuple):
    """A microbatch whose loss is suspect, and the median before; 0.0 while there is none."""

    microbatch: Numbered
    loss: float
    median: float


class LossWatch:
    """Judges the mean losses of the microbatches that one rank computes, by the median of those of its last 32 steps.

    A loss is suspect if it is not finite, or further from the median than 12 times the median distance from it. With
    losses in a normal distribution that is 8 standard deviations; a fall of the loss widens the distance.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, ...]] = {}  # by step, those that are not suspect

    def on_losses(self, step: int, losses: Mapping[Numbered, float]) -> list[Suspect]:
        """The suspects among the microbatches of an attempt; the others are remembered as losses of the step.

        >>> from spare_megatron.stacking.layout import ShardId
        >>> from spare_megatron.stacking.plans import Microbatch
        >>> first, second = (Numbered(Microbatch(ShardId(0), index), index) for index in range(2))
        >>> watch = LossWatch()
        >>> for step in range(8):
        ...     assert watch.on_losses(step, {first: 4.0 + 0.1 * (step % 2), second: 4.2}) == []
        >>> [(suspect.microbatch.number, suspect.loss) for suspect in watch.on_losses(8, {first: 9.0, second: 4.3})]
        [(0, 9.0)]
        """
        before = [loss for other, some in self._losses.items() if other != step for loss in some]
        is_judged = sum(other != step for other in self._losses) >= LEAST_STEPS
        middle = median(before) if before else 0.0
        distance = max(median(abs(loss - middle) for loss in before) if before else 0.0, _LEAST_DISTANCE * abs(middle))
        limit = _FACTOR * distance if is_judged else math.inf
        # The first form catches NaN, too.
        suspects = [
            Suspect(microbatch, loss, middle)
            for microbatch, loss in sorted(losses.items())
            if not (math.isfinite(loss) and abs(loss - middle) <= limit)
        ]
        sound = tuple(loss for microbatch, loss in losses.items() if microbatch not in {one[0] for one in suspects})
        if sound:
            self._losses.pop(step, None)  # the newest comes last, also after a restart
            self._losses[step] = sound
            if len(self._losses) > WINDOW_STEPS:
                del self._losses[next(iter(self._losses))]
        return suspects

    def on_restart(self, step: int) -> None:
        """Training goes on after so many committed steps: forgets those that are computed again."""
        self._losses = {other: losses for other, losses in self._losses.items() if other < step}


class QuestionBudget:
    """Attempts that suspects may still cost, so that noisy losses hold no run up: at most
    `MOST_QUESTIONS` + n / `STEPS_PER_QUESTION` in n committed steps. Equal after the same entries.
    """

    def __init__(self) -> None:
        self._credit = MOST_QUESTIONS * STEPS_PER_QUESTION

    @property
    def is_left(self) -> bool:
        return self._credit >= STEPS_PER_QUESTION

    def on_commit(self) -> None:
        self._credit = min(self._credit + 1, MOST_QUESTIONS * STEPS_PER_QUESTION)

    def on_question(self) -> None:
        self._credit -= STEPS_PER_QUESTION


Named = tuple[GroupId, Microbatch]
"""A group states the loss of a microbatch."""


def named_in(disputes: Iterable[Dispute]) -> frozenset[Named]:
    """What groups have stated about suspects, or were asked."""
    return frozenset(
        (group, dispute.microbatch)
        for dispute in disputes
        if dispute.is_suspicion
        for group in (*(statement.group for statement in dispute.statements), *dispute.asked)
    )


def suspicions(losses: Mapping[GroupId, Sequence[MicrobatchDigest]], known: Collection[Named]) -> tuple[Dispute, ...]:
    """The suspects that groups name and were in no question about, from all groups in turn; no group is asked yet.

    >>> digests = [MicrobatchDigest(0, 0, 5), MicrobatchDigest(0, 1, 6)]
    >>> [one.microbatch.index for one in suspicions({GroupId(0): digests}, {(GroupId(0), Microbatch(0, 0))})]
    [1]
    """
    by_microbatch: dict[Microbatch, list[Statement]] = {}
    order: dict[Microbatch, tuple[int, GroupId]] = {}
    for group in sorted(losses):
        for place, item in enumerate(losses[group]):
            if (group, item.microbatch) in known:
                continue
            by_microbatch.setdefault(item.microbatch, []).append(Statement(group, item.digest))
            order[item.microbatch] = min((place, group), order.get(item.microbatch, (place, group)))
    return tuple(
        Dispute(microbatch=one, statements=tuple(by_microbatch[one]), asked=(), num_rounds=0, is_suspicion=True)
        for one in sorted(by_microbatch, key=lambda one: (order[one], one))
    )


def first_questions(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts without those questions about suspects that have to wait for the next attempt."""
    kept: list[Verdict] = []
    num_new = 0
    for verdict in verdicts:
        is_new = isinstance(verdict, Dispute) and verdict.is_suspicion and verdict.num_rounds == 1
        num_new += is_new
        kept.append(None if is_new and num_new > MOST_AT_ONCE else verdict)
    return kept


def confirmation(dispute: Dispute, able: Iterable[GroupId]) -> Dispute | None:
    """The question to a host without a statement on a suspect; None if two have made one, or if none is left to ask.

    The groups with a statement compute it again, too: one may contradict itself, and their digests along the stages
    show where the computations part.
    """
    reported = {statement.group for statement in dispute.statements}
    able = list(able)
    further = [group for group in able if group not in reported]
    if len(reported) > 1 or not further or dispute.num_rounds >= MAX_ROUNDS:
        return None
    asked = (further[0], *sorted(reported & set(able)))
    return question(dispute, asked)
