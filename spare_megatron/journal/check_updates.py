"""Proof from the journal that every survivor applied every committed step once, and the same one."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from spare_megatron.journal.evidence import Attempts
from spare_megatron.journal.finding import Finding, Severity
from spare_megatron.journal.fold import Committed, Fold
from spare_megatron.journal.records import RunRecord, UpdateRecord


def check_applied(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Nothing is applied that was not committed."""
    applied = {(record.step, record.attempt) for _, record in part.updates}
    stray = sorted(applied - {(commit.step, commit.attempt) for _, commit in part.commits})
    steps = {commit.step for commit in fold.commits} if stray else set()
    for step, attempt in stray:
        is_decided = attempt < fold.known.attempt
        if not is_decided:
            what = f"a group applied attempt {attempt}, whose commit is not in the journal"
        elif step in steps:
            what = f"a group applied attempt {attempt}, another was committed"
        else:
            what = "applied without a commit"
        severity = fold.severity(is_known=is_decided)
        yield Finding(severity=severity, reason=f"step {step}: {what}", place=(step, attempt))


def check_updates(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every survivor applied every committed step once, with the same sums, which counted all microbatches."""
    updates: dict[tuple[int, int], list[UpdateRecord]] = defaultdict(list)
    for _, record in part.updates:
        updates[record.step, record.attempt].append(record)
    for number, commit in part.commits:
        records = updates.get((commit.step, commit.attempt), [])
        for severity, reason in _check_update(run, commit, records):
            yield Finding(severity=severity, reason=f"step {commit.step}: {reason}", place=(number,))
        if commit.is_undone:  # whoever was stopped before it applied the step is loaded from a checkpoint
            continue
        for group in sorted(commit.members - {record.group for record in records}):
            # A group lost after the commit may have died before it applied it, unless it took part in what came next.
            was_lost = fold.last_fenced_at.get(group, -1) > commit.index
            if not was_lost or (group, commit.attempt + 1) in part.went_on:
                reason = f"step {commit.step}: no update of group {group} in the journal"
                yield Finding(severity="unknown", reason=reason, place=(number,))


def _check_update(run: RunRecord, commit: Committed, records: list[UpdateRecord]) -> Iterator[tuple[Severity, str]]:
    total = run.num_groups * run.microbatches_per_shard
    if any(record.num_microbatches != total for record in records):
        yield "invalid", f"the sum did not count {total} microbatches"
    if len({(record.loss, record.grad_norm) for record in records}) > 1:
        yield "invalid", "groups applied different sums"
    for name in ("learning_rate", "makespan"):
        values = sorted({getattr(record, name) for record in records})
        if len(values) > 1:
            yield "invalid", f"groups have different {name}: {', '.join(map(str, values))}"
    appliers = Counter(record.group for record in records)
    for group, times in sorted(appliers.items()):
        if times > 1:
            yield "invalid", f"group {group} applied it {times} times"
