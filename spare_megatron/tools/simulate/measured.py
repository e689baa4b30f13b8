"""Measures steps, losses, recoveries and joins in a journal, of a real run or a simulated one."""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

from spare_megatron.journal import records
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.proofs.proof import fold_journal
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.recoveries import Recovery, find_recoveries

WARM_UP_STEPS = 3
"""Steps after the start of a run, or after groups come back, that set up memory, caches and connections."""
Disturbance = Literal["", "start", "join", "loss", "fault"]
"""Why a step does not represent those without a loss; empty if it does."""


def refuse_unlike(run: RunRecord) -> None:
    """Raises ValueError for a run with what is not measured, evaluations, or not simulated, a batch that grows."""
    if run.eval_every_steps:
        raise ValueError(
            f"it evaluated every {run.eval_every_steps} steps, which is not measured; name a run with "
            f"eval.every_steps=0"
        )
    if run.ramp:
        raise ValueError(
            f"its global batch grew from {run.ramp[0]} to {run.microbatches_per_shard} microbatches per shard, and the "
            f"simulator has one batch for all steps; measure a run without spare.ramp_start"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The times of a committed step. Times that every group reports are medians over the groups."""

    step: int
    loads: Mapping[int, int]
    """Group -> microbatches in its contribution to the first attempt."""
    compute_s: Mapping[int, float]
    """Group -> from the start of the step to its contribution to the first attempt."""
    reduce_s: float
    """From the last contribution to the commit."""
    update_s: float
    """From the commit to the end of the optimizer step."""
    step_s: float
    """From the start of the step to the end of the optimizer step."""
    began_at_s: float
    ended_at_s: float
    disturbance: Disturbance
    """`start` and `join`: warm-up of the run and of admitted groups; `loss`: a loss or a second attempt; `fault`: a
    fault that cost no group."""

    @property
    def is_clean(self) -> bool:
        """Committed in one attempt, with no loss and no fault, after the warm-up."""
        return not self.disturbance

    @property
    def computed_s(self) -> float:
        """From the start of the step to the last contribution to the first attempt."""
        return max(self.compute_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecovery:
    """The times of a recovery."""

    recovery: Recovery
    """Its stages, along the survivor that finished its own compute last."""
    num_alive: int
    loads: Mapping[int, int]
    """Group -> microbatches of its patches."""
    patch_s: Mapping[int, float]
    hidden_s: float
    """From the loss to the end of the last survivor's own compute; 0 for a later loss."""
    fence_s: float | None
    """From the loss to the fence that the supervisor wrote; None if it wrote none."""
    is_retried: bool
    """Whether the step was reduced again; otherwise all survivors held the sum, and nothing was patched."""


def read_steps(journal: Journal) -> tuple[MeasuredStep, ...]:
    """The committed steps in order; with restarts or pauses, those before the first one that it kept, and none with a
    group that has fewer stages than others.
    """
    contributed: dict[int, dict[int, dict[int, tuple[float, int]]]] = defaultdict(lambda: defaultdict(dict))
    committed: dict[int, list[float]] = defaultdict(list)
    updates: dict[int, list[tuple[float, records.UpdateRecord]]] = defaultdict(list)
    admitted_after: set[int] = set()
    end_step: float = inf
    for line in journal.lines:
        match line.record:
            case records.ContributionRecord(group=group, step=step, attempt=attempt, microbatches=microbatches):
                count = sum(len(indices) for indices in microbatches.values())
                contributed[step][attempt][group] = (line.at_s, count)
            case records.EntryRecord(entry={"entry": "commit", "step": step, "attempt": attempt} as entry):
                committed[attempt].append(line.at_s)
                if entry.get("admit"):
                    admitted_after.add(step)
                if entry.get("stages"):
                    end_step = min(end_step, step)
            case records.EntryRecord(entry={"entry": "restart" | "resume" | "undo", "step": step}):
                end_step = min(end_step, step - 1)
            case records.UpdateRecord(step=step):
                updates[step].append((line.at_s, line.record))
    hit = {record.step for record in journal.of(records.RecoveryRecord)}
    struck = {record.step for record in journal.of(records.FaultRecord)}

    def disturbance(step: int) -> Disturbance:
        if step in hit or len(contributed[step]) > 1:
            return "loss"
        if step in struck:
            return "fault"
        if step < WARM_UP_STEPS:
            return "start"
        return "" if admitted_after.isdisjoint(range(step - WARM_UP_STEPS, step)) else "join"

    return tuple(
        _step(step, updates[step], contributed[step], committed, disturbance(step))
        for step in sorted(updates)
        if step <= end_step and contributed[step]
    )


def _step(
    step: int,
    updates: Sequence[tuple[float, records.UpdateRecord]],
    contributed: Mapping[int, Mapping[int, tuple[float, int]]],
    committed: Mapping[int, Sequence[float]],
    disturbance: Disturbance,
) -> MeasuredStep:
    first = contributed[min(contributed)]
    began_at_s = median(at_s - update.step_s for at_s, update in updates)
    updated_at_s = median(at_s for at_s, _ in updates)
    committed_at_s = median(committed.get(updates[0][1].attempt, [updated_at_s]))
    return MeasuredStep(
        step=step,
        loads={group: count for group, (_, count) in first.items()},
        compute_s={group: max(0.0, at_s - began_at_s) for group, (at_s, _) in first.items()},
        reduce_s=max(0.0, committed_at_s - max(at_s for at_s, _ in first.values())),
        update_s=max(0.0, updated_at_s - committed_at_s),
        step_s=median(update.step_s for _, update in updates),
        began_at_s=began_at_s,
        ended_at_s=updated_at_s,
        disturbance=disturbance,
    )


def read_recoveries(journal: Journal) -> tuple[MeasuredRecovery, ...]:
    """The recoveries in the order of their steps."""
    retried = read_retries(journal)
    lost_at = _lost_at(journal)
    records_of: dict[int, list[records.RecoveryRecord]] = defaultdict(list)
    for record in journal.of(records.RecoveryRecord):
        records_of[record.step].append(record)
    found = []
    for recovery in find_recoveries(journal):
        reported = records_of[recovery.step]
        computed_at_s = max(record.computed_at_s for record in reported)
        struck_at_s, fenced_at_s = lost_at[recovery.step]
        times = MeasuredRecovery(
            recovery=recovery,
            num_alive=len(reported),
            loads={record.group: record.num_patched for record in reported},
            patch_s={record.group: record.patch_s for record in reported if record.num_patched},
            hidden_s=0.0 if struck_at_s is None else max(0.0, computed_at_s - struck_at_s),
            fence_s=None if struck_at_s is None or fenced_at_s is None else fenced_at_s - struck_at_s,
            is_retried=recovery.step in retried,
        )
        found.append(times)
    return tuple(found)


def read_retries(journal: Journal) -> dict[int, float]:
    """Step -> time of the last decision to reduce it again."""
    decided_at_s: dict[int, float] = {}
    read: set[int] = set()
    for line in journal.lines:
        match line.record:
            case records.EntryRecord(index=index, entry={"entry": "retry", "step": step}) if index not in read:
                read.add(index)
                decided_at_s[step] = line.at_s
    return decided_at_s


def _lost_at(journal: Journal) -> dict[int, tuple[float | None, float | None]]:
    """Step of each recovery -> when the first of its groups was struck, and when it was fenced by its supervisor.
    Records of a group before its last update are about an earlier loss: it may come back and be lost again.
    """
    struck_at_s: dict[int, float] = {}
    fenced_at_s: dict[int, float] = {}
    found = {}
    for line in journal.lines:
        match line.record:
            case records.UpdateRecord(group=group):
                struck_at_s.pop(group, None)
                fenced_at_s.pop(group, None)
            case records.FaultRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
            case records.LossRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
                fenced_at_s.setdefault(group, line.at_s)
            case records.RecoveryRecord(step=step, lost=lost):
                found[step] = (_earliest(struck_at_s, lost), _earliest(fenced_at_s, lost))
    return found


def _earliest(at_s: Mapping[int, float], groups: Sequence[int]) -> float | None:
    return min((at_s[group] for group in groups if group in at_s), default=None)


def in_order(lines: Sequence[Line]) -> Journal:
    """A journal of lines given in any order."""
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))


