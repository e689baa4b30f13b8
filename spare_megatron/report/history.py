"""The history of a run as its journal has it, laid out along its committed steps for a reader's eyes."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from spare_megatron.journal.check import fold_journal
from spare_megatron.journal.files import Journal
from spare_megatron.journal.fold import Committed, Fold
from spare_megatron.journal.goodput import Goodput, find_goodput, read_times
from spare_megatron.journal.records import ContributionRecord, LossRecord, RunRecord, UpdateRecord
from spare_megatron.journal.summary import Summary, summarize

Presence = Literal["training", "lost", "away"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One committed step. Its time is 0 at the run's record.

    Attributes:
        step: The step.
        ended_s: When the groups read its commit, the median of them.
        loss: Mean cross entropy per token.
        grad_norm: Norm of the gradient.
        members: The groups that took part when it was committed.
        lost: The groups that began it and were lost before its commit.
        step_s: Group -> seconds from its start to its update there.
        load: Group -> microbatches of it that the group computed.
        is_undone: A restart from a checkpoint threw it away.
    """

    step: int
    ended_s: float
    loss: float
    grad_norm: float
    members: frozenset[int]
    lost: frozenset[int]
    step_s: Mapping[int, float]
    load: Mapping[int, int]
    is_undone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Consecutive steps that a group spent in one way; seconds as in `Step`."""

    group: int
    from_s: float
    to_s: float
    presence: Presence


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A group found lost.

    Attributes:
        found_s: When, as in `Step`.
        group: The group.
        cause: What was found.
        pending: What its ranks were about, as far as that is known.
        is_given_up: It stays away.
    """

    found_s: float
    group: int
    cause: str
    pending: str
    is_given_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run.

    Attributes:
        run: Its terms.
        summary: Its figures.
        goodput: Where its time went; None if it has no end or no step.
        steps: The committed steps in the order of the log.
        losses: In the order in which they were found.
    """

    run: RunRecord
    summary: Summary
    goodput: Goodput | None
    steps: Sequence[Step]
    losses: Sequence[Loss]


def history_of(journal: Journal) -> History:
    """The history that a journal tells.

    Raises:
        ValueError: It lacks the run's record, with which every journal begins.
    """
    begun = [(line.at_s, line.record) for line in journal.lines if isinstance(line.record, RunRecord)]
    if len(begun) != 1:
        raise ValueError(f"the journal has {len(begun)} run records, expected 1: there is nothing to tell")
    began_s, run = begun[0]
    fold = fold_journal(journal, run)
    losses = [
        Loss(
            found_s=line.at_s - began_s,
            group=line.record.group,
            cause=line.record.cause,
            pending=_pending(line.record),
            is_given_up=line.record.is_given_up,
        )
        for line in journal.lines
        if isinstance(line.record, LossRecord)
    ]
    return History(
        run=run,
        summary=summarize(journal),
        goodput=find_goodput(journal, fold),
        steps=_steps(journal, fold, began_s),
        losses=losses,
    )


def presence(history: History) -> list[Interval]:
    """How each group spent its time, in as few intervals as there are changes."""
    found: list[Interval] = []
    for group in range(history.run.num_groups):
        before_s = 0.0
        spans: list[tuple[float, float, Presence]] = []
        for step in history.steps:
            state: Presence = "training" if group in step.members else "lost" if group in step.lost else "away"
            spans.append((before_s, step.ended_s, state))
            before_s = step.ended_s
        for state, same in itertools.groupby(spans, key=lambda span: span[2]):
            parts = list(same)
            found.append(Interval(group=group, from_s=parts[0][0], to_s=parts[-1][1], presence=state))
    return found


def _steps(journal: Journal, fold: Fold, began_s: float) -> list[Step]:
    times_s = read_times(journal)(np.arange(max(fold.entries, default=-1) + 1))
    at_s = {index: float(read_s) for index, read_s in enumerate(times_s) if not np.isnan(read_s)}
    updates: dict[tuple[int, int], list[UpdateRecord]] = defaultdict(list)
    for update in journal.of(UpdateRecord):
        updates[update.step, update.attempt].append(update)
    loads: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for record in journal.of(ContributionRecord):
        count = sum(map(len, record.microbatches.values()))
        loads[record.step, record.attempt][record.group] = count
    told = [commit for commit in fold.commits if commit.index in at_s]
    return [_step(commit, at_s[commit.index] - began_s, updates[commit.step, commit.attempt], loads) for commit in told]


def _step(
    commit: Committed,
    ended_s: float,
    updates: Iterable[UpdateRecord],
    loads: Mapping[tuple[int, int], Mapping[int, int]],
) -> Step:
    known = list(updates)
    return Step(
        step=commit.step,
        ended_s=ended_s,
        loss=median(update.loss for update in known) if known else float("nan"),
        grad_norm=median(update.grad_norm for update in known) if known else float("nan"),
        members=commit.members,
        lost=commit.began_with - commit.members,
        step_s={update.group: update.step_s for update in known},
        load=loads.get((commit.step, commit.attempt), {}),
        is_undone=commit.is_undone,
    )


def _pending(loss: LossRecord) -> str:
    return ", ".join(f"rank {item['rank']}: {item['operation']}" for item in loss.pending)
