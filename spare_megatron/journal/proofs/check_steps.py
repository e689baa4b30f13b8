"""Rules on steps: the sums of every committed step count every microbatch exactly once, in every bucket.

A failed attempt keeps, at each position, the first buckets that all survivors hold. So every attempt from which one
kept buckets, and the committed one, must count every microbatch exactly once by itself, as an evaluation must.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from spare_megatron.core.log.loss_sums import added
from spare_megatron.journal.fold import (
    Committed,
    Evaluation,
    Finding,
    Fold,
    FoldedAttempt,
    Rule,
    Severity,
    invalid,
    unknown,
)
from spare_megatron.journal.journal_view import Attempts, by_attempt
from spare_megatron.journal.records import (
    ContributionRecord,
    EvaluationRecord,
    UpdateRecord,
    VoteRecord,
    digest_of_work,
)
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId, ShardId


def check_contributions(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every attempt whose sums a committed step holds counts every microbatch exactly once."""
    contributions = by_attempt(part.contributions)
    expected: dict[int, set[tuple[int, int]]] = {}  # by microbatches of a shard
    for number, which, commit, attempted, following in part.decided:
        if following is not None and not _more_than(attempted.kept, following.kept):
            continue  # the step holds no sums of it
        place, records = (number, which), contributions[attempted.attempt]
        size = run.microbatches_of_a_shard(commit.step)
        if size not in expected:
            expected[size] = {(s, k) for s in range(run.num_groups) for k in range(size)}
        is_recorded = attempted.attempt in fold.opened  # else the entry that says what was kept is missing
        for severity, reason in _check_attempt(
            commit.step, attempted, records, expected[size], is_recorded=is_recorded
        ):
            yield Finding(severity=severity, reason=reason, place=place)
        for record in records:
            if was_fenced(record, fold):
                reason = f"step {commit.step}: group {record.group} contributed after it was fenced"
                yield fold.finding(reason, place, is_known=record.attempt <= fold.known.attempt)


