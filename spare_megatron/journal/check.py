"""Proof from the journal that every committed step counted every microbatch exactly once.

The verdict is `invalid` when a record contradicts the invariant, `unknown` when a record that the proof needs is
missing, else `valid`. Every rule reads what was written at the time, never what the code would have done.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from spare_megatron.core.placement import Placement, make_placement
from spare_megatron.core.topology import GroupId, ShardId
from spare_megatron.journal.check_params import check_params
from spare_megatron.journal.check_restarts import check_restored
from spare_megatron.journal.check_slices import check_slices, has_lost_state
from spare_megatron.journal.check_sums import check_contributions, check_kept, microbatches_of, was_fenced
from spare_megatron.journal.due import is_due
from spare_megatron.journal.files import Journal
from spare_megatron.journal.finding import Finding, Severity
from spare_megatron.journal.fold import Committed, Fold, fold_log
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    FaultRecord,
    LossRecord,
    RunRecord,
    UpdateRecord,
    VoteRecord,
    digest_of_work,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a journal proves."""

    verdict: Literal["valid", "invalid", "unknown"]
    reasons: tuple[str, ...]
    steps_committed: int


def check_journal(journal: Journal) -> Verdict:
    """Checks a run against its invariant."""
    findings = [Finding(severity="invalid", reason=f"damaged line: {text}") for text in journal.damage]
    runs = journal.of(RunRecord)
    if len(runs) != 1:
        findings.append(Finding(severity="unknown", reason=f"{len(runs)} run records, expected 1"))
        return _verdict(findings, 0)
    run = runs[0]
    fold = fold_journal(journal, run)
    for rule in (_check_log, _check_fold, check_contributions, check_kept, _check_hosts, _check_votes, _check_updates):
        findings += rule(journal, run, fold)
    for rule in (check_slices, check_restored, check_params, _check_faults, _check_end):
        findings += rule(journal, run, fold)
    return _verdict(findings, len(fold.kept))


def _verdict(findings: list[Finding], steps_committed: int) -> Verdict:
    severities = {finding.severity for finding in findings}
    verdict: Literal["valid", "invalid", "unknown"] = "valid"
    if severities:
        verdict = "invalid" if "invalid" in severities else "unknown"
    reasons = tuple(f"{finding.severity}: {finding.reason}" for finding in findings)
    return Verdict(verdict=verdict, reasons=reasons, steps_committed=steps_committed)


def fold_journal(journal: Journal, run: RunRecord) -> Fold:
    """The log as the groups read it, and what their supervisors tell of its end."""
    entries: dict[int, dict[str, Any]] = {}
    for record in journal.of(EntryRecord):
        entries.setdefault(record.index, record.entry)
    last_read = max(entries, default=-1)
    for loss in journal.of(LossRecord):
        # Groups that have finished do not read what is written after; the supervisor tells of it.
        if loss.entry_index > last_read:
            fence = {"entry": "fence", "group": loss.group, "incarnation": loss.incarnation}
            entries.setdefault(loss.entry_index, fence)
    return fold_log(entries, run)


