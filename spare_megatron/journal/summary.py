"""A run in figures, from its journal alone."""

import math
from collections import defaultdict
from dataclasses import dataclass

from spare_megatron.journal.check import Verdict, check_journal
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    FaultRecord,
    LossRecord,
    ParamsRecord,
    RecoveryRecord,
    RepairRecord,
    RunRecord,
    UpdateRecord,
    VoteRecord,
)
from spare_megatron.journal.redundancy import full_redundancy_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery, along the survivor that finished its own compute last.

    That survivor waits least for others, so what it spends is what the loss costs the step.

    Attributes:
        step: The step that was hit.
        lost: The groups lost, in one or several losses before the step was committed.
        detect_s: From the loss, or from the end of the survivor's own compute if that was later, to folding the fence.
        agree_s: To the decision whether the sum was complete.
        patch_s: Computing the lost groups' microbatches.
        rebuild_s: Waiting for the new communicator, which is built while the patch is computed.
        reduce_s: From the new communicator to the commit.
        total_s: Sum of these.
        num_patched: Microbatches of the lost groups computed again, over all survivors.
        phase: Moment of the injected fault; None if the loss was not injected.
    """

    step: int
    lost: tuple[int, ...]
    detect_s: float
    agree_s: float
    patch_s: float
    rebuild_s: float
    reduce_s: float
    total_s: float
    num_patched: int
    phase: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `summary.json` holds."""

    verdict: str
    reasons: tuple[str, ...]
    outcome: str
    outcome_reason: str
    steps_committed: int
    steps_lost: int
    """Commits that a restart from a checkpoint threw away: rework."""
    restarts: int
    """Restarts from a checkpoint after a wipe-out."""
    groups_lost: int
    groups_rejoined: int
    """Times that a group which was lost has voted again."""
    microbatches_recomputed: int
    final_loss: float | None
    params_sha256: str | None
    recoveries: tuple[Recovery, ...]
    slices_repaired: int = 0
    """Copies of slices that groups have made of what lost ones held."""
    full_redundancy_s: tuple[float, ...] = ()
    """Seconds from each loss of slices until all of them had all of their hosts again."""
    steps_left: int = 0
    """Of those that the run was to train, not committed."""


def summarize(journal: Journal) -> Summary:
    """The figures of a run that has ended."""
    verdict: Verdict = check_journal(journal)
    left = [run.num_steps - run.first_step - verdict.steps_committed for run in journal.of(RunRecord)]
    updates, params, ends = journal.of(UpdateRecord), journal.of(ParamsRecord), journal.of(EndRecord)
    recoveries = find_recoveries(journal)
    entries = {record.index: record.entry for record in journal.of(EntryRecord)}
    fenced = {entry["group"] for entry in entries.values() if entry["entry"] == "fence"}
    num_commits = sum(entry["entry"] == "commit" for entry in entries.values())
    last = max(updates, key=lambda record: record.attempt, default=None)
    last_params = max(params, key=lambda record: (record.num_restarts, record.step), default=None)
    return Summary(
        verdict=verdict.verdict,
        reasons=verdict.reasons,
        outcome=ends[0].outcome if ends else "unknown",
        outcome_reason=ends[0].reason if ends else "the journal has no end",
        steps_committed=verdict.steps_committed,
        steps_lost=num_commits - verdict.steps_committed,
        restarts=sum(entry["entry"] == "restart" for entry in entries.values()),
        groups_lost=len(fenced),
        groups_rejoined=len({(r.group, r.incarnation) for r in journal.of(VoteRecord) if r.incarnation}),
        microbatches_recomputed=_count_recomputed(journal),
        final_loss=None if last is None else last.loss,
        params_sha256=None if last_params is None else last_params.sha256,
        recoveries=recoveries,
        slices_repaired=len(journal.of(RepairRecord)),
        full_redundancy_s=full_redundancy_s(journal),
        steps_left=sum(left),
    )


def _count_recomputed(journal: Journal) -> int:
    """Microbatches that groups brought into a later attempt of a step and had not brought into its first.

    A group that computes a step again after a restart does so in another life.
    """
    brought: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for record in journal.of(ContributionRecord):
        num_microbatches = sum(len(indices) for indices in record.microbatches.values())
        brought[record.group, record.incarnation, record.step].append(num_microbatches)
    return sum(max(counts) - counts[0] for counts in brought.values())


def find_recoveries(journal: Journal) -> tuple[Recovery, ...]:
    """The recoveries of a run in the order of their steps."""
    by_step: dict[tuple[int, int], list[RecoveryRecord]] = defaultdict(list)
    for record in journal.of(RecoveryRecord):
        by_step[record.num_restarts, record.step].append(record)
    return tuple(_recovery(journal, by_step[key]) for key in sorted(by_step))


def _recovery(journal: Journal, records: list[RecoveryRecord]) -> Recovery:
    """The step of a fault does not matter: a group that dies right after its vote is missed only in the next one."""
    last = max(records, key=lambda record: record.computed_at_s)
    lost = tuple(sorted({group for record in records for group in record.lost}))
    since_s = {group: _taken_in_at_s(journal, group, last.step) for group in lost}
    struck = [
        (line.at_s, line.record)
        for line in journal.lines
        if isinstance(line.record, FaultRecord | LossRecord)
        and line.at_s > since_s.get(line.record.group, math.inf)
        and not (isinstance(line.record, FaultRecord) and line.at_s > last.noticed_at_s)
    ]
    faults = [record for _, record in struck if isinstance(record, FaultRecord)]
    lost_at_s = min((at_s for at_s, _ in struck), default=last.computed_at_s)
    detect_s = max(0.0, last.noticed_at_s - max(last.computed_at_s, lost_at_s))
    return Recovery(
        step=last.step,
        lost=lost,
        detect_s=detect_s,
        agree_s=last.agree_s,
        patch_s=last.patch_s,
        rebuild_s=last.rebuild_s,
        reduce_s=last.reduce_s,
        total_s=detect_s + last.agree_s + last.patch_s + last.rebuild_s + last.reduce_s,
        num_patched=sum(record.num_patched for record in records),
        phase=faults[0].phase if faults else None,
    )


def _taken_in_at_s(journal: Journal, group: int, step: int) -> float:
    """When the group was last taken in before this step: what hit it before that was an earlier loss."""
    admissions = [
        (-incarnation, line.at_s)
        for line in journal.lines
        if isinstance(line.record, EntryRecord) and line.record.entry.get("step", step) < step
        for member, incarnation in line.record.entry.get("admit", ())
        if member == group
    ]
    return min(admissions, default=(0, -math.inf))[1]
