"""Proves from the journal alone that a run kept its invariant: the rules of `spare check`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from spare_megatron.journal.event_texts import describe_storage
from spare_megatron.journal.files import FORMAT, Journal, records_of
from spare_megatron.journal.fold import Finding, Fold, Rule, fold_log, invalid, unknown
from spare_megatron.journal.journal_view import Attempts, JournalView, Steps, attempts_of, steps_of
from spare_megatron.journal.proofs import check_state, check_steps
from spare_megatron.journal.proofs.check_audits import check_audits, check_own_findings
from spare_megatron.journal.proofs.check_machines import check_places, check_quarantines
from spare_megatron.journal.proofs.check_terms import check_code, check_reports, check_terms
from spare_megatron.journal.records import EndRecord, EntryRecord, FaultRecord, LossRecord, StorageRecord
from spare_megatron.journal.run_record import RunRecord


def is_due(fault: Mapping[str, Any], fold: Fold) -> bool:
    """Whether the run reached the moment of a planned fault, in a committed step, with the group to be hit.

    `rebuild` also needs another group to be fenced first in the step, and a patch a retry after that. The evaluation
    before a step belongs to it. A fault that costs its group nothing is not due if the group is lost in that step, to
    something else and perhaps before that moment.
    """
    commits = {commit.step: commit for commit in fold.kept_commits}
    commit = commits.get(fault["step"])
    if commit is None or fault["group"] not in commit.began_with:
        return False
    end = commit.index
    if fault["phase"].startswith("evaluation"):
        end = {evaluation.entry.step: evaluation.index for evaluation in fold.evaluations}.get(fault["step"], -1)
        if end < 0:
            return False
    before = commits.get(fault["step"] - 1)
    first = 0 if before is None else before.index + 1
    lost_at = [index for index in sorted(fold.fenced) if first <= index < end]
    is_costly = fault["group"] in fault.get("costs", [fault["group"]])
    if not is_costly and fault["group"] in {fold.fenced[index][0] for index in lost_at}:
        return False
    if fault["phase"] not in ("patch", "rebuild", "evaluation_patch"):
        return True
    if not lost_at or fold.fenced[lost_at[0]][0] == fault["group"]:
        return False
    if fault["phase"] == "rebuild":
        return True
    return any(fold.entries[index]["entry"] == "retry" for index in range(lost_at[0], end) if index in fold.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a journal proves; `steps_committed` excludes commits that restarts undid, `remarks` are no reasons."""

    verdict: Literal["valid", "invalid", "unknown"]
    reasons: tuple[str, ...]
    steps_committed: int
    remarks: tuple[str, ...] = ()


class Tally(Protocol):
    """Counts on the way, so that nothing is read twice."""

    def add_part(self, part: Attempts | Steps) -> None:
        """Adds a part before the rules read it."""


def check(view: JournalView, tally: Tally | None = None) -> Verdict:
    """Checks a run against its invariant; shows `tally` every part that the rules read."""
    runs = records_of(view.rare, RunRecord)
    if len(runs) != 1:
        found = [unknown(f"{len(runs)} run records, expected 1")]
        return _verdict(view, found, 0, FORMAT)
    run = runs[0]
    fold = fold_view(view, run)
    fold.is_cut = _is_cut(view, fold)
    findings = [*check_code(view, run, fold), *check_terms(view, run, fold)]
    findings += [*_check_log(view, fold), *_check_fold(fold), *check_reports(view, run, fold)]
    findings += [*check_places(view, run), *check_quarantines(view)]
    findings += _apply(
        (*check_steps.RULES, check_audits, check_own_findings), attempts_of(view, fold), run, fold, tally
    )
    findings += check_state.check_partitions(view, fold)
    findings += _apply(check_state.RULES, steps_of(view, fold), run, fold, tally)
    findings += [*_check_faults(view, run, fold), *_check_end(view, run, fold)]
    return _verdict(view, findings, len(fold.kept_commits), run.format)


def _apply(
    rules: Sequence[Rule], parts: Iterator[Attempts] | Iterator[Steps], run: RunRecord, fold: Fold, tally: Tally | None
) -> Iterator[Finding]:
    """Findings of all parts, rule after rule, in the order that a single pass would give."""
    found: list[list[Finding]] = [[] for _ in rules]
    for part in parts:
        if tally is not None:
            tally.add_part(part)
        for rule, findings in zip(rules, found, strict=True):
            findings += rule(part, run, fold)
    for findings in found:
        yield from sorted(findings, key=lambda finding: finding.place)


def _verdict(view: JournalView, findings: list[Finding], steps_committed: int, journal_format: int) -> Verdict:
    remarks = tuple(finding.reason for finding in findings if finding.severity == "remark")
    findings = [finding for finding in findings if finding.severity != "remark"]
    findings = [*_check_lines(view, journal_format), *_check_storage(view), *findings]
    severities = {finding.severity for finding in findings}
    verdict: Literal["valid", "invalid", "unknown"] = "valid"
    if severities:
        verdict = "invalid" if "invalid" in severities else "unknown"
    reasons = tuple(f"{finding.severity}: {finding.reason}" for finding in findings)
    return Verdict(verdict=verdict, reasons=reasons, steps_committed=steps_committed, remarks=remarks)


