"""Proof from the journal that the sums of every committed step count every microbatch exactly once, in every bucket.

A step may hold sums of several attempts: each failed one left, for each rank, the first buckets that all survivors
held, and the next one reduced those after them. So every attempt from which some rank kept buckets, and the one that
was committed, must count every microbatch once by itself.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from spare_megatron.journal.files import Journal
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Attempted, Committed, Fold
from spare_megatron.journal.records import ContributionRecord, RunRecord, VoteRecord


def check_contributions(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """The contributions to each attempt whose sums a committed step holds are every microbatch exactly once."""
    by_attempt: dict[int, list[ContributionRecord]] = defaultdict(list)
    for record in journal.of(ContributionRecord):
        by_attempt[record.attempt].append(record)
    expected = {(s, k) for s in range(run.num_groups) for k in range(run.microbatches_per_shard)}
    for commit in fold.commits:
        for attempted in _held(commit):
            records = by_attempt.get(attempted.attempt, [])
            is_told = attempted.attempt in fold.opened  # else the entry is missing that says what was kept
            yield from _check_attempt(commit.step, attempted, records, expected, is_told=is_told)
            for record in records:
                if was_fenced(record, fold):
                    reason = f"step {commit.step}: group {record.group} contributed after it was fenced"
                    yield Finding(severity="invalid", reason=reason)


def _held(commit: Committed) -> Iterator[Attempted]:
    """The attempts of which the step holds sums: of some buckets, or, the last, of all that are left."""
    for attempted, following in zip_longest(commit.attempts, commit.attempts[1:]):
        if following is None or _more_than(attempted.kept, following.kept):
            yield attempted


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
) -> Iterator[Finding]:
    members = {group for record in records for group in record.members}
    senders = Counter(record.group for record in records)
    if any(set(record.members) != members or record.step != step for record in records):
        reason = f"step {step}: groups reduced attempt {attempted.attempt} as different sets"
        yield Finding(severity="invalid", reason=reason)
    if is_told and any(tuple(record.kept) != attempted.kept for record in records):
        reason = f"step {step}: a group reduced other buckets in attempt {attempted.attempt} than the log says"
        yield Finding(severity="invalid", reason=reason)
    if not records:
        yield Finding(severity="unknown", reason=f"step {step}: no contribution is in the journal")
    missing = sorted(members - set(senders))
    for group in missing:
        reason = f"step {step}: the contribution of group {group} is not in the journal"
        yield Finding(severity="unknown", reason=reason)
    counted = Counter(microbatches_of(records))
    if records and not missing and (set(counted) != expected or set(counted.values()) != {1}):
        yield Finding(severity="invalid", reason=f"step {step}: {_miscount(counted, expected)}")


def check_kept(journal: Journal, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Buckets are kept only where every survivor said that it holds their sums."""
    held = {(record.attempt, record.group): record.num_complete for record in journal.of(VoteRecord)}
    for commit in fold.commits:
        for attempted, following in zip(commit.attempts, commit.attempts[1:], strict=False):
            for group in sorted(attempted.members):
                counts = held.get((attempted.attempt, group))
                if following.kept and counts is None:
                    reason = f"step {commit.step}: no vote of group {group} says what it kept"
                    yield Finding(severity="unknown", reason=reason)
                elif _more_than(counts or (), following.kept):
                    reason = f"step {commit.step}: buckets are kept whose sums group {group} did not hold"
                    yield Finding(severity="invalid", reason=reason)


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
