"""State of a run, accumulated line by line from its journal: groups, losses, steps, events, figures."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from spare_megatron.core.log.entries import Restart
from spare_megatron.journal import event_texts, records
from spare_megatron.journal.files import Line
from spare_megatron.journal.fold import Fold, LastLosses
from spare_megatron.journal.proofs.audit_history import Spoiled, SpoiledSteps
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import EntryTimes, Goodput, Stretches, step_before
from spare_megatron.journal.state.rank_paces import RankPaces
from spare_megatron.journal.state.recoveries import Recoveries
from spare_megatron.journal.step_values import StepValues, metrics_of
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.paces import LIKE


class Losses:
    """Lost incarnations, each once, though every node of the group may report it."""

    def __init__(self) -> None:
        self._by_incarnation: dict[tuple[int, int], tuple[float, records.LossRecord]] = {}  # by (group, incarnation)

    def add(self, record: records.LossRecord, at_s: float) -> bool:
        """Merges a node's report; returns whether the loss is new, or the group newly given up."""
        key = record.group, record.incarnation
        if key not in self._by_incarnation:
            self._by_incarnation[key] = at_s, record
            return True
        found_s, known = self._by_incarnation[key]
        pending = [*known.pending, *(rank for rank in record.pending if rank not in known.pending)]
        is_given_up = known.is_given_up or record.is_given_up
        at_fault = record if known.cause == records.LOST_A_PEER else known  # the rank at fault may be on another node
        self._by_incarnation[key] = min(found_s, at_s), replace(at_fault, is_given_up=is_given_up, pending=pending)
        return is_given_up and not known.is_given_up

    @property
    def found(self) -> list[tuple[float, records.LossRecord]]:
        """All losses, each with its earliest time."""
        return list(self._by_incarnation.values())

    def find(self, group: int, incarnation: int) -> records.LossRecord | None:
        return self._by_incarnation.get((group, incarnation), (0.0, None))[1]


Array = npt.NDArray[np.float32]

T = TypeVar("T", np.float32, np.float64)


_FIRST_ROWS = 256


class StepTable:
    """Figures of attempts (rows) and groups (columns); NaN if unreported."""

    def __init__(self, num_groups: int, turns: Sequence[int]) -> None:
        self.loss = np.full(_FIRST_ROWS, np.nan)
        """Mean cross entropy per token of each attempt; shape (attempts,), as for grad_norm and learning_rate."""
        self.grad_norm = np.full(_FIRST_ROWS, np.nan)
        self.learning_rate = np.full(_FIRST_ROWS, np.nan)
        self.step_s: Array = np.full((_FIRST_ROWS, num_groups), np.nan, np.float32)
        """Seconds from the start of the step to its update; shape (attempts, groups), as `load`."""
        self.load: Array = np.full((_FIRST_ROWS, num_groups), np.nan, np.float32)
        self.paces = RankPaces(num_groups, turns)
        self.further = StepValues()

    def add_update(self, record: records.UpdateRecord) -> None:
        self._reserve(record.attempt)
        if np.isnan(self.loss[record.attempt]):
            self.loss[record.attempt] = record.loss
            self.grad_norm[record.attempt] = record.grad_norm
            self.learning_rate[record.attempt] = record.learning_rate
        self.step_s[record.attempt, record.group] = record.step_s
        load = float(self.load[record.attempt, record.group])
        self.paces.add(record.attempt, record.group, record.compute_s, load)
        self.further.add(record.attempt, metrics_of(record))

    def add_contribution(self, record: records.ContributionRecord, load: int) -> None:
        self._reserve(record.attempt)
        self.load[record.attempt, record.group] = load

    def is_applied(self, attempt: int) -> bool:
        return attempt < len(self.loss) and not np.isnan(self.step_s[attempt]).all()

    def _reserve(self, attempt: int) -> None:
        if attempt >= len(self.loss):
            height, width = 2 * attempt, self.load.shape[1]
            self.loss, self.grad_norm = _grown(self.loss, (height,)), _grown(self.grad_norm, (height,))
            self.learning_rate = _grown(self.learning_rate, (height,))
            self.step_s, self.load = _grown(self.step_s, (height, width)), _grown(self.load, (height, width))