def _check_lines(view: JournalView, journal_format: int) -> Iterator[Finding]:
    """Every line is readable. In an earlier format, an unreadable line may be as its version wrote it."""
    for text in view.damage:
        if journal_format < FORMAT:
            reason = f"a line is not as format {FORMAT} has it, and the journal is of format {journal_format}: {text}"
            yield unknown(reason)
        else:
            yield invalid(f"damaged line: {text}")


def fold_journal(journal: Journal, run: RunRecord) -> Fold:
    """Same as `fold_view`, for a journal in memory."""
    entries: dict[int, dict[str, Any]] = {}
    for record in journal.of(EntryRecord):
        entries.setdefault(record.index, record.entry)
    return _fold(entries, journal.of(LossRecord), run)


def fold_view(view: JournalView, run: RunRecord) -> Fold:
    """Folds the log as the groups read it, and the fences that supervisors report after its end."""
    return _fold(dict(view.entries), records_of(view.rare, LossRecord), run)


def _fold(entries: dict[int, dict[str, Any]], losses: Sequence[LossRecord], run: RunRecord) -> Fold:
    last_read = max(entries, default=-1)
    for loss in losses:
        # Groups that have finished read no later entries; supervisors record their fences.
        if loss.entry_index > last_read:
            fence = {"entry": "fence", "group": loss.group, "incarnation": loss.incarnation}
            entries.setdefault(loss.entry_index, fence)
    return fold_log(entries, run)


def _check_log(view: JournalView, fold: Fold) -> Iterator[Finding]:
    """All groups read the same entries, and none is missing."""
    for _, record in view.disputed():
        yield invalid(f"groups read different entries at log index {record.index}")
    for before, after in itertools.pairwise([-1, *sorted(fold.entries)]):
        if after - before == 2:
            yield unknown(f"log entry {before + 1} is not in the journal")
        elif after - before > 2:
            yield unknown(f"log entries {before + 1} to {after - 1} are not in the journal")


def _check_fold(fold: Fold) -> Iterator[Finding]:
    """Steps are committed in order, once each, on ever later attempts; restarts go back to saved state."""
    for number, error in enumerate(fold.errors):
        yield fold.finding(error, is_known=number < fold.known.num_errors)


def _check_faults(view: JournalView, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every fault that was due struck, and the groups that it costs were fenced."""
    struck = {(one.step, one.group, one.rank, one.phase) for one in records_of(view.rare, FaultRecord)}
    began_with = {commit.step: commit.began_with for commit in fold.kept_commits}
    begun_at = {commit.step + 1: commit.index for commit in reversed(fold.commits)}  # the first time
    for fault in run.faults:
        began = began_with.get(fault["step"], frozenset())
        if (fault["step"], fault["group"], fault["rank"], fault["phase"]) not in struck:
            if is_due(fault, fold):  # else the run ended before it, or the group was lost to something else
                yield unknown(f"the fault {fault} never struck")
        elif fault["group"] in began and fault["step"] < fold.step - 1:
            there = set(fault.get("costs", [fault["group"]])) & began
            for group in sorted(there):
                if fold.last_fenced_at.get(group, -1) > begun_at.get(fault["step"], -1):
                    continue  # an earlier fence is that of an earlier incarnation
                reason = f"the fault {fault} struck, but no entry fences group {group}"
                yield fold.finding(reason, is_known=fold.is_whole)


def _check_end(view: JournalView, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """The journal has an end, and the log agrees with it."""
    ends = records_of(view.rare, EndRecord)
    if not ends:
        yield unknown("the journal has no end: the run goes on or was cut off")
    elif len({end.outcome for end in ends}) > 1:  # without its driver, every node records the end
        yield unknown(f"the journal has ends that differ: {[end.outcome for end in ends]}")
    elif ends[0].outcome == "finished" and not fold.is_trained:
        if fold.known.is_over:
            reason = f"the run finished with {fold.step} of {run.num_steps} steps committed"
        else:
            counted = ends[0].steps_committed
            after = "" if counted is None else f" after {run.first_step + counted} committed steps"
            lacks = f"the journal lacks the log after {fold.step} of {run.num_steps} steps"
            reason = f"the run finished{after}, and {lacks}"
        yield fold.finding(reason, is_known=fold.known.is_over)
    elif ends[0].outcome == "wipe_out" and not _is_wiped_out(fold):
        reason = "the run ended as a wipe-out, and every shard has a surviving host"
        reason += "" if fold.known.is_over else " by the log, whose last entries may be missing"
        yield fold.finding(reason, is_known=fold.known.is_over)
    elif ends[0].outcome == "stopped" and not any(commit.is_last for commit in fold.kept_commits):
        yield unknown("the run was stopped before its last step was committed")
    elif ends[0].outcome in ("failed", "halted"):
        yield unknown(f"the run ended as {ends[0].outcome}: {ends[0].reason}")


def _is_cut(view: JournalView, fold: Fold) -> bool:
    outcomes = {end.outcome for end in records_of(view.rare, EndRecord)}
    return "interrupted" in outcomes or ("stopped" in outcomes and not any(one.is_last for one in fold.kept_commits))


def _check_storage(view: JournalView) -> Iterator[Finding]:
    """Storage accepted all lines."""
    for record in records_of(view.rare, StorageRecord):
        if record.outcome == "lost":
            yield unknown(describe_storage(record))


def _is_wiped_out(fold: Fold) -> bool:
    """Whether a state partition, or a shard without hosts of last resort, has no surviving host."""
    return not fold.voters or check_state.has_lost_state(fold) or bool(fold.uncovered)