def _check_log(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """All groups read the same entries, and none is missing."""
    for record in journal.of(EntryRecord):
        if record.entry != fold.entries[record.index]:
            yield Finding(severity="invalid", reason=f"groups read different entries at log index {record.index}")
    missing = set(range(max(fold.entries, default=-1) + 1)) - set(fold.entries)
    for index in sorted(missing):
        yield Finding(severity="unknown", reason=f"log entry {index} is not in the journal")


def _check_fold(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Steps are committed in order, each once, each on an attempt of its own; restarts go back to what was saved."""
    for error in fold.errors:
        severity: Severity = "invalid" if _is_whole(fold) else "unknown"
        yield Finding(severity=severity, reason=error)
    expected = run.first_step
    for index in sorted(fold.entries):
        entry = fold.entries[index]
        if entry["entry"] == "restart":
            expected = entry["step"]
        elif entry["entry"] == "commit":
            if entry["step"] != expected:
                yield Finding(severity="invalid", reason="steps are not committed one after another, each exactly once")
                break
            expected += 1
    attempts = [commit.attempt for commit in fold.commits]
    if any(later <= earlier for earlier, later in itertools.pairwise(attempts)):
        yield Finding(severity="invalid", reason="two steps are committed on the same or an earlier attempt")
    if fold.next_step > run.num_steps:
        yield Finding(severity="invalid", reason=f"{fold.next_step} steps committed, the run has {run.num_steps}")


def _is_whole(fold: Fold) -> bool:
    """Whether no entry is missing before the last."""
    return len(fold.entries) == max(fold.entries, default=-1) + 1


def _check_hosts(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """A group computes only shards that are in its stack, unless the run has hosts of last resort."""
    if run.last_resort:
        return
    placement = _placement(run)
    for record in journal.of(ContributionRecord):
        for shard in record.microbatches:
            if GroupId(record.group) not in placement.hosts[ShardId(int(shard))]:
                reason = f"step {record.step}: group {record.group} computed shard {shard} without hosting it"
                yield Finding(severity="invalid", reason=reason)


def _check_votes(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """A committed attempt has a complete vote of every group that took part when it was committed."""
    votes: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for record in journal.of(VoteRecord):
        votes[record.attempt, record.group].append(record.is_complete)
        if was_fenced(record, fold):
            reason = f"step {record.step}: group {record.group} voted after it was fenced"
            yield Finding(severity="invalid", reason=reason)
    for (attempt, group), cast in sorted(votes.items()):
        if len(cast) > 1:
            yield Finding(severity="invalid", reason=f"group {group} voted {len(cast)} times on attempt {attempt}")
    yield from _check_voted_work(journal)
    for commit in fold.commits:
        step = commit.step
        for group in sorted(commit.members):
            cast = votes.get((commit.attempt, group), [])
            if not cast:
                yield Finding(severity="unknown", reason=f"step {step}: no vote of group {group} in the journal")
            elif not all(cast):
                yield Finding(
                    severity="invalid", reason=f"step {step}: committed though group {group} had no whole sum"
                )


def _check_voted_work(journal: Journal) -> Iterator[Finding]:
    """What a group brought into an attempt is what its ranks agreed on when they voted."""
    voted = {(record.attempt, record.group): record.work_digest for record in journal.of(VoteRecord)}
    for record in journal.of(ContributionRecord):
        digest = digest_of_work(microbatches_of([record]))
        if voted.get((record.attempt, record.group), digest) != digest:
            reason = f"step {record.step}: group {record.group} voted on other work than it contributed"
            yield Finding(severity="invalid", reason=reason)


def _check_updates(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every survivor applied every committed step once, with the same sums, which counted all microbatches."""
    updates: dict[tuple[int, int], list[UpdateRecord]] = defaultdict(list)
    for record in journal.of(UpdateRecord):
        updates[record.step, record.attempt].append(record)
    went_on = {(record.group, record.attempt) for record in journal.of(ContributionRecord)}
    committed = {(commit.step, commit.attempt) for commit in fold.commits}
    steps = {commit.step for commit in fold.commits}
    for step, attempt in sorted(set(updates) - committed):
        what = (
            f"a group applied attempt {attempt}, another was committed" if step in steps else "applied without a commit"
        )
        yield Finding(severity="invalid", reason=f"step {step}: {what}")
    for commit in fold.commits:
        records = updates.get((commit.step, commit.attempt), [])
        yield from _check_applied(run, commit, records)
        if commit.is_undone:  # whoever was stopped before it applied the step is loaded from a checkpoint
            continue
        for group in sorted(commit.members - {record.group for record in records}):
            # A group lost after the commit may have died before it applied it, unless it took part in what came next.
            was_lost = fold.last_fenced_at.get(group, -1) > commit.index
            if not was_lost or (group, commit.attempt + 1) in went_on:
                reason = f"step {commit.step}: no update of group {group} in the journal"
                yield Finding(severity="unknown", reason=reason)


def _check_applied(run: RunRecord, commit: Committed, records: list[UpdateRecord]) -> Iterator[Finding]:
    total, step = run.num_groups * run.microbatches_per_shard, commit.step
    if any(record.num_microbatches != total for record in records):
        yield Finding(severity="invalid", reason=f"step {step}: the sum did not count {total} microbatches")
    if len({(record.loss, record.grad_norm) for record in records}) > 1:
        yield Finding(severity="invalid", reason=f"step {step}: groups applied different sums")
    appliers = Counter(record.group for record in records)
    for group, times in sorted(appliers.items()):
        if times > 1:
            yield Finding(severity="invalid", reason=f"step {step}: group {group} applied it {times} times")


def _check_faults(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every fault of the trace struck if its group was there to be hit, and cost the run the group it hit."""
    struck = {(r.step, r.group, r.rank, r.phase) for r in journal.of(FaultRecord)}
    began_with = {commit.step: commit.began_with for commit in fold.kept}
    begun_at = {commit.step + 1: commit.index for commit in reversed(fold.commits)}  # the first time
    for fault in run.faults:
        began = began_with.get(fault["step"], frozenset())
        if (fault["step"], fault["group"], fault["rank"], fault["phase"]) not in struck:
            if is_due(fault, fold):  # else the run ended before it, or the group was lost to something else
                yield Finding(severity="unknown", reason=f"the fault {fault} never struck")
        elif fault["group"] in began and fault["step"] < fold.next_step - 1:
            there = set(fault.get("costs", [fault["group"]])) & began
            for group in sorted(there):
                if fold.last_fenced_at.get(group, -1) > begun_at.get(fault["step"], -1):
                    continue  # a fence of before is that of a former life
                severity: Severity = "invalid" if _is_whole(fold) else "unknown"
                yield Finding(severity=severity, reason=f"the fault {fault} struck, but no entry fences group {group}")


def _check_end(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """The run came to an end that the journal tells of."""
    ends = journal.of(EndRecord)
    if not ends:
        yield Finding(severity="unknown", reason="the journal has no end: the run goes on or was cut off")
    elif len({end.outcome for end in ends}) > 1:  # every node tells of it where the driver is lost
        yield Finding(severity="unknown", reason=f"the journal has ends that differ: {[end.outcome for end in ends]}")
    elif ends[0].outcome == "finished" and not _is_complete(run, fold):
        reason = f"the run finished with {fold.next_step} of {run.num_steps} steps committed"
        yield Finding(severity="invalid", reason=reason)
    elif ends[0].outcome == "wipe_out" and not _is_wiped_out(run, fold):
        yield Finding(severity="invalid", reason="the run ended as a wipe-out, and every shard has a surviving host")
    elif ends[0].outcome in ("failed", "halted"):
        yield Finding(severity="unknown", reason=f"the run ended as {ends[0].outcome}: {ends[0].reason}")


def _is_complete(run: RunRecord, fold: Fold) -> bool:
    """Whether all steps are committed, or as many as the run's time allowed."""
    return fold.next_step == run.num_steps or any(commit.is_last for commit in fold.kept)


def _is_wiped_out(run: RunRecord, fold: Fold) -> bool:
    """Whether a slice, or a shard that not every group can compute, has no host among the groups that are left."""
    left = frozenset(GroupId(group) for group in fold.members)
    if not left or has_lost_state(run, fold):
        return True
    return not run.last_resort and bool(_placement(run).uncovered(left))


def _placement(run: RunRecord) -> Placement:
    """Who hosts what: a function of the terms of the run."""
    return make_placement(run.placement, run.num_groups, run.redundancy, run.groups_per_domain)  # type: ignore[arg-type]
