"""Rules on evaluations: each counts every microbatch of the validation sets once, and the log has the right sums."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from spare_megatron.core.log.loss_sums import added
from spare_megatron.journal.fold import Evaluation, Finding, Fold, Severity
from spare_megatron.journal.journal_view import Attempts, by_attempt
from spare_megatron.journal.proofs.check_steps import microbatches_of, miscount
from spare_megatron.journal.records import EvaluationRecord
from spare_megatron.journal.run_record import RunRecord


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
