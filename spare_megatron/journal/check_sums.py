"""Proof from the journal that the sums of every committed step count every microbatch exactly once, in every bucket.

A step may hold sums of several attempts: each failed one left, for each rank, the first buckets that all survivors
held, and the next one reduced those after them. So every attempt from which some rank kept buckets, and the one that
was committed, must count every microbatch once by itself.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from spare_megatron.journal.evidence import Attempts
from spare_megatron.journal.finding import Finding, Severity
from spare_megatron.journal.fold import Attempted, Fold
from spare_megatron.journal.records import ContributionRecord, RunRecord, VoteRecord


def check_contributions(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """The contributions to each attempt whose sums a committed step holds are every microbatch exactly once."""
    by_attempt: dict[int, list[ContributionRecord]] = defaultdict(list)
    for _, record in part.contributions:
        by_attempt[record.attempt].append(record)
    expected = {(s, k) for s in range(run.num_groups) for k in range(run.microbatches_per_shard)}
    for number, which, commit, attempted, following in part.decided:
        if following is not None and not _more_than(attempted.kept, following.kept):
            continue  # the step holds no sums of it
        place, records = (number, which), by_attempt.get(attempted.attempt, [])
        is_told = attempted.attempt in fold.opened  # else the entry is missing that says what was kept
        for severity, reason in _check_attempt(commit.step, attempted, records, expected, is_told=is_told):
            yield Finding(severity=severity, reason=reason, place=place)
        for record in records:
            if was_fenced(record, fold):
                reason = f"step {commit.step}: group {record.group} contributed after it was fenced"
                severity = fold.severity(is_known=record.attempt <= fold.known.attempt)
                yield Finding(severity=severity, reason=reason, place=place)


def _more_than(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether some rank keeps more buckets by the other of two counts."""
    return any(before < after for before, after in zip_longest(one, other, fillvalue=0))


def _check_attempt(
    step: int,
    attempted: Attempted,
    records: Sequence[ContributionRecord],
    expected: set[tuple[int, int]],
    *,
    is_told: bool,
) -> Iterator[tuple[Severity, str]]:
    members = {group for record in records for group in record.members}
    epochs = {record.epoch for record in records}
    senders = Counter(record.group for record in records)
    if any(set(record.members) != members or record.step != step for record in records) or len(epochs) > 1:
        yield "invalid", f"step {step}: groups reduced attempt {attempted.attempt} as different sets"
    if is_told and any(tuple(record.kept) != attempted.kept for record in records):
        yield "invalid", f"step {step}: a group reduced other buckets in attempt {attempted.attempt} than the log says"
    if not records:
        yield "unknown", f"step {step}: no contribution is in the journal"
    missing = sorted(members - set(senders))
    for group in missing:
        yield "unknown", f"step {step}: the contribution of group {group} is not in the journal"
    counted = Counter(microbatches_of(records))
    if records and not missing and (set(counted) != expected or set(counted.values()) != {1}):
        yield "invalid", f"step {step}: {_miscount(counted, expected)}"


def check_kept(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Buckets are kept only where every survivor said that it holds their sums."""
    held = {(record.attempt, record.group): record.num_complete for _, record in part.votes}
    for number, which, commit, attempted, following in part.decided:
        if following is None:
            continue
        for group in sorted(attempted.members):
            counts, place = held.get((attempted.attempt, group)), (number, which)
            if following.kept and counts is None:
                reason = f"step {commit.step}: no vote of group {group} says what it kept"
                yield Finding(severity="unknown", reason=reason, place=place)
            elif _more_than(counts or (), following.kept):
                reason = f"step {commit.step}: buckets are kept whose sums group {group} did not hold"
                yield Finding(severity="invalid", reason=reason, place=place)


def was_fenced(record: ContributionRecord | VoteRecord, fold: Fold) -> bool:
    """Whether the group, in this incarnation, had no part in the attempt when it began."""
    opened = fold.opened.get(record.attempt)
    return opened is not None and opened.get(record.group) != record.incarnation


def microbatches_of(records: Sequence[ContributionRecord]) -> Iterator[tuple[int, int]]:
    """Shard and index of every microbatch that these bring, as often as they do."""
    for record in records:
        for shard, indices in record.microbatches.items():
            for index in indices:
                yield int(shard), index


def _miscount(counted: Counter[tuple[int, int]], expected: set[tuple[int, int]]) -> str:
    missing = sorted(expected - set(counted))
    twice = sorted(item for item, times in counted.items() if times > 1)
    strange = sorted(set(counted) - expected)
    parts = [("missing", missing), ("counted more than once", twice), ("not part of the batch", strange)]
    return "; ".join(f"microbatches {what}: {items[:5]}" for what, items in parts if items)
