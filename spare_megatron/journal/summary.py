"""A run in figures, from its journal alone."""

from collections import defaultdict
from dataclasses import dataclass

from spare_megatron.journal.check import Verdict, check_journal
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    ParamsRecord,
    RepairRecord,
    RunRecord,
    UpdateRecord,
    VoteRecord,
)
from spare_megatron.journal.recoveries import Recovery, find_recoveries
from spare_megatron.journal.redundancy import full_redundancy_s

NOT_RUN = "not run"
"""The verdict on a journal that nobody has proven yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `summary.json` holds. What is None was not counted, as the journal was too long to be read at the end."""

    verdict: str
    """Of `spare check`; or NOT_RUN."""
    reasons: tuple[str, ...]
    outcome: str
    outcome_reason: str
    steps_committed: int
    steps_lost: int | None = None
    """Commits that a restart from a checkpoint threw away: rework."""
    restarts: int | None = None
    """Restarts from a checkpoint after a wipe-out."""
    groups_lost: int | None = None
    """Times that a group was lost."""
    groups_rejoined: int | None = None
    """Times that a group which was lost has voted again."""
    microbatches_recomputed: int | None = None
    final_loss: float | None = None
    params_sha256: str | None = None
    recoveries: tuple[Recovery, ...] = ()
    slices_repaired: int = 0
    """Copies of slices that groups have made of what lost ones held."""
    slices_moved: int = 0
    """Copies that groups have made to even out what they hold, most of all those that came back."""
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
    fenced = {(entry["group"], entry.get("incarnation", 0)) for entry in entries.values() if entry["entry"] == "fence"}
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
        slices_repaired=sum(not record.is_move for record in journal.of(RepairRecord)),
        slices_moved=sum(record.is_move for record in journal.of(RepairRecord)),
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
