"""Folds the journaled decision log: who took part when, what was committed, and what restarts and undos made void."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from spare_megatron.core.log import entries as log
from spare_megatron.core.log.loss_sums import EvaluationPolicy, losses_of
from spare_megatron.core.log.membership import Change, LogTerms, Membership
from spare_megatron.core.log.votes import WRONG_NUMBERS
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.placement import Placement, make_placement
from spare_megatron.stacking.state_partitions import PartitionSetup

Members = frozenset[int]
Severity = Literal["invalid", "unknown", "remark"]
LastLosses = dict[str, dict[str, float | None]]
"""Validation set -> `step` and `loss`."""


class Finding(NamedTuple):
    """One reason why a journal is not valid, or a remark."""

    severity: Severity
    """`invalid` contradicts the invariant; `unknown` prevents its proof; `remark` does neither."""
    reason: str
    place: tuple[Any, ...] = ()
    """Sort key among the findings of a rule; equal places keep the order in which they were found."""


invalid, unknown = partial(Finding, "invalid"), partial(Finding, "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAttempt:
    """A decided attempt of a step; a committed step may hold sums of several. All members voted."""

    attempt: int
    kept: tuple[int, ...]
    """By position, the number of leading buckets that kept their sums and were not reduced; empty: none."""
    members: Members


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit entry."""

    index: int
    step: int
    attempt: int
    members: Members
    """Groups that took part when it was written; all of them voted."""
    began_with: Members
    """Groups that took part when the step began."""
    saved: bool
    is_last: bool
    """It ends the run, whatever the planned number of steps."""
    num_missing_stages: int
    """Those that the members together lacked."""
    attempts: tuple[FoldedAttempt, ...]
    """Attempts whose buckets may have been kept, ending with the committed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A decided evaluation, by the members (group -> incarnation) that all voted."""

    index: int
    entry: log.Evaluated
    members: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """State after the first `num_entries` entries, of which none is missing."""

    num_entries: int
    num_errors: int
    """Of the errors, those of these entries."""
    is_over: bool
    attempt: float
    """Attempt under way; infinite if the run is over."""
    position: tuple[float, float]
    """(restarts and undos, committed steps): earlier comparisons are settled. Infinite if the run is over."""


def placement_of(run: RunRecord) -> Placement:
    return make_placement(run.placement, run.num_groups, run.redundancy, run.groups_per_domain)  # type: ignore[arg-type]


