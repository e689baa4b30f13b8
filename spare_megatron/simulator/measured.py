"""The times of steps, recoveries and losses in a journal, of a real run or of a simulated one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import (
    ContributionRecord,
    EntryRecord,
    FaultRecord,
    Line,
    LossRecord,
    RecoveryRecord,
    UpdateRecord,
)
from spare_megatron.journal.summary import Recovery, find_recoveries

WARM_UP_STEPS = 3
"""First steps of a run, in which memory, caches and connections are set up: they measure nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A committed step. Times are medians over the groups.

    Attributes:
        step: The step.
        loads: Group -> microbatches it brought into the first attempt.
        compute_s: Group -> from the start of the step to its contribution to the first attempt.
        reduce_s: From the last contribution to the commit.
        update_s: From the commit to the end of the optimizer step.
        step_s: From the start of the step to the end of the optimizer step.
        began_at_s: Its start.
        is_clean: Committed in one attempt, with no loss, and past the warm-up.
    """

    step: int
    loads: Mapping[int, int]
    compute_s: Mapping[int, float]
    reduce_s: float
    update_s: float
    step_s: float
    began_at_s: float
    is_clean: bool

    @property
    def computed_s(self) -> float:
        """From the start of the step to the last contribution to the first attempt."""
        return max(self.compute_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """A recovery.

    Attributes:
        recovery: Its stages along the survivor that finished its own compute last.
        num_alive: Survivors.
        loads: Group -> microbatches of its patches.
        patch_s: Group -> seconds it computed them.
        hidden_s: From the loss to the end of that survivor's own compute; 0 for a later loss.
        fence_s: From the loss to its fence as the supervisor wrote it; None if it did not.
        is_retried: The step was reduced again. Otherwise all survivors held the sum, and nothing was patched.
    """

    recovery: Recovery
    num_alive: int
    loads: Mapping[int, int]
    patch_s: Mapping[int, float]
    hidden_s: float
    fence_s: float | None
    is_retried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTime:
    """The loss of a group: `into_s` after the start of the step during which it happened."""

    group: int
    step: int
    into_s: float


def read_steps(journal: Journal) -> tuple[StepTimes, ...]:
    """The committed steps in their order; of a run with restarts or joins those before the first of these."""
    contributed: dict[int, dict[int, dict[int, tuple[float, int]]]] = defaultdict(lambda: defaultdict(dict))
    committed: dict[int, list[float]] = defaultdict(list)
    updates: dict[int, list[tuple[float, UpdateRecord]]] = defaultdict(list)
    end_step: float = inf
    for line in journal.lines:
        match line.record:
            case ContributionRecord(group=group, step=step, attempt=attempt, microbatches=microbatches):
                count = sum(len(indices) for indices in microbatches.values())
                contributed[step][attempt][group] = (line.at_s, count)
            case EntryRecord(entry={"entry": "commit", "attempt": attempt}):
                committed[attempt].append(line.at_s)
            case UpdateRecord(step=step):
                updates[step].append((line.at_s, line.record))
        if isinstance(line.record, EntryRecord):
            end_step = min(end_step, _last_step(line.record.entry))
    hit = {record.step for record in journal.of(RecoveryRecord)}
    return tuple(
        _step(step, updates[step], contributed[step], committed, is_hit=step in hit)
        for step in sorted(updates)
        if step <= end_step and contributed[step]
    )


def _last_step(entry: Mapping[str, object]) -> float:
    """The last step before groups come back with this entry."""
    if entry["entry"] == "restart":
        return int(str(entry["step"])) - 1
    return int(str(entry["step"])) if entry.get("admit") else inf


def _step(
    step: int,
    updates: Sequence[tuple[float, UpdateRecord]],
    contributed: Mapping[int, Mapping[int, tuple[float, int]]],
    committed: Mapping[int, Sequence[float]],
    *,
    is_hit: bool,
) -> StepTimes:
    first = contributed[min(contributed)]
    began_at_s = median(at_s - update.step_s for at_s, update in updates)
    updated_at_s = median(at_s for at_s, _ in updates)
    committed_at_s = median(committed.get(updates[0][1].attempt, [updated_at_s]))
    return StepTimes(
        step=step,
        loads={group: count for group, (_, count) in first.items()},
        compute_s={group: max(0.0, at_s - began_at_s) for group, (at_s, _) in first.items()},
        reduce_s=max(0.0, committed_at_s - max(at_s for at_s, _ in first.values())),
        update_s=max(0.0, updated_at_s - committed_at_s),
        step_s=median(update.step_s for _, update in updates),
        began_at_s=began_at_s,
        is_clean=not is_hit and len(contributed) == 1 and step >= WARM_UP_STEPS,
    )


def read_recoveries(journal: Journal) -> tuple[RecoveryTimes, ...]:
    """The recoveries in the order of their steps."""
    retried = {r.entry["step"] for r in journal.of(EntryRecord) if r.entry["entry"] == "retry"}
    lost_at = _lost_at(journal)
    found = []
    for recovery in find_recoveries(journal):
        records = [record for record in journal.of(RecoveryRecord) if record.step == recovery.step]
        computed_at_s = max(record.computed_at_s for record in records)
        struck_at_s, fenced_at_s = lost_at[recovery.step]
        times = RecoveryTimes(
            recovery=recovery,
            num_alive=len(records),
            loads={record.group: record.num_patched for record in records},
            patch_s={record.group: record.patch_s for record in records if record.num_patched},
            hidden_s=0.0 if struck_at_s is None else max(0.0, computed_at_s - struck_at_s),
            fence_s=None if struck_at_s is None or fenced_at_s is None else fenced_at_s - struck_at_s,
            is_retried=recovery.step in retried,
        )
        found.append(times)
    return tuple(found)


def read_losses(journal: Journal, steps: Sequence[StepTimes]) -> tuple[LossTime, ...]:
    """The losses during these steps, in the order of their times."""
    if not steps:
        return ()
    end_s = steps[-1].began_at_s + steps[-1].step_s
    struck_at_s: dict[int, float] = {}
    for line in journal.lines:
        match line.record:
            case _ if line.at_s >= end_s:
                break
            case UpdateRecord(group=group):
                struck_at_s.pop(group, None)  # a fault that it survived
            case FaultRecord(group=group) | LossRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
    fenced = {record.entry["group"] for record in journal.of(EntryRecord) if record.entry["entry"] == "fence"}
    losses = []
    for group, at_s in struck_at_s.items():
        begun = [step for step in steps if step.began_at_s <= at_s]
        if group in fenced and begun:
            losses.append(LossTime(group=group, step=begun[-1].step, into_s=at_s - begun[-1].began_at_s))
    return tuple(sorted(losses, key=lambda loss: (loss.step, loss.into_s, loss.group)))


def _lost_at(journal: Journal) -> dict[int, tuple[float | None, float | None]]:
    """Step of each recovery -> when the first of its groups was struck, and fenced by its supervisor.

    A group that came back may be lost again: what was told of it before its last update is about an earlier loss.
    """
    struck_at_s: dict[int, float] = {}
    fenced_at_s: dict[int, float] = {}
    found = {}
    for line in journal.lines:
        match line.record:
            case UpdateRecord(group=group):
                struck_at_s.pop(group, None)
                fenced_at_s.pop(group, None)
            case FaultRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
            case LossRecord(group=group):
                struck_at_s.setdefault(group, line.at_s)
                fenced_at_s.setdefault(group, line.at_s)
            case RecoveryRecord(step=step, lost=lost):
                found[step] = (_earliest(struck_at_s, lost), _earliest(fenced_at_s, lost))
    return found


def _earliest(at_s: Mapping[int, float], groups: Sequence[int]) -> float | None:
    return min((at_s[group] for group in groups if group in at_s), default=None)


def in_order(lines: Sequence[Line]) -> Journal:
    """A journal of lines in any order."""
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))
