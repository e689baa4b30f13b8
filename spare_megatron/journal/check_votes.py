"""Proof from the journal that every committed attempt was voted for by every group that took part, once."""

from collections import defaultdict
from collections.abc import Iterator

from spare_megatron.journal.check_sums import microbatches_of, was_fenced
from spare_megatron.journal.evidence import Attempts
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import RunRecord, digest_of_work


def check_voters(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Nobody votes in a life that was fenced before."""
    for place, record in part.votes:
        if was_fenced(record, fold):
            reason = f"step {record.step}: group {record.group} voted after it was fenced"
            severity = fold.severity(is_known=record.attempt <= fold.known.attempt)
            yield Finding(severity=severity, reason=reason, place=place)


def check_single_votes(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Nobody votes twice on an attempt."""
    for (attempt, group), cast in sorted(_votes(part).items()):
        if len(cast) > 1:
            reason = f"group {group} voted {len(cast)} times on attempt {attempt}"
            yield Finding(severity="invalid", reason=reason, place=(attempt, group))


def check_voted_work(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """What a group brought into an attempt is what its ranks agreed on when they voted."""
    voted = {(record.attempt, record.group): record.work_digest for _, record in part.votes}
    last: dict[int, tuple[object, str]] = {}  # group -> what it brought in, and the digest: mostly the same again
    for place, record in part.contributions:
        work, digest = last.get(record.group, (None, ""))
        if work != record.microbatches:
            digest = digest_of_work(microbatches_of([record]))
            last[record.group] = record.microbatches, digest
        if voted.get((record.attempt, record.group), digest) != digest:
            reason = f"step {record.step}: group {record.group} voted on other work than it contributed"
            yield Finding(severity="invalid", reason=reason, place=place)


def check_votes(part: Attempts, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """A committed attempt has a complete vote of every group that took part when it was committed."""
    votes = _votes(part)
    steps = {commit.attempt: commit.step for _, commit in part.commits}
    for place, record in part.votes:
        if record.step != steps.get(record.attempt, record.step):
            reason = f"group {record.group} voted on attempt {record.attempt} as one of step {record.step}"
            yield Finding(severity="invalid", reason=f"step {steps[record.attempt]}: {reason}", place=(-1, *place))
    for number, commit in part.commits:
        step = commit.step
        for group in sorted(commit.members):
            cast = votes.get((commit.attempt, group), [])
            if not cast:
                reason = f"step {step}: no vote of group {group} in the journal"
                yield Finding(severity="unknown", reason=reason, place=(number,))
            elif not all(cast):
                reason = f"step {step}: committed though group {group} had no whole sum"
                yield Finding(severity="invalid", reason=reason, place=(number,))


def _votes(part: Attempts) -> dict[tuple[int, int], list[bool]]:
    """Attempt and group -> whether each vote said that the sum is complete."""
    votes: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for _, record in part.votes:
        votes[record.attempt, record.group].append(record.is_complete)
    return votes