class Fold(Membership):
    """A log as far as the journal has it, or up to one of its entries; unchanged memberships stay the same objects."""

    def __init__(self, run: RunRecord, entries: Mapping[int, dict[str, Any]] = MappingProxyType({})) -> None:
        super().__init__(_log_terms(run))
        self.run = run
        self.entries = entries
        self.incarnations: Mapping[int, int] = dict(self.voters)
        self.groups: Members = frozenset(self.members)
        self.began_with = self.groups
        self.attempts: list[FoldedAttempt] = []  # decided ones of the step
        self.commits: list[Committed] = []
        self.undone: set[int] = set()  # indices of commits
        self.evaluations: list[Evaluation] = []
        self.kept_evaluations: list[Evaluation] = []  # of parameters that no restart and no undo made void
        self.last_fenced_at: dict[int, int] = {}  # index of the last fence that removed the group from the members
        self.fenced: dict[int, tuple[int, int]] = {}  # index of each such fence -> (group, incarnation)
        # Steps as (restarts, committed steps before): the groups whose contribution to it was discarded, those that
        # began again from zero sums and gathered parameters again, and those that began again after a pause.
        self.discarded: dict[tuple[int, int], Members] = {}
        self.found_wrong: set[tuple[int, int]] = set()  # (attempt, group fenced for what its own checks have found)
        self.computed_anew: set[tuple[int, int]] = set()
        self.resumed: set[tuple[int, int]] = set()
        self.opened: dict[int, Mapping[int, int]] = {0: self.incarnations}
        """Attempt -> members when it began, as group -> incarnation; lacks attempts that no entry implies."""
        self.restarts: dict[int, tuple[int, log.Restart | log.Undo]] = {}  # index -> attempt that it begins, entry
        self.errors: list[str] = []
        self.known = self._known(0)
        """State before the first gap; later entries may contradict records only because of the gap."""
        self.is_cut = False
        """All processes were ended at once, so that a group may not have applied the last commit."""

    @property
    def is_whole(self) -> bool:
        return self.known.num_entries == len(self.entries)

    def finding(self, reason: str, place: tuple[Any, ...] = (), *, is_known: bool) -> Finding:
        """A contradiction with another record; `is_known`: the entries of `known` alone show it."""
        return Finding("invalid" if is_known else "unknown", reason, place)

    @property
    def kept_commits(self) -> list[Committed]:
        """Commits that no restart and no undo made void, in log order."""
        return [commit for commit in self.commits if commit.index not in self.undone]

    def last_losses(self) -> LastLosses:
        """The last evaluation of each set that counts; a loss that is not finite is None."""
        return {
            name: {"step": one.entry.step, "loss": None if math.isnan(loss) else loss}
            for one in self.kept_evaluations
            for name, loss in losses_of(one.entry.sums).items()
        }

    def add(self, index: int, fields: Mapping[str, Any]) -> Change:
        """Folds the entry of this index; those between the last one and this one are missing."""
        change = Change(voters=self.voters, epoch=self.epoch)
        try:
            change = self._add(index, log.entry_of(fields))
        except ValueError as error:
            self.errors.append(f"log entry {index}: {error}")
        if index == self.known.num_entries:
            self.known = self._known(index + 1)
        return change

    def _add(self, index: int, entry: log.Entry) -> Change:
        self.head = index
        key = (self.num_restarts, self.step)
        if isinstance(entry, log.Commit | log.Retry):
            self.attempts.append(FoldedAttempt(attempt=entry.attempt, kept=self.kept, members=self.groups))
        groups, num_missing = self.groups, self.num_missing_stages
        change = self.apply(entry)
        self.errors += change.contradictions
        if self.voters is not change.voters:
            self.incarnations, self.groups = dict(self.voters), frozenset(self.members)
        match entry:
            case log.Fence():
                self._add_fence(index, entry, change, key)
                return change
            case log.Commit():
                self._add_commit(index, entry, groups, num_missing)
            case log.Retry(recompute=True):
                self.attempts.clear()
                self.computed_anew.add(key)
            case log.Evaluated():
                self.attempts.clear()
                self.evaluations.append(Evaluation(index=index, entry=entry, members=self.incarnations))
                self.kept_evaluations.append(self.evaluations[-1])
            case log.Synced():
                self.attempts.clear()
            case log.Resume():
                self.attempts.clear()
                self.resumed.add(key)
            case log.Restart() | log.Undo():
                self._add_restart(index, entry)
        if not isinstance(entry, log.Finish | log.GiveUp | log.Halt):
            self.opened[self.attempt] = self.incarnations
        return change

    def _known(self, num_entries: int) -> Known:
        return Known(
            num_entries=num_entries,
            num_errors=len(self.errors),
            is_over=self.is_over,
            attempt=math.inf if self.is_over else self.attempt,
            position=(math.inf, math.inf) if self.is_over else (self.num_restarts, self.step),
        )

    def _add_fence(self, index: int, fence: log.Fence, change: Change, key: tuple[int, int]) -> None:
        if self.drained.get(fence.group, fence.incarnation + 1) <= fence.incarnation:
            self.last_fenced_at[fence.group] = index  # it may have ended before it applied its last commit
        for group, incarnation in change.lost:
            self.last_fenced_at[group] = index
            self.fenced[index] = (group, incarnation)
        if fence.discard:
            self.discarded[key] = self.discarded.get(key, frozenset()) | {fence.group}
        if fence.error == WRONG_NUMBERS:
            self.found_wrong.add((self.attempt, fence.group))

    def _add_commit(self, index: int, commit: log.Commit, members: Members, num_missing: int) -> None:
        self.commits.append(
            Committed(
                index=index,
                step=commit.step,
                attempt=commit.attempt,
                members=members,
                began_with=self.began_with,
                saved=commit.save,
                is_last=commit.is_last,
                num_missing_stages=num_missing,
                attempts=tuple(self.attempts),
            )
        )
        self.attempts.clear()
        self.began_with = self.groups

    def _add_restart(self, index: int, restart: log.Restart | log.Undo) -> None:
        kept = self.kept_commits
        saved = {self.run.first_step} | {commit.step + 1 for commit in kept if commit.saved}
        step, snapshot = restart.step, restart.snapshot
        if snapshot is not None:
            if (step, snapshot) not in {(commit.step + 1, commit.attempt) for commit in kept}:
                what = f"a snapshot after {step} steps"
                self.errors.append(f"training goes back to {what}, which attempt {snapshot} did not commit")
        elif step not in saved:
            self.errors.append(f"a restart loads a checkpoint after {step} steps, which was never saved")
        self.undone |= {commit.index for commit in kept if commit.step >= step}
        self.kept_evaluations = [one for one in self.kept_evaluations if one.entry.step <= step]
        self.began_with = self.groups
        self.attempts.clear()
        self.restarts[index] = (self.attempt, restart)


Rule = Callable[[Any, RunRecord, Fold], Iterator[Finding]]
"""Checks a part of the records: attempts or steps, as `journal.journal_view` has them."""


def _log_terms(run: RunRecord) -> LogTerms:
    partitions = None
    if run.slice_redundancy:
        partitions = PartitionSetup(
            num_groups=run.num_groups, redundancy=run.slice_redundancy, groups_per_domain=run.groups_per_domain
        )
    policy = EvaluationPolicy(every_steps=run.eval_every_steps, microbatches_per_shard=run.eval_microbatches_per_shard)
    return LogTerms(
        placement=placement_of(run),
        num_steps=run.num_steps,
        first_step=run.first_step,
        last_resort=run.last_resort,
        partitions=partitions,
        evaluation=policy if run.eval_every_steps else None,
        num_stages=run.ranks_per_group // run.ranks_per_stage,
    )


def fold_log(entries: Mapping[int, dict[str, Any]], run: RunRecord) -> Fold:
    """Folds the entries in index order; indices may be missing."""
    fold = Fold(run, entries)
    for index in sorted(entries):
        fold.add(index, entries[index])
    return fold