_Life = tuple[int, int]
"""Group and incarnation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTime:
    """The loss of a group."""

    group: int
    step: int
    """The step during which it happened; for a loss between two steps, the later one, which found it."""
    into_s: float
    """Seconds from the start of that step."""
    back_after: int | None
    """The step at whose end the group was admitted again; None if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTime:
    """Groups admitted together. `step`: the first step that they take part in. `pause_s`: the excess of that step, from
    the end of the one before, over quiet steps of as many groups.
    """

    step: int
    groups: tuple[int, ...]
    pause_s: float


def read_losses(journal: Journal, steps: Sequence[MeasuredStep]) -> tuple[LossTime, ...]:
    """The losses during these steps of the journal's only run, in time order; not of groups that wait for admission."""
    if not steps:
        return ()
    fold = fold_journal(journal, journal.of(RunRecord)[0])
    returns = _returns(fold)
    incarnations: dict[int, list[int]] = defaultdict(list)
    for group, incarnation in sorted(returns):
        incarnations[group].append(incarnation)
    beginnings = [step.began_at_s for step in steps]
    losses = []
    for (group, incarnation), at_s in _lost_at_s(journal, fold).items():
        num_begun = bisect_right(beginnings, at_s)
        if not num_begun or at_s >= steps[-1].ended_at_s:
            continue
        found_in = steps[num_begun - 1]
        if at_s > found_in.ended_at_s:  # lost while groups were admitted
            found_in = steps[num_begun]
        later = bisect_right(incarnations[group], incarnation)
        returned = (group, incarnations[group][later]) if later < len(incarnations[group]) else None
        losses.append(
            LossTime(
                group=group,
                step=found_in.step,
                into_s=max(0.0, at_s - found_in.began_at_s),
                back_after=None if returned is None else returns[returned],
            )
        )
    return tuple(sorted(losses, key=lambda loss: (loss.step, loss.into_s, loss.group)))


