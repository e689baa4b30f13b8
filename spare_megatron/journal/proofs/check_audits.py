"""Rules on audits and own checks: no step is committed over a finding, and no sum has what was computed to compare."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from spare_megatron.core.audits.clean_prefix import compared
from spare_megatron.core.log.votes import WRONG_NUMBERS
from spare_megatron.journal.fold import Committed, Finding, Fold, Severity, invalid
from spare_megatron.journal.journal_view import Attempts, by_attempt
from spare_megatron.journal.proofs.audit_history import planned_audits
from spare_megatron.journal.proofs.check_steps import microbatches_of
from spare_megatron.journal.records import AuditRecord, ContributionRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId


def check_audits(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """In a committed attempt all digests of a microbatch are equal, and each group has added exactly what it counts."""
    audits, contributions = by_attempt(part.audits), by_attempt(part.contributions)
    for number, commit in part.commits:
        found, counted = audits[commit.attempt], contributions[commit.attempt]
        if run.audit_every_steps and fold.is_trained and commit is fold.commits[-1]:
            yield from _last_step(commit, found)
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


def _last_step(commit: Committed, found: Sequence[AuditRecord]) -> Iterator[Finding]:
    """The last step of a run is audited, unless nothing said before that it is the last, or a group was lost in it."""
    members = frozenset(map(GroupId, commit.members))
    if missing := sorted(members - compared(planned_audits(found), members)):
        groups = ", ".join(map(str, missing))
        yield Finding(
            "remark", f"the last step, {commit.step}, has no audit of groups {groups}: what began since is not found"
        )


def check_own_findings(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """No sum stays that a group has found wrong itself, and each group that is fenced for that has voted so."""
    votes = {(record.attempt, record.group): record.evidence.startswith(WRONG_NUMBERS) for _, record in part.votes}
    stated = by_attempt(placed for placed in part.votes if votes[placed[1].attempt, placed[1].group])
    for number, which, commit, decided, _ in part.decided:
        for record in stated[decided.attempt]:
            # A group that was lost may have written its vote down, and not cast it.
            reason = f"step {commit.step}: a sum is committed that group {record.group} has found wrong itself"
            yield fold.finding(reason, (number, which), is_known=record.group in decided.members)
    for attempt, group in fold.found_wrong:
        if votes.get((attempt, group)) is False:
            reason = f"attempt {attempt}: group {group} is fenced for wrong numbers, which its vote does not state"
            yield invalid(reason, (attempt,))