def _grown(array: npt.NDArray[T], shape: tuple[int, ...]) -> npt.NDArray[T]:
    """The array, extended with NaN."""
    grown = np.full(shape, np.nan, array.dtype)
    grown[: len(array)] = array
    return grown


GroupStatus = Literal["alive", "slow", "rejoining", "drained", "lost", "given up"]


PARAMS = "params"
"""Kind of parameter digests: a long run has many, and only comparisons of two runs read them."""

UNREAD = ("vote", "evaluation", "snapshot", "redundancy", "repair", "terms", "rank", "suspicion")
"""Kinds of records that the state of a run does not depend on."""


_RECENT_STEPS = 32

_LONGEST_STEP = 10.0
"""In medians of the recent steps; longer ones, such as restarts, say little about the steps to come."""

_SOURCE = re.compile(r"group-(\d+)-rank-\d+(?:-life-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """When checkpoints are taken, by the settings; if both are 0, as the journal says, or never."""

    interval_s: float = 0.0
    interval_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedMachine:
    """Why a machine is in quarantine, and why it has not passed its last examination; empty before that."""

    cause: str
    reason: str
    failed: str = ""


class RunState:
    """State of a run by the lines added so far; lines of one file must come in order.

    Lines before the run record `run` are ignored. `storage` is set while storage does not accept the journal, or has
    lost some of it; `newest` is the first update record of the last applied attempt.
    """

    def __init__(self) -> None:
        self.run: RunRecord | None = None
        self.began_s = self.newest_at_s = 0.0
        self.end: records.EndRecord | None = None
        self.storage: records.StorageRecord | None = None
        self.steps = StepTable(0, ())
        self._spoiled_steps = SpoiledSteps(0)
        self._losses = Losses()
        self._assignments: dict[int, records.PlacesRecord] = {}  # of machines to places
        self.num_places_taken = 0
        self._num_places = 1
        self.recoveries = Recoveries()
        self.checkpoints: list[tuple[float, records.CheckpointRecord]] = []
        # restarts and committed steps before it, and kind of digest
        self._params: dict[tuple[int, int, str], set[str]] = {}
        self.num_rejoined = 0
        self.num_lines = 0
        self.damage: list[str] = []
        self.entry_times = EntryTimes()
        self.folding: Fold | None = None
        self._stretches = Stretches()
        self._ahead: dict[int, tuple[dict[str, Any], float]] = {}  # entries after a missing one
        self._gap_at: int | None = None
        self._head = 0
        self._hit_after: set[int] = set()
        self._cadence: tuple[float, records.CadenceRecord] | None = None
        self._saved_at_s = 0.0
        self.awaited: tuple[int, ...] = ()
        """Shards that no group hosts that is left, for which training waits."""
        self.paces: Mapping[str, int] = {}
        """Group -> pace by which work is dealt, in thousandths of that of the groups' like, where it is another one."""
        self.pace_changes: list[tuple[int, Mapping[str, int]]] = []
        """All that `paces` was, each with the number of commits before the first step that is dealt by it."""
        self._paces_of_step = 0
        self.culprit: records.CulpritRecord | None = None
        """What holds the run back now."""
        self.quarantined: dict[int, QuarantinedMachine] = {}
        """By machine."""
        self._events: list[event_texts.EventLine] = []
        self._rejected: set[str] = set()  # why checkpoints and snapshots were not used, since the last restart
        self._halted_by = ""
        self.newest: records.UpdateRecord | None = None
        self._started: dict[int, int] = {}  # highest incarnation of each group that has started
        self._fenced: set[tuple[int, int]] = set()  # (group, incarnation)
        self._last_lost: dict[int, int] = {}  # highest lost incarnation of each group
        self._last_contribution: dict[int, int] = {}  # incarnation

    # ---------------------------------------------------------------------------------------------------- input

    def add_line(self, line: Line) -> None:
        self.num_lines += 1
        record, at_s = line.record, line.at_s
        if isinstance(record, RunRecord):
            if self.run is not None:
                self.damage.append("the journal has several run records")
                return
            self.run, self.began_s, self.folding = record, at_s, Fold(record)
            self.steps, self._saved_at_s = StepTable(record.most_groups, record.turns), at_s
            self._spoiled_steps = SpoiledSteps(record.first_step)
        if self.run is None:
            return
        if not 0 <= getattr(record, "group", 0) < self.run.most_groups:
            self.damage.append(f"a record of {line.source} names a group that the run does not have")
            return
        self.newest_at_s = max(self.newest_at_s, at_s)
        self._add(line)
        self._note_texts_of(record, at_s)

    def _add(self, line: Line) -> None:
        record, at_s = line.record, line.at_s
        match record:
            case records.EntryRecord():
                self.entry_times.add_read(record.index, record.group, at_s)
                if record.index >= self._head:
                    self._ahead.setdefault(record.index, (record.entry, at_s))
                    self._fold()
                if record.entry.get("admit"):
                    self.recoveries.add_line(line)
            case records.UpdateRecord():
                self.steps.add_update(record)
                if self.newest is None or record.attempt > self.newest.attempt:
                    self.newest = record
            case records.ContributionRecord():
                self._contributed(record)
            case records.AuditRecord():
                self._spoiled_steps.add_audit(record)
            case records.PacesRecord():
                self._on_paces(record, at_s)
            case records.LossRecord():
                self.recoveries.add_line(line)
                self._on_loss(record, at_s)
            case records.FaultRecord():
                self._hit_after.add(step_before(record))
                self.recoveries.add_line(line)
            case records.RecoveryRecord():
                self.recoveries.add_line(line)
            case records.CulpritRecord():
                self.culprit = None if record.is_over else record
            case records.ExaminationRecord():
                for machine, found in self.quarantined.items():
                    if (record.machine - machine) % self._num_places == 0:  # it, or one that replaces it
                        self.quarantined[machine] = replace(found, failed=record.reason)
            case records.CadenceRecord():
                self._cadence = at_s, record
            case records.CheckpointRecord():
                self.checkpoints.append((at_s, record))
            case records.ParamsRecord():
                for kind, digest in (("digest", record.digest), ("sha256", record.sha256)):
                    if digest:
                        self._params.setdefault((record.num_restarts, record.step, kind), set()).add(digest)
            case records.PlacesRecord():
                self._on_assignment(record, at_s)
            case records.StorageRecord():
                self.storage = None if record.outcome == "written" else record
            case records.EndRecord() if self.end is None:
                self.end = record
                self._note("end", event_texts.text_of_end(record, self._halted_by), at_s)

    def _note_texts_of(self, record: records.Record, at_s: float) -> None:
        for kind, text in event_texts.texts_of_record(record):
            if isinstance(record, records.RestartRecord):  # each group reports the checkpoints that none could use
                if text in self._rejected:
                    continue
                self._rejected.add(text)
            self._note(kind, text, at_s)

    def _has_left(self, group: int, incarnation: int) -> bool:
        """Whether the group has left the run in this incarnation, so that the end of its processes costs nothing."""
        if self.run is not None and group >= self.run.num_groups and incarnation == 0:
            return True  # it has never taken part: a supervisor that takes over a node does not know
        return self.folding is not None and self.folding.drained.get(GroupId(group)) == incarnation

    def _on_loss(self, record: records.LossRecord, at_s: float) -> None:
        if self._has_left(record.group, record.incarnation):
            return
        self._last_lost[record.group] = max(record.incarnation, self._last_lost.get(record.group, 0))
        is_known = self._losses.find(record.group, record.incarnation) is not None
        if self._losses.add(record, at_s):
            text = event_texts.text_of_loss(record, is_known=is_known)
            self._note("departure" if is_known else "loss", text, at_s)

    def _on_assignment(self, record: records.PlacesRecord, at_s: float) -> None:
        if record.index not in self._assignments:  # all supervisors concerned write it
            self._assignments[record.index] = record
            self.num_places_taken += len(record.holdings)
            self._num_places = record.num_places
            for machine, cause, reason in record.quarantined:
                self.quarantined[int(machine)] = QuarantinedMachine(cause=str(cause), reason=str(reason))
            of_seats = {machine % record.num_places for machine in record.released}
            self.quarantined = {
                machine: one for machine, one in self.quarantined.items() if machine % record.num_places not in of_seats
            }
            is_judged = bool(record.quarantined or record.released)
            self._note("quarantine" if is_judged else "re-form", event_texts.text_of_places(record), at_s)

    def _on_paces(self, record: records.PacesRecord, at_s: float) -> None:
        if record.step > self._paces_of_step:  # all groups write it
            self._paces_of_step = record.step
            self._deal_by(record.permille, record.step)
            self._note("dealing", event_texts.text_of_paces(record), at_s)

    def _deal_by(self, paces: Mapping[str, int], step: int) -> None:
        if paces != self.paces and self.folding is not None:
            num_undone = len(self.folding.commits) - self.folding.step
            self.pace_changes.append((num_undone + step, paces))
        self.paces = paces

    def _note(self, kind: event_texts.EventKind, text: str, at_s: float) -> None:
        self._events.append(event_texts.EventLine(at_s=at_s, text=text, kind=kind))

    def add_sources(self, sources: Collection[str]) -> None:
        """Adds the writers found: a rank opens its file when its incarnation starts."""
        for source in sources:
            found = _SOURCE.fullmatch(source)
            if found:
                group = int(found[1])
                self._started[group] = max(int(found[2] or 0), self._started.get(group, 0))

    def settle(self, *, is_whole: bool = False) -> None:
        """Reports missing log entries as damage; call it once all written lines have been added.

        They count on the second call in a row, or at once if nothing more will come (`is_whole`).
        """
        self._spoiled_steps.settle()
        while self._ahead:
            if self._gap_at != self._head and not is_whole:
                self._gap_at = self._head
                return
            missing, self._head = self._head, min(self._ahead)
            self.damage.append(f"log entries {missing} to {self._head - 1} are not in the journal")
            self._fold()
        self._gap_at = None

    def _fold(self) -> None:
        assert self.folding is not None, "entries are kept only once the run is known"
        while (found := self._ahead.pop(self._head, None)) is not None:
            entry, at_s = found
            members, stages = self.folding.groups, dict(self.folding.stages)
            num_ranks = self.folding.run.num_ranks(len(members), self.folding.num_missing_stages)
            change = self.folding.add(self._head, entry)
            self._stretches.add_entry(self._head, entry, members, num_ranks)
            self._spoiled_steps.add_entry(entry, members)
            if entry["entry"] == "commit" and entry.get("save", False):
                self._saved_at_s = at_s
            if entry["entry"] == "fence" and not self._has_left(entry["group"], entry.get("incarnation", 0)):
                self._fenced.add((entry["group"], entry.get("incarnation", 0)))
            if entry["entry"] == "restart":
                self._rejected.clear()
                self._paces_of_step = entry["step"]
                self._deal_by({}, entry["step"])
            if entry["entry"] == "undo":
                self._paces_of_step = min(self._paces_of_step, entry["step"])
            if entry["entry"] == "halt":
                self._halted_by = entry["reason"]
            taken_in = [group for group, _ in change.admitted]
            if text := event_texts.text_of_entry(entry, taken_in):
                kind = event_texts.KINDS.get(entry["entry"], "return" if taken_in else "departure")
                self._note(kind, text, at_s)
            new = {group: number for group, number in self.folding.stages.items() if stages.get(group) != number}
            if text := event_texts.text_of_stages(new, self.folding.terms.num_stages):
                self._note("re-form", text, at_s)
            if self.folding.groups != members:
                of_members = {group: pace for group, pace in self.paces.items() if int(group) in self.folding.members}
                self._deal_by(of_members, self.folding.step)
                self._note_awaited(at_s)
            self._head += 1

    def _note_awaited(self, at_s: float) -> None:
        assert self.folding is not None, "entries are folded"
        before, self.awaited = self.awaited, self.folding.uncovered if self.folding.members else ()
        if self.awaited and self.awaited != before:
            self._note("pause", event_texts.text_of_pause(self.folding.step, self.awaited), at_s)

    def _contributed(self, record: records.ContributionRecord) -> None:
        self.steps.add_contribution(record, sum(map(len, record.microbatches.values())))
        before = self._last_contribution.get(record.group)
        self.num_rejoined += bool(record.incarnation) and before != record.incarnation
        self._last_contribution[record.group] = record.incarnation

    # ----------------------------------------------------------------------------------------------------- results

    @property
    def num_committed(self) -> int:
        """Committed steps that no restart undid."""
        return 0 if self.folding is None else self.folding.step - self.folding.run.first_step

    @property
    def committed_at_s(self) -> float:
        """When the last commit was read; the time of the newest line if unknown."""
        commits = self.folding.commits if self.folding else ()
        found = self.entry_times(np.array([commit.index for commit in commits[-1:]], np.intp))
        return self.newest_at_s if np.isnan(found).any() or not commits else float(found[0])

    @property
    def outcome(self) -> str:
        """How the run ended, or `going on`."""
        return "going on" if self.end is None else self.end.outcome

    @property
    def last_attempt(self) -> int | None:
        """Last committed attempt that a group has reported; None if there is none."""
        for commit in reversed(self.folding.commits if self.folding else ()):
            if self.steps.is_applied(commit.attempt):
                return commit.attempt
        return None

    @property
    def loss(self) -> float | None:
        return None if self.last_attempt is None else float(self.steps.loss[self.last_attempt])

    @property
    def evaluated(self) -> LastLosses:
        return self.folding.last_losses() if self.folding else {}

    @property
    def spoiled(self) -> Spoiled | None:
        """What groups that were found wrong have left in the parameters; None if nothing, or without audits."""
        if self.folding is None or not self.folding.run.audit_every_steps:
            return None
        return self._spoiled_steps.found(self.folding.step)

    @property
    def losses(self) -> list[tuple[float, records.LossRecord]]:
        return self._losses.found

    def params(self) -> dict[tuple[int, str], frozenset[str]]:
        """(committed steps, `digest` or `sha256`) -> digests of the groups' parameters, but for undone steps."""
        restarted_at = [entry.step for _, entry in self.folding.restarts.values()] if self.folding else []
        return {
            (step, kind): frozenset(digests)
            for (num_restarts, step, kind), digests in sorted(self._params.items())
            if all(step <= kept for kept in restarted_at[num_restarts:])
        }

    @property
    def holdings(self) -> list[list[list[int]]]:
        """Machine, place and incarnation of what each assignment of places has begun, as far as they are journaled."""
        return [record.holdings for _, record in sorted(self._assignments.items())]

    @property
    def shapes(self) -> str:
        """Which groups run with fewer stages than others, as text; empty if none does."""
        fold = self.folding
        return "" if fold is None else event_texts.text_of_stages(fold.stages, fold.terms.num_stages)

    def groups(self) -> list[GroupStatus]:
        if self.run is None or self.folding is None:
            return []
        slow = {int(group) for group, pace in self.paces.items() if pace > LIKE}
        slow |= {self.culprit.of_group} if self.culprit and self.culprit.of_group is not None else set()
        return [self._group(group, self.folding.incarnations, slow) for group in range(self.run.most_groups)]

    def _group(self, group: int, members: Mapping[int, int], slow: Collection[int]) -> GroupStatus:
        loss = self._losses.find(group, self._last_lost.get(group, 0))
        if group in members and (loss is None or loss.incarnation < members[group]):
            return "slow" if group in slow else "alive"
        drained = -1 if self.folding is None else self.folding.drained.get(GroupId(group), -1)
        if self.run is not None and group >= self.run.num_groups:
            drained = max(drained, 0)  # incarnations of those that the run does not begin with count from 1
        if drained > (-1 if loss is None else loss.incarnation):
            return "drained" if drained == self._started.get(group, 0) else "rejoining"
        if loss is not None and loss.is_given_up:
            return "given up"
        if self._started.get(group, 0) > (0 if loss is None else loss.incarnation):
            return "rejoining"
        return "lost"

    def goodput(self, now_s: float, since_s: float = 0.0) -> Goodput | None:
        """Goodput up to now, or up to the end of the run; None before the first commit. It counts from the last commit
        before `since_s` on, if there is one.
        """
        span_s = self.began_s, self.until_s(now_s)
        return self._stretches.goodput(self.entry_times, span_s, self._hit_after, since_s)

    def until_s(self, now_s: float) -> float:
        """When the run ended; while it goes on `now_s`, or the time of the newest line if that is later."""
        return self.newest_at_s if self.end is not None else max(now_s, self.newest_at_s)

    def left_s(self, now_s: float) -> float | None:
        """Seconds to the end of the run at the pace of the recent steps; None after the end or without a pace."""
        run, folding = self.run, self.folding
        if run is None or folding is None or self.end is not None:
            return None
        recent = np.array([commit.index for commit in folding.commits[-_RECENT_STEPS - 1 :]], np.intp)
        times_s = self.entry_times(recent)
        intervals_s = np.diff(times_s[~np.isnan(times_s)])
        if not len(intervals_s):
            return None
        pace_s = float(np.minimum(intervals_s, _LONGEST_STEP * np.median(intervals_s)).mean())
        left_s = (run.num_steps - folding.step) * pace_s
        if run.max_minutes is not None:
            left_s = min(left_s, self.began_s + 60.0 * run.max_minutes - now_s)
        return max(0.0, left_s)

    def next_save_s(self, plan: SavePlan, now_s: float) -> float | None:
        """Seconds to the next checkpoint; None if none will come or it is unknown. Saves wait for a commit."""
        if self.end is not None or self.folding is None:
            return None
        if plan.interval_steps:
            goodput = self.goodput(now_s)
            left = plan.interval_steps - self.folding.step % plan.interval_steps
            return None if goodput is None else left * goodput.step_s
        since_s, interval_s = self._saved_at_s, plan.interval_s
        if self._cadence is not None:
            since_s, interval_s = self._cadence[0], self._cadence[1].interval_s
        return max(0.0, since_s + interval_s - now_s) if interval_s else None

    def events(self, since_s: float = 0.0, num_before: int = 0) -> Sequence[event_texts.EventLine]:
        """Events from `since_s` on, without the first `num_before` that the journal had, in time order."""
        new = (event for event in self._events[num_before:] if event.at_s >= since_s)
        return sorted(new, key=lambda event: event.at_s)

    @property
    def num_events(self) -> int:
        return len(self._events)

    def figures(self) -> Iterator[tuple[str, Any]]:
        """Figures by their names in `summary.json`."""
        yield "outcome", self.outcome
        yield "outcome_reason", "" if self.end is None else self.end.reason
        yield "steps_committed", self.num_committed
        yield "steps_lost", len(self.folding.undone) if self.folding else 0
        went_back = [entry for _, entry in self.folding.restarts.values()] if self.folding else []
        yield "restarts", sum(isinstance(entry, Restart) for entry in went_back)
        yield "final_loss", self.loss
        yield "eval", self.evaluated
        yield "groups_lost", len(self._fenced)
        yield "groups_rejoined", self.num_rejoined
        yield "microbatches_recomputed", self.recoveries.num_recomputed
