"""Rules on audits: no step is committed over a mismatch, and nothing is summed that was computed only to compare."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from spare_megatron.journal.fold import Finding, Fold, Severity
from spare_megatron.journal.journal_view import Attempts, by_attempt
from spare_megatron.journal.proofs.check_steps import microbatches_of
from spare_megatron.journal.records import AuditRecord, ContributionRecord
from spare_megatron.journal.run_record import RunRecord


def check_audits(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """In a committed attempt all digests of a microbatch are equal, and each group has added exactly what it counts."""
    audits, contributions = by_attempt(part.audits), by_attempt(part.contributions)
    for number, commit in part.commits:
        found, counted = audits[commit.attempt], contributions[commit.attempt]
        if not found:
            continue
        for severity, reason in (
            *_mismatches(found),
            *_counted_audits(found, counted, run.row_size),
            *_missing(found, counted, commit.members),
        ):
            yield Finding(severity=severity, reason=f"step {commit.step}: {reason}", place=(number,))


def _mismatches(found: Sequence[AuditRecord]) -> Iterator[tuple[Severity, str]]:
    by_microbatch: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for record in found:
        for shard, index, digest in record.digests:
            by_microbatch[shard, index][record.group] = digest
    for (shard, index), by_group in sorted(by_microbatch.items()):
        if len(set(by_group.values())) > 1:
            groups = ", ".join(map(str, sorted(by_group)))
            yield "invalid", f"groups {groups} have computed microbatch {index} of shard {shard} differently"


def _counted_audits(
    found: Sequence[AuditRecord], contributions: Sequence[ContributionRecord], row_size: int
) -> Iterator[tuple[Severity, str]]:
    counted = {record.group: row_size * len(list(microbatches_of([record]))) for record in contributions}
    for record in found:
        expected = counted.get(record.group)
        if expected is not None and record.num_added != expected:
            yield (
                "invalid",
                f"group {record.group} has added gradients of {record.num_added} microbatches and counts {expected}",
            )


def _missing(
    found: Sequence[AuditRecord], contributions: Sequence[ContributionRecord], members: Collection[int]
) -> Iterator[tuple[Severity, str]]:
    """A group that was lost after it sent its sums has not voted."""
    contributed = {record.group for record in contributions} & set(members)
    for group in sorted(contributed - {record.group for record in found}):
        yield "unknown", f"the journal lacks what group {group} has voted about audits"
