"""Views of a journal in parts, since the journal of a long run exceeds memory.

Only the log and rare records are held whole; records of every group and step are read for some attempts or steps.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

from spare_megatron.journal.files import Line
from spare_megatron.journal.fold import Committed, Evaluation, Fold, FoldedAttempt
from spare_megatron.journal.records import (
    AuditRecord,
    CadenceRecord,
    CheckpointRecord,
    ContributionRecord,
    CulpritRecord,
    EntryRecord,
    EvaluationRecord,
    PacesRecord,
    ParamsRecord,
    Record,
    SnapshotRecord,
    UpdateRecord,
    VoteRecord,
)

Place = tuple[float, int, int]
"""Position of a line in the journal: (time, file number, line number)."""
Placed = tuple[Place, Any]
"""A place and its record."""

FREQUENT = (AuditRecord, ContributionRecord, EvaluationRecord, VoteRecord, UpdateRecord, ParamsRecord)
"""Records that every group writes in every step or evaluation, apart from log entries."""
_UNCHECKED = (CadenceRecord, CheckpointRecord, CulpritRecord, PacesRecord, SnapshotRecord)
"""Records that no rule reads."""


def is_rare(record: Record) -> bool:
    """Whether a record is held throughout the check: of a kind that few write, or an entry that admits groups."""
    if isinstance(record, EntryRecord):
        return bool(record.entry.get("admit"))
    return not isinstance(record, (*FREQUENT, *_UNCHECKED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The range [first, end) of attempts or steps, as `key` says."""

    key: Literal["attempt", "step"]
    first: float = -math.inf
    end: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.first <= number < self.end


class JournalView(Protocol):
    """A journal that is read in parts."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Terms of the run by the settings beside the journal; empty if unknown."""

    @property
    def rare(self) -> Sequence[Line]:
        """Lines with `is_rare` records, in time order."""

    @property
    def entries(self) -> Mapping[int, dict[str, Any]]:
        """Log index -> entry, as first read."""

    @property
    def num_stretches(self) -> int: ...

    @property
    def origin_code(self) -> str | None:
        """Code digest in `origin.json` beside the journal; None without such a file."""

    @property
    def damage(self) -> Sequence[str]:
        """Unreadable lines among those that have been requested so far."""

    def disputed(self) -> list[Placed]:
        """Entry records that differ from the first read of the entry."""

    def select(self, kinds: Collection[type[Record]], stretch: Stretch) -> dict[type[Record], list[Placed]]:
        """Records of frequent kinds in a stretch, each kind in time order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Records of consecutive attempts, with their places."""

    audits: Sequence[Placed]
    contributions: Sequence[Placed]
    votes: Sequence[Placed]
    updates: Sequence[Placed]
    went_on: Collection[tuple[int, int]]
    """(group, attempt) of each contribution or evaluation in these attempts and the next one."""
    commits: Sequence[tuple[int, Committed]]
    """(number among the commits, commit) of each commit on one of these attempts."""
    decided: Sequence[tuple[int, int, Committed, FoldedAttempt, FoldedAttempt | None]]
    """For each of these attempts of a committed step: number of the commit, position among the step's attempts, the
    commit, the attempt, and the step's next attempt or None."""
    evaluations: Sequence[Placed]
    evaluated: Sequence[tuple[int, Evaluation]]
    """(number among the evaluations, evaluation) of each that was decided on one of these attempts."""


def by_attempt(placed: Iterable[Placed]) -> defaultdict[int, list[Any]]:
    found: defaultdict[int, list[Any]] = defaultdict(list)
    for _, record in placed:
        found[record.attempt].append(record)
    return found