def read_joins(journal: Journal, steps: Sequence[MeasuredStep]) -> tuple[JoinTime, ...]:
    """The admissions that nothing else disturbed, where quiet steps of as many groups allow a comparison."""
    joined: dict[int, list[int]] = defaultdict(list)
    for (group, _), after in _returns(fold_journal(journal, journal.of(RunRecord)[0])).items():
        joined[after + 1].append(group)
    # From end to end: groups that send no state begin the next step at once, then wait for those that do.
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
    steps = {commit.attempt + 1: commit.step for commit in fold.commits}
    returns: dict[_Life, int] = {}
    for attempt, members in sorted(fold.opened.items()):
        for member in members.items():
            if member[1] and attempt in steps:
                returns.setdefault(member, steps[attempt])
    return returns


def _lost_at_s(journal: Journal, fold: Fold) -> dict[_Life, float]:
    """Each incarnation that took part and was lost -> time of its fault, else of the first record of its fence."""
    ends = dict(fold.fenced)
    struck_at_s: dict[int, float] = {}
    lost_at_s: dict[_Life, float] = {}
    for line in journal.lines:
        match line.record:
            case records.UpdateRecord(group=group):
                struck_at_s.pop(group, None)  # it survived the fault
            case records.FaultRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
            case records.LossRecord(entry_index=index) | records.EntryRecord(index=index) if index in ends:
                member = ends.pop(index)
                lost_at_s[member] = struck_at_s.pop(member[0], line.at_s)
    return lost_at_s
