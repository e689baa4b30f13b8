"""When groups were lost and taken in again, by a journal, of a real run or of a simulated one."""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from spare_megatron.journal.check import fold_journal
from spare_megatron.journal.files import Journal
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import EntryRecord, FaultRecord, LossRecord, RunRecord, UpdateRecord
from spare_megatron.simulator.measured import StepTimes

_Life = tuple[int, int]
"""Group and incarnation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTime:
    """The loss of a group.

    Attributes:
        group: The group.
        step: The step during which it happened, or that found it, if it happened between two.
        into_s: From the start of that step.
        back_after: The step at whose end the group was taken in again; None if it was not.
    """

    group: int
    step: int
    into_s: float
    back_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTime:
    """Groups taken in together.

    Attributes:
        step: The first step that they take part in.
        groups: The groups.
        pause_s: By how much that step ended later after the one before than the quiet steps of as many groups do.
    """

    step: int
    groups: tuple[int, ...]
    pause_s: float


def read_losses(journal: Journal, steps: Sequence[StepTimes]) -> tuple[LossTime, ...]:
    """The losses during these steps, in the order of their times. Who was lost before it was taken in took no part.

    Args:
        journal: A journal with one run record.
        steps: Its steps.
    """
    if not steps:
        return ()
    fold = fold_journal(journal, journal.of(RunRecord)[0])
    returns = _returns(fold)
    lives: dict[int, list[int]] = defaultdict(list)
    for group, incarnation in sorted(returns):
        lives[group].append(incarnation)
    beginnings = [step.began_at_s for step in steps]
    losses = []
    for (group, incarnation), at_s in _lost_at_s(journal, fold).items():
        num_begun = bisect_right(beginnings, at_s)
        if not num_begun or at_s >= steps[-1].ended_at_s:
            continue
        found_in = steps[num_begun - 1]
        if at_s > found_in.ended_at_s:  # while groups were taken in
            found_in = steps[num_begun]
        later = bisect_right(lives[group], incarnation)
        next_life = (group, lives[group][later]) if later < len(lives[group]) else None
        losses.append(
            LossTime(
                group=group,
                step=found_in.step,
                into_s=max(0.0, at_s - found_in.began_at_s),
                back_after=None if next_life is None else returns[next_life],
            )
        )
    return tuple(sorted(losses, key=lambda loss: (loss.step, loss.into_s, loss.group)))


def read_joins(journal: Journal, steps: Sequence[StepTimes]) -> tuple[JoinTime, ...]:
    """The admissions of groups that nothing else disturbed, where there are quiet steps to compare with.

    Args:
        journal: A journal with one run record.
        steps: Its steps.
    """
    joined: dict[int, list[int]] = defaultdict(list)
    for (group, _), after in _returns(fold_journal(journal, journal.of(RunRecord)[0])).items():
        joined[after + 1].append(group)
    # From end to end: those who do not give the state begin the next step at once, and then wait for those who do.
    lasted_s = {after.step: after.ended_at_s - before.ended_at_s for before, after in itertools.pairwise(steps)}
    quiet_s: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.is_clean and step.step in lasted_s:
            quiet_s[len(step.loads)].append(lasted_s[step.step])
    joins = []
    for step in steps:
        usual_s = quiet_s.get(len(step.loads))
        if step.step in joined and step.step in lasted_s and step.disturbance == "join" and usual_s:
            pause_s = max(0.0, lasted_s[step.step] - median(usual_s))
            joins.append(JoinTime(step=step.step, groups=tuple(sorted(joined[step.step])), pause_s=pause_s))
    return tuple(joins)


def _returns(fold: Fold) -> dict[_Life, int]:
    """Each life that was taken in -> the step at whose end it was."""
    steps = {commit.attempt + 1: commit.step for commit in fold.commits}
    returns: dict[_Life, int] = {}
    for attempt, members in sorted(fold.opened.items()):
        for life in members.items():
            if life[1] and attempt in steps:
                returns.setdefault(life, steps[attempt])
    return returns


def _lost_at_s(journal: Journal, fold: Fold) -> dict[_Life, float]:
    """Each life that took part and was lost -> when: that of its fault, else of whatever tells first of its fence."""
    ends = dict(fold.fenced)
    struck_at_s: dict[int, float] = {}
    lost_at_s: dict[_Life, float] = {}
    for line in journal.lines:
        match line.record:
            case UpdateRecord(group=group):
                struck_at_s.pop(group, None)  # a fault that it survived
            case FaultRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
            case LossRecord(entry_index=index) | EntryRecord(index=index) if index in ends:
                life = ends.pop(index)
                lost_at_s[life] = struck_at_s.pop(life[0], line.at_s)
    return lost_at_s