def attempts_of(view: JournalView, fold: Fold) -> Iterator[Attempts]:
    """Yields all attempts, a stretch at a time."""
    commits = _Sorted(commit.attempt for commit in fold.commits)
    places = [(number, which) for number, commit in enumerate(fold.commits) for which in range(len(commit.attempts))]
    decided = _Sorted(fold.commits[number].attempts[which].attempt for number, which in places)
    evaluated = _Sorted(evaluation.entry.attempt for evaluation in fold.evaluations)
    for first, end in _cut(commits.numbers, view.num_stretches):
        stretch = Stretch(key="attempt", first=first, end=end)
        kinds = (AuditRecord, ContributionRecord, EvaluationRecord, VoteRecord, UpdateRecord)
        found = view.select(kinds, Stretch(key="attempt", first=first, end=end + 1))
        here = {kind: [placed for placed in found[kind] if placed[1].attempt in stretch] for kind in kinds}
        yield Attempts(
            audits=here[AuditRecord],
            contributions=here[ContributionRecord],
            votes=here[VoteRecord],
            updates=here[UpdateRecord],
            went_on={
                (record.group, record.attempt)
                for kind in (ContributionRecord, EvaluationRecord)
                for _, record in found[kind]
            },
            commits=[(number, fold.commits[number]) for number in commits.within(first, end)],
            decided=[_decided(fold, *places[position]) for position in decided.within(first, end)],
            evaluations=here[EvaluationRecord],
            evaluated=[(number, fold.evaluations[number]) for number in evaluated.within(first, end)],
        )


def _decided(fold: Fold, number: int, which: int) -> tuple[int, int, Committed, FoldedAttempt, FoldedAttempt | None]:
    commit = fold.commits[number]
    following = commit.attempts[which + 1] if which + 1 < len(commit.attempts) else None
    return number, which, commit, commit.attempts[which], following


class Steps:
    """Parameter digests (`params`, in time order) after consecutive numbers of committed steps.

    `commits` has (number among the commits, commit) of those not undone that led to one of these.
    """

    def __init__(self, view: JournalView, stretch: Stretch, commits: Sequence[tuple[int, Committed]]) -> None:
        self._view = view
        self.stretch = stretch
        self.commits = commits
        self.params = [record for _, record in view.select((ParamsRecord,), stretch)[ParamsRecord]]

    @cached_property
    def contributed(self) -> Mapping[int, set[tuple[int, int]]]:
        """Step -> (group, attempt) of each contribution to it; reads the journal."""
        contributed: dict[int, set[tuple[int, int]]] = {}
        for record in self._contributions(self.stretch):
            contributed.setdefault(record.step, set()).add((record.group, record.attempt))
        return contributed

    @cached_property
    def went_on(self) -> Collection[tuple[int, int]]:
        """(group, attempt) of each contribution after one of the commits; reads the journal."""
        attempts = [commit.attempt + 1 for _, commit in self.commits]
        stretch = Stretch(key="attempt", first=min(attempts, default=0), end=max(attempts, default=-1) + 1)
        return {(record.group, record.attempt) for record in self._contributions(stretch)}

    def _contributions(self, stretch: Stretch) -> Iterator[ContributionRecord]:
        for _, record in self._view.select((ContributionRecord,), stretch)[ContributionRecord]:
            yield record


def steps_of(view: JournalView, fold: Fold) -> Iterator[Steps]:
    """Yields all numbers of committed steps, a stretch at a time."""
    kept = [(number, commit) for number, commit in enumerate(fold.commits) if commit.index not in fold.undone]
    steps = _Sorted(commit.step + 1 for _, commit in kept)
    for first, end in _cut(steps.numbers, view.num_stretches):
        commits = [kept[position] for position in steps.within(first, end)]
        yield Steps(view, Stretch(key="step", first=first, end=end), commits)


class _Sorted:
    """Sorted numbers, with their original positions."""

    def __init__(self, numbers: Iterable[int]) -> None:
        before = list(numbers)
        self._positions = sorted(range(len(before)), key=before.__getitem__)
        self.numbers = sorted(before)

    def within(self, first: float, end: float) -> list[int]:
        """Original positions of the numbers in [first, end), ascending."""
        return sorted(self._positions[bisect_left(self.numbers, first) : bisect_left(self.numbers, end)])


def _cut(numbers: Sequence[int], num_stretches: int) -> Iterator[tuple[float, float]]:
    """First and end of stretches that cover everything and hold about equally many of these numbers."""
    inner = sorted(
        {numbers[len(numbers) * part // num_stretches] for part in range(1, num_stretches)} if numbers else ()
    )
    return pairwise((-math.inf, *inner, math.inf))
