"""Folds the journaled decision log: who took part when, what was committed, and what restarts undid."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import Placement, make_placement

Members = frozenset[int]
Severity = Literal["invalid", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason why a journal is not valid.

    Attributes:
        severity: `invalid` contradicts the invariant; `unknown` prevents its proof.
        place: Sort key among the findings of a rule; equal places keep the order in which they were found.
    """

    severity: Severity
    reason: str
    place: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAttempt:
    """A decided attempt of a step; a committed step may hold sums of several. All members voted.

    Attributes:
        kept: For each rank, the number of leading buckets that kept their sums and were not reduced; empty: none.
    """

    attempt: int
    kept: tuple[int, ...]
    members: Members


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit entry.

    Attributes:
        members: Groups that took part when it was written; all of them voted.
        began_with: Groups that took part when the step began.
        is_last: It ends the run, whatever the planned number of steps.
        attempts: Attempts whose buckets may have been kept, ending with the committed one.
    """

    index: int
    step: int
    attempt: int
    members: Members
    began_with: Members
    saved: bool
    is_undone: bool
    is_last: bool
    attempts: tuple[FoldedAttempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A decided evaluation after `step` committed steps, by the members (group -> incarnation) that all voted."""

    index: int
    step: int
    attempt: int
    members: Mapping[int, int]
    sums: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """State after the first `num_entries` entries, of which none is missing.

    Attributes:
        attempt: Attempt under way; infinite if the run is over.
        position: (restarts, committed steps): earlier comparisons are settled. Infinite if the run is over.
    """

    num_entries: int
    is_over: bool
    attempt: float
    position: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A whole log, as far as the journal has it.

    Attributes:
        last_fenced_at: Group -> index of the last fence that removed it from the members.
        fenced: Index of each such fence -> (group, incarnation).
        discarded: (restarts, committed steps before) -> groups whose contribution to the step was discarded.
        computed_anew: Steps, as (restarts, committed steps before them), that began again from zero sums and gathered
            parameters again.
        resumed: The same of steps that began again from zero sums after a pause.
        opened: Attempt -> members when it began, as group -> incarnation; lacks attempts that no entry implies.
        known: State before the first gap; later entries may contradict records only because of the gap.
        is_cut: All processes were ended at once, so that a group may not have applied the last commit.
    """

    entries: Mapping[int, dict[str, Any]]
    commits: tuple[Committed, ...]
    evaluations: tuple[Evaluation, ...]
    last_fenced_at: Mapping[int, int]
    fenced: Mapping[int, tuple[int, int]]
    discarded: Mapping[tuple[int, int], Members]
    computed_anew: frozenset[tuple[int, int]]
    resumed: frozenset[tuple[int, int]]
    opened: Mapping[int, Mapping[int, int]]
    members: Members
    num_restarts: int
    errors: tuple[str, ...]
    next_step: int
    known: "Known"
    is_cut: bool = False

    @property
    def is_whole(self) -> bool:
        return self.known.num_entries == len(self.entries)

    def severity(self, *, is_known: bool) -> Severity:
        """Severity of a contradiction with another record; `is_known`: the entries of `known` alone show it."""
        return "invalid" if is_known else "unknown"

    @property
    def kept(self) -> tuple[Committed, ...]:
        """Commits that no restart undid, in log order."""
        return tuple(commit for commit in self.commits if not commit.is_undone)


def placement_of(run: RunRecord) -> Placement:
    return make_placement(run.placement, run.num_groups, run.redundancy, run.groups_per_domain)  # type: ignore[arg-type]


class Folding:
    """State of the fold between two entries; unchanged memberships stay the same objects."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.incarnations: Mapping[int, int] = dict.fromkeys(range(run.num_groups), 0)  # of the members
        self.members: Members = frozenset(self.incarnations)
        self.began_with = self.members
        self.last_fenced: dict[int, int] = {}  # incarnation
        self.drained: dict[int, int] = {}  # last incarnation that has left, of groups that do not take part
        self.step = run.first_step
        self.num_steps = run.num_steps  # lowered by a commit that is the last, as the controller does
        self.attempt = 0
        self.kept: tuple[int, ...] = ()  # by the attempt under way
        self.attempts: list[FoldedAttempt] = []  # decided ones of the step
        self.is_discarded = False
        self.discarded: dict[tuple[int, int], Members] = {}
        self.computed_anew: set[tuple[int, int]] = set()
        self.resumed: set[tuple[int, int]] = set()
        self.commits: list[Committed] = []
        self.evaluations: list[Evaluation] = []
        self.is_evaluation_due = False
        self.votes_on_end = False  # after the last step, where parameters are left to gather or a save to compare
        self.undone: set[int] = set()
        self.last_fenced_at: dict[int, int] = {}
        self.fenced: dict[int, tuple[int, int]] = {}
        self.opened: dict[int, Mapping[int, int]] = {0: self.incarnations}
        self.restarted_at: list[int] = []  # committed steps that each restart kept
        self.errors: list[str] = []
        self.is_over = False

    @property
    def num_restarts(self) -> int:
        return len(self.restarted_at)

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Shards that no member hosts, ascending; none in a run with hosts of last resort."""
        if self.run.last_resort:
            return ()
        return tuple(map(int, self._placement.uncovered(frozenset(map(GroupId, self.members)))))

    @cached_property
    def _placement(self) -> Placement:
        return placement_of(self.run)

    def apply(self, index: int, entry: Mapping[str, Any]) -> None:
        match entry["entry"]:
            case "fence":
                self._fence(index, entry["group"], entry.get("incarnation", 0))
                if entry.get("discard", False):
                    self._discard(entry["group"])
            case "commit":
                self._decided(entry)
                self._commit(index, entry)
                self._open(entry["attempt"] + 1)
            case "retry":
                self._decided(entry)
                self._retry(entry)
                self._open(entry["attempt"] + 1)
                self.is_discarded = any(map(differs, entry.get("disputes", ())))
            case "evaluated":
                self._evaluate(index, entry)
                self._open(entry["attempt"] + 1)
            case "resume":
                self._resume(entry)
                self._open(entry["attempt"] + 1)
            case "restart":
                self._restart(entry)
                self._open(self.attempt + 1)
            case "finish" | "giveup" | "halt":
                self.is_over = True
            case kind:
                self.errors.append(f"log entry {index} is of unknown kind {kind!r}")

    def known_after(self, num_entries: int) -> Known:
        """The state as `Known`; call only while no entry has been missing."""
        position = (math.inf, math.inf) if self.is_over else (self.num_restarts, self.step)
        attempt = math.inf if self.is_over else self.attempt
        return Known(num_entries=num_entries, is_over=self.is_over, attempt=attempt, position=position)

    def _fence(self, index: int, group: int, incarnation: int) -> None:
        """Fences this and every earlier incarnation, whether it takes part or waits for admission."""
        self.last_fenced[group] = max(incarnation, self.last_fenced.get(group, -1))
        if self.drained.get(group, incarnation + 1) <= incarnation:
            self.last_fenced_at[group] = index  # it may have ended before it applied its last commit
        if self.incarnations.get(group, incarnation + 1) <= incarnation:
            self.last_fenced_at[group] = index
            self.fenced[index] = (group, self.incarnations[group])
            self._set_members({other: number for other, number in self.incarnations.items() if other != group})

    def _set_members(self, incarnations: Mapping[int, int]) -> None:
        self.incarnations = incarnations
        self.members = frozenset(incarnations)
        self.drained = {group: number for group, number in self.drained.items() if group not in self.members}

    def _not_fenced(self, members: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Group -> incarnation of those not fenced; the highest if a group is named twice."""
        return {group: number for group, number in sorted(members) if number > self.last_fenced.get(group, -1)}

    def _open(self, attempt: int) -> None:
        self.attempt = attempt
        self.is_discarded = False
        self.opened[attempt] = self.incarnations

    def _decided(self, entry: Mapping[str, Any]) -> None:
        self.attempts.append(FoldedAttempt(attempt=entry["attempt"], kept=self.kept, members=self.members))

    def _retry(self, entry: Mapping[str, Any]) -> None:
        before, self.kept = self.kept, tuple(entry.get("kept", ()))
        if entry.get("recompute", False):
            self.attempts.clear()
            self.computed_anew.add((self.num_restarts, self.step))
            before = ()
        elif self.is_discarded and not entry.get("disputes"):
            what = f"attempt {entry['attempt']} was discarded, and not all of it is computed again"
            self.errors.append(f"step {entry['step']}: {what}")
        if self.run.slice_redundancy and entry.get("recompute", False) and not entry.get("gather", False):
            what = f"attempt {entry['attempt']} was void, and its parameters are not gathered anew"
            self.errors.append(f"step {entry['step']}: {what}")
        if any(now < earlier for now, earlier in zip_longest(self.kept, before, fillvalue=0)):
            what = f"after attempt {entry['attempt']} fewer buckets are kept than before"
            self.errors.append(f"step {entry['step']}: {what}")
        self._leave_evaluation_out()

    def _discard(self, group: int) -> None:
        self.is_discarded = True
        key = (self.num_restarts, self.step)
        self.discarded[key] = self.discarded.get(key, frozenset()) | {group}

    def _commit(self, index: int, entry: Mapping[str, Any]) -> None:
        commit = Committed(
            index=index,
            step=entry["step"],
            attempt=entry["attempt"],
            members=self.members,
            began_with=self.began_with,
            saved=bool(entry.get("save", False)),
            is_undone=False,
            is_last=bool(entry.get("is_last", False)),
            attempts=tuple(self.attempts),
        )
        self.kept = ()
        self.attempts.clear()
        if self.commits and self.commits[-1].is_last and self.commits[-1].index not in self.undone:
            self.errors.append(f"step {commit.step} is committed after the last")
        self.commits.append(commit)
        self.step = commit.step + 1
        # Without a save or state partitions, nothing remains to compare or gather and no finish entry follows.
        if commit.is_last:
            self.num_steps = self.step
        if self.is_evaluation_due:
            self.errors.append(f"step {commit.step} is committed before the evaluation that was due")
        self.votes_on_end = commit.saved or bool(self.run.slice_redundancy)
        self._next()
        if self.is_discarded:
            self.errors.append(f"step {commit.step}: attempt {commit.attempt} was discarded, and is committed")
        if commit.step + 1 < self.run.num_steps and not commit.is_last:  # the last commit admits no group
            self._admit(entry)
        self.began_with = self.members

    def _admit(self, entry: Mapping[str, Any]) -> None:
        admitted = self._not_fenced(entry.get("admit", ()))
        drained = entry.get("drain", ())
        if drained or not admitted.keys() <= self.members:
            self._change_members(entry["step"], dict(admitted), drained)

    def _change_members(self, step: int, admitted: dict[int, int], drained: Sequence[tuple[int, int]]) -> None:
        staying = dict(self.incarnations)
        for group, number in drained:
            if staying.pop(group, None) != number:
                self.errors.append(f"step {step}: group {group} is drained, and takes no part")
            self.drained[group] = number
            self.last_fenced[group] = max(number, self.last_fenced.get(group, -1))
        admitted = {group: number for group, number in admitted.items() if group not in self.members}
        self._set_members(admitted | staying)

    def _resume(self, entry: Mapping[str, Any]) -> None:
        if (entry["step"], entry["attempt"]) != (self.step, self.attempt):
            what = f"attempt {entry['attempt']} of step {entry['step']} resumes"
            self.errors.append(f"{what} in attempt {self.attempt} of step {self.step}")
        if not self.uncovered:
            self.errors.append(f"step {entry['step']} resumes after a pause, and every shard had a host")
        self._admit(entry)
        if self.uncovered:
            self.errors.append(f"step {entry['step']} resumes, and no group hosts shards {list(self.uncovered)}")
        self.kept = ()
        self.attempts.clear()
        self.resumed.add((self.num_restarts, self.step))

    def _next(self) -> None:
        """What follows the committed steps: an evaluation, a vote on the end, or nothing."""
        every, is_last = self.run.eval_every_steps, self.step == self.num_steps
        is_due = every and (is_last or self.step % every == 0)
        self.is_evaluation_due = bool(is_due) and self.step > self.run.first_step
        self.is_over = is_last and not self.votes_on_end and not self.is_evaluation_due
        self._leave_evaluation_out()

    def _leave_evaluation_out(self) -> None:
        """After the last step an evaluation without all hosts is left out, as the controller does."""
        if self.is_evaluation_due and self.step == self.num_steps and self.members and self.uncovered:
            self.is_evaluation_due = False
            self.is_over = not self.votes_on_end

    def _evaluate(self, index: int, entry: Mapping[str, Any]) -> None:
        if not self.is_evaluation_due or entry["step"] != self.step:
            self.errors.append(f"attempt {entry['attempt']} evaluates after {entry['step']} steps, which was not due")
        if self.is_discarded:
            self.errors.append(f"the evaluation after {entry['step']} steps was discarded, and is decided")
        evaluation = Evaluation(
            index=index,
            step=entry["step"],
            attempt=entry["attempt"],
            members=self.incarnations,
            sums=entry.get("sums", ()),
        )
        self.evaluations.append(evaluation)
        self.attempts.clear()
        self.is_evaluation_due = False
        self.is_over = self.step == self.num_steps and not self.votes_on_end

    def _restart(self, entry: Mapping[str, Any]) -> None:
        kept = [commit for commit in self.commits if commit.index not in self.undone]
        saved = {self.run.first_step} | {commit.step + 1 for commit in kept if commit.saved}
        snapshot = entry.get("snapshot")
        if snapshot is not None:
            if (entry["step"], snapshot) not in {(commit.step + 1, commit.attempt) for commit in kept}:
                what = f"a snapshot after {entry['step']} steps"
                self.errors.append(f"a restart loads {what}, which attempt {snapshot} did not commit")
        elif entry["step"] not in saved:
            self.errors.append(f"a restart loads a checkpoint after {entry['step']} steps, which was never saved")
        self.undone |= {commit.index for commit in kept if commit.step >= entry["step"]}
        named = {(group, number) for group, number in entry["members"]}
        for group, number in set(self.incarnations.items()) - named:
            self.last_fenced[group] = max(number, self.last_fenced.get(group, -1))
        self._set_members(self._not_fenced(entry["members"]))
        self.began_with = self.members
        self.step = entry["step"]
        self.kept = ()
        self.attempts.clear()
        self.restarted_at.append(entry["step"])
        self.votes_on_end = True
        self._next()


def differs(dispute: Mapping[str, Any]) -> bool:
    """Whether groups have said different things of the microbatch; of a suspect one they may all agree."""
    return len({digest for _, digest, _ in dispute["statements"]}) > 1


def fold_log(entries: Mapping[int, dict[str, Any]], run: RunRecord) -> Fold:
    """Folds the entries in index order; indices may be missing."""
    folding = Folding(run)
    known = folding.known_after(0)
    for number, index in enumerate(sorted(entries), 1):
        folding.apply(index, entries[index])
        if index < number:
            known = folding.known_after(number)
    commits = tuple(
        replace(commit, is_undone=True) if commit.index in folding.undone else commit for commit in folding.commits
    )
    return Fold(
        entries=entries,
        commits=commits,
        evaluations=tuple(folding.evaluations),
        last_fenced_at=folding.last_fenced_at,
        fenced=folding.fenced,
        discarded=folding.discarded,
        computed_anew=frozenset(folding.computed_anew),
        resumed=frozenset(folding.resumed),
        opened=folding.opened,
        members=folding.members,
        num_restarts=folding.num_restarts,
        errors=tuple(folding.errors),
        next_step=folding.step,
        known=known,
    )
