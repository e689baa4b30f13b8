"""The history of a run from its journal, as arrays over its committed steps."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from spare_megatron.core.log.loss_sums import losses_of
from spare_megatron.journal.fold import Committed, Fold
from spare_megatron.journal.records import CheckpointRecord, LossRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import Goodput, flops_utilization, tokens_per_second
from spare_megatron.journal.state.overview import Overview
from spare_megatron.journal.state.rank_paces import over_others
from spare_megatron.journal.state.recoveries import Recovery
from spare_megatron.journal.state.run_state import RunState, StepTable

Presence = Literal["training", "lost", "away"]
PRESENCES: tuple[Presence, ...] = ("away", "training", "lost")
Floats = npt.NDArray[np.float64]
Table = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps:
    """The committed steps in the order of the log; all arrays have one element per step."""

    step: npt.NDArray[np.int64]
    ended_s: Floats
    """When the groups read the commit, median over groups, in seconds since the run's record."""
    loss: Floats
    """Mean cross entropy per token; NaN if not reported. So are `grad_norm` and `learning_rate`."""
    grad_norm: Floats
    learning_rate: Floats
    is_undone: npt.NDArray[np.bool_]
    """A restart from a checkpoint discarded the step."""
    members: Sequence[frozenset[int]]
    """The groups that took part when it was committed."""
    num_ranks: Floats
    """Of these groups."""
    lost: Sequence[frozenset[int]]
    """The groups that began it and were lost before its commit."""
    step_s: Table
    """Seconds from its start to its update in each group, shape (steps, groups); NaN if not reported."""
    load: Table
    """Microbatches of it that each group computed, same shape."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def taken_s(self) -> Floats:
        """Seconds from commit to commit; the first from the run's record."""
        return np.diff(self.ended_s, prepend=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPaces:
    """How fast ranks computed, in some of the committed steps."""

    commit: npt.NDArray[np.intp]
    """Indices of the steps."""
    ratio: Table
    """Each rank's time for a microbatch over the median of the same rank in the other groups, shape (steps, groups,
    ranks of a group); NaN if not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Consecutive steps that a group spent in one state; seconds since the run's record."""

    group: int
    from_s: float
    to_s: float
    presence: Presence


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    run: RunRecord
    figures: dict[str, object]
    """By their names in `summary.json`."""
    goodput: Goodput | None
    """Where its time went; None if it has no step."""
    steps: CommittedSteps
    paces: MeasuredPaces
    pace_changes: Sequence[tuple[int, Mapping[int, float]]]
    """Index of a committed step, and the paces by which it and later ones are dealt, over those of most groups; groups
    that are as fast as most are not named."""
    losses: Sequence[tuple[float, LossRecord]]
    """Each with its seconds since the run's record."""
    recoveries: Sequence[Recovery]
    began_s: float | None
    """When the run began, in seconds since the epoch; None for a simulated run."""
    lasted_s: float
    """Seconds from then to its end, or to now."""
    checkpoints: Sequence[tuple[float, CheckpointRecord]]
    """How saves ended, each with its seconds since the run's record."""
    overview: Overview
    num_places_taken: int
    """By machines that replaced others or moved to make groups whole."""
    evaluations: Mapping[str, Mapping[int, float]]
    """Validation set -> committed steps and loss of each evaluation that counts, the last one of a step."""
    params: Mapping[tuple[int, str], frozenset[str]]
    """As `RunState.params` returns them, as far as they have been read."""
    further: Mapping[str, tuple[npt.NDArray[np.int64], Floats]]
    """Key of a metric of `journal.step_values` -> steps that no restart undid, and its values."""

    def tokens_per_s(self) -> Floats | None:
        """Tokens per second of each step; NaN for the first, which includes the start. None if unknown."""
        return tokens_per_second(self.run, self._whole_batch_s())

    def utilization(self) -> Floats | None:
        """Model FLOPs utilization of the groups that committed each step; NaN and None as in `tokens_per_s`."""
        return flops_utilization(self.run, self._whole_batch_s(), self.steps.num_ranks)

    def _whole_batch_s(self) -> Floats:
        """Seconds of each step, had it the batch that the run has after the ramp."""
        taken_s = self.steps.taken_s / [self.run.size_of_step(step) for step in self.steps.step.tolist()]
        taken_s[:1] = np.nan
        return np.where(taken_s > 0, taken_s, np.nan)  # a clock may have been set back


def history_of(run_state: RunState, overview: Overview) -> History:
    """Builds the history of a run until the end of its overview. ValueError: the journal lacks the run's record, with
    which every journal begins.
    """
    if run_state.run is None:
        raise ValueError("the journal has no run record: there is nothing to show")
    folding, table = run_state.folding, run_state.steps
    assert folding is not None, "a run has a log"
    reported = [commit for commit in folding.commits if commit.attempt < len(table.loss)]
    paced, pace_s = table.paces.of(np.array([commit.attempt for commit in reported], np.int64))
    return History(
        run=run_state.run,
        figures=dict(run_state.figures()),
        goodput=run_state.goodput(overview.until_s),
        steps=_steps(run_state, folding, reported),
        paces=MeasuredPaces(commit=paced, ratio=over_others(pace_s)),
        pace_changes=[
            (commit, {int(group): permille / 1000 for group, permille in paces.items()})
            for commit, paces in run_state.pace_changes
        ],
        losses=[(at_s - run_state.began_s, record) for at_s, record in run_state.losses],
        recoveries=run_state.recoveries.found(),
        began_s=None if run_state.run.reduce_mode == "simulated" else run_state.began_s,
        lasted_s=overview.until_s - run_state.began_s,
        checkpoints=[
            (at_s - run_state.began_s, record)
            for at_s, record in sorted(run_state.checkpoints, key=lambda saved: saved[0])
        ],
        overview=overview,
        num_places_taken=run_state.num_places_taken,
        evaluations=_evaluations(folding),
        params=run_state.params(),
        further=_further(table, folding, reported),
    )


def _evaluations(folding: Fold) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for evaluation in folding.kept_evaluations:
        for name, loss in losses_of(evaluation.entry.sums).items():
            found.setdefault(name, {})[evaluation.entry.step] = loss
    return found


def _further(
    table: StepTable, folding: Fold, reported: Sequence[Committed]
) -> dict[str, tuple[npt.NDArray[np.int64], Floats]]:
    kept = [commit for commit in reported if commit.index not in folding.undone]
    found = table.further.of(np.array([commit.attempt for commit in kept], np.intp))
    steps = np.array([commit.step for commit in kept], np.int64)
    return {key: (steps[places], values) for key, (places, values) in found.items() if len(places)}


def _steps(run_state: RunState, folding: Fold, commits: Sequence[Committed]) -> CommittedSteps:
    table, undone = run_state.steps, folding.undone
    attempts = np.array([commit.attempt for commit in commits], np.intp)
    return CommittedSteps(
        step=np.array([commit.step for commit in commits], np.int64),
        ended_s=run_state.entry_times(np.array([commit.index for commit in commits], np.intp)) - run_state.began_s,
        loss=table.loss[attempts],
        grad_norm=table.grad_norm[attempts],
        learning_rate=table.learning_rate[attempts],
        is_undone=np.array([commit.index in undone for commit in commits], np.bool_),
        members=[commit.members for commit in commits],
        num_ranks=np.array(
            [folding.run.num_ranks(len(one.members), one.num_missing_stages) for one in commits], np.float64
        ),
        lost=[
            frozenset() if commit.began_with is commit.members else commit.began_with - commit.members
            for commit in commits
        ],
        step_s=table.step_s[attempts],
        load=table.load[attempts],
    )


def presence(history: History) -> list[Interval]:
    """The states of each group as maximal intervals, ordered by group and time."""
    steps = history.steps
    states = np.zeros((len(steps), history.run.most_groups), np.uint8)
    drawn: tuple[frozenset[int], frozenset[int]] | None = None
    for index, (members, lost) in enumerate(zip(steps.members, steps.lost, strict=True)):
        if drawn == (members, lost):
            states[index] = states[index - 1]
        else:
            states[index, list(lost)] = PRESENCES.index("lost")
            states[index, list(members)] = PRESENCES.index("training")
            drawn = members, lost
    bounds_s = [0.0, *steps.ended_s.tolist()]
    found = []
    for group, of_group in enumerate(states.T):
        changes = [*np.flatnonzero(np.diff(of_group, prepend=len(PRESENCES))).tolist(), len(steps)]
        for first, end in itertools.pairwise(changes):
            state = PRESENCES[of_group[first]]
            found.append(Interval(group=group, from_s=bounds_s[first], to_s=bounds_s[end], presence=state))
    return found