def _more_than(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether some rank keeps more buckets in `other` than in `one`."""
    return any(before < after for before, after in zip_longest(one, other, fillvalue=0))


def _check_attempt(
    step: int,
    attempted: FoldedAttempt,
    records: Sequence[ContributionRecord],
    expected: set[tuple[int, int]],
    *,
    is_recorded: bool,
) -> Iterator[tuple[Severity, str]]:
    members = {group for record in records for group in record.members}
    epochs = {record.epoch for record in records}
    senders = Counter(record.group for record in records)
    if any(set(record.members) != members or record.step != step for record in records) or len(epochs) > 1:
        yield "invalid", f"step {step}: groups reduced attempt {attempted.attempt} with different member sets"
    if is_recorded and any(tuple(record.kept) != attempted.kept for record in records):
        yield "invalid", f"step {step}: a group reduced other buckets in attempt {attempted.attempt} than the log says"
    if not records:
        yield "unknown", f"step {step}: no contribution is in the journal"
    missing = sorted(members - set(senders))
    for group in missing:
        yield "unknown", f"step {step}: the contribution of group {group} is not in the journal"
    counted = Counter(microbatches_of(records))
    if records and not missing and (set(counted) != expected or set(counted.values()) != {1}):
        yield "invalid", f"step {step}: {miscount(counted, expected)}"


def check_kept(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Buckets are kept only if every survivor voted that it holds their sums."""
    held = {(record.attempt, record.group): record.num_complete for _, record in part.votes}
    for number, which, commit, attempted, following in part.decided:
        if following is None:
            continue
        for group in sorted(attempted.members):
            counts, place = held.get((attempted.attempt, group)), (number, which)
            if following.kept and counts is None:
                yield unknown(f"step {commit.step}: no vote of group {group} says what it kept", place)
            elif _more_than(counts or (), following.kept):
                yield invalid(f"step {commit.step}: buckets are kept whose sums group {group} did not hold", place)


def check_hosts(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """A group computes only shards in its stack, unless the run has hosts of last resort."""
    if run.last_resort:
        return
    placement = fold.terms.placement
    for place, record in (*part.contributions, *part.evaluations):
        for shard in record.microbatches:
            if GroupId(record.group) not in placement.hosts[ShardId(int(shard))]:
                reason = f"step {record.step}: group {record.group} computed shard {shard} without hosting it"
                yield invalid(reason, place)


def was_fenced(record: ContributionRecord | VoteRecord, fold: Fold) -> bool:
    """Whether this incarnation of the group was not a member when the attempt began."""
    opened = fold.opened.get(record.attempt)
    return opened is not None and opened.get(record.group) != record.incarnation


def microbatches_of(records: Sequence[ContributionRecord | EvaluationRecord]) -> Iterator[tuple[int, int]]:
    """(shard, index) of every contributed microbatch, with repetitions."""
    for record in records:
        for shard, indices in record.microbatches.items():
            for index in indices:
                yield int(shard), index


def miscount(counted: Counter[tuple[int, int]], expected: set[tuple[int, int]]) -> str:
    """What was not counted exactly once."""
    missing = sorted(expected - set(counted))
    twice = sorted(item for item, times in counted.items() if times > 1)
    strange = sorted(set(counted) - expected)
    parts = [("missing", missing), ("counted more than once", twice), ("not part of the batch", strange)]
    return "; ".join(f"microbatches {what}: {items[:5]}" for what, items in parts if items)


def check_voters(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """No group votes in an incarnation that was fenced before."""
    for place, record in part.votes:
        if was_fenced(record, fold):
            reason = f"step {record.step}: group {record.group} voted after it was fenced"
            yield fold.finding(reason, place, is_known=record.attempt <= fold.known.attempt)


def check_single_votes(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """No group votes twice on an attempt."""
    for (attempt, group), cast in sorted(_votes(part).items()):
        if len(cast) > 1:
            yield invalid(f"group {group} voted {len(cast)} times on attempt {attempt}", (attempt, group))


def check_voted_work(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """A group's contribution to an attempt, or its part of an evaluation, is what its ranks agreed on in the vote."""
    voted = {(record.attempt, record.group): record.work_digest for _, record in part.votes}
    last: dict[int, tuple[object, str]] = {}  # group -> its last work and digest, which mostly repeat
    for place, record in (*part.contributions, *part.evaluations):
        work, digest = last.get(record.group, (None, ""))
        if work != record.microbatches:
            digest = digest_of_work(microbatches_of([record]))
            last[record.group] = record.microbatches, digest
        if voted.get((record.attempt, record.group), digest) != digest:
            yield invalid(f"step {record.step}: group {record.group} voted on other work than it contributed", place)


def check_votes(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """A committed attempt has a complete vote of every group that took part when it was committed."""
    votes = _votes(part)
    steps = {commit.attempt: commit.step for _, commit in part.commits}
    for place, record in part.votes:
        if record.step != steps.get(record.attempt, record.step):
            reason = f"group {record.group} voted on attempt {record.attempt} as one of step {record.step}"
            yield invalid(f"step {steps[record.attempt]}: {reason}", (-1, *place))
    for number, commit in part.commits:
        step = commit.step
        for group in sorted(commit.members):
            cast = votes.get((commit.attempt, group), [])
            if not cast:
                yield unknown(f"step {step}: no vote of group {group} in the journal", (number,))
            elif not all(cast):
                yield invalid(f"step {step}: committed although group {group} lacked the complete sum", (number,))


def _votes(part: Attempts) -> dict[tuple[int, int], list[bool]]:
    votes: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for _, record in part.votes:
        votes[record.attempt, record.group].append(record.is_complete)
    return votes


def check_applied(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Only committed attempts are applied."""
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
        yield fold.finding(f"step {step}: {what}", (step, attempt), is_known=is_decided)


def check_updates(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every survivor applied every committed step once, with equal sums that counted all microbatches."""
    updates: dict[tuple[int, int], list[UpdateRecord]] = defaultdict(list)
    for _, record in part.updates:
        updates[record.step, record.attempt].append(record)
    for number, commit in part.commits:
        records = updates.get((commit.step, commit.attempt), [])
        for severity, reason in _check_update(run, commit, records):
            yield Finding(severity=severity, reason=f"step {commit.step}: {reason}", place=(number,))
        if commit.index in fold.undone or (fold.is_cut and commit.step + 1 == fold.step):
            continue  # a group may have ended before it applied it
        for group in sorted(commit.members - {record.group for record in records}):
            # A group lost after the commit may not have applied it, unless it contributed to the next attempt.
            was_lost = fold.last_fenced_at.get(group, -1) > commit.index
            if not was_lost or (group, commit.attempt + 1) in part.went_on:
                yield unknown(f"step {commit.step}: no update of group {group} in the journal", (number,))


def _check_update(run: RunRecord, commit: Committed, records: list[UpdateRecord]) -> Iterator[tuple[Severity, str]]:
    total = run.num_groups * run.microbatches_of_a_shard(commit.step)
    if any(record.num_microbatches != total for record in records):
        yield "invalid", f"the sum did not count {total} microbatches"
    if len({(record.loss, record.grad_norm, *sorted(record.terms.items())) for record in records}) > 1:
        yield "invalid", "groups applied different sums"
    for name in ("learning_rate", "makespan"):
        values = sorted({getattr(record, name) for record in records})
        if len(values) > 1:
            yield "invalid", f"groups have different {name}: {', '.join(map(str, values))}"
    appliers = Counter(record.group for record in records)
    for group, times in sorted(appliers.items()):
        if times > 1:
            yield "invalid", f"group {group} applied it {times} times"


def check_evaluations(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every evaluation counts each microbatch of each validation set once, and is the sum of what its groups found."""
    found = by_attempt(part.evaluations)
    votes = {(record.attempt, record.group): record.is_complete for _, record in part.votes}
    for number, evaluation in part.evaluated:
        cast = {group: votes.get((evaluation.entry.attempt, group)) for group in evaluation.members}
        records = [record for record in found[evaluation.entry.attempt] if record.group in evaluation.members]
        for severity, reason in _check_evaluation(run, evaluation, records, cast):
            what = f"evaluation after {evaluation.entry.step} steps: {reason}"
            yield Finding(severity=severity, reason=what, place=(number,))


def _check_evaluation(
    run: RunRecord, evaluation: Evaluation, records: Sequence[EvaluationRecord], votes: Mapping[int, bool | None]
) -> Iterator[tuple[Severity, str]]:
    for group, vote in sorted(votes.items()):
        if vote is None:
            yield "unknown", f"no vote of group {group} in the journal"
        elif not vote:
            yield "invalid", f"decided although group {group} had not computed its part"
    missing = sorted(evaluation.members.keys() - {record.group for record in records})
    for group in missing:
        yield "unknown", f"what group {group} found is not in the journal"
    for record in records:
        if record.incarnation != evaluation.members[record.group] or record.step != evaluation.entry.step:
            yield "invalid", f"group {record.group} found it in another incarnation or step"
    if missing:
        return
    expected = {(s, k) for s in range(run.num_groups) for k in range(run.eval_microbatches_per_shard)}
    counted = Counter(microbatches_of(records))
    if set(counted) != expected or set(counted.values()) != {1}:
        yield "invalid", miscount(counted, expected)
    found = added(record.sums for record in records)
    if {one.name: one for one in found} != {one.name: one for one in evaluation.entry.sums}:
        yield "invalid", "the log has other sums than its groups found"


RULES: Sequence[Rule] = (
    check_contributions,
    check_kept,
    check_hosts,
    check_voters,
    check_single_votes,
    check_voted_work,
    check_votes,
    check_applied,
    check_updates,
    check_evaluations,
)
