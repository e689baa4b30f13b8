"""What the next entry says once every survivor has voted on an attempt.

Commit if each of them holds the complete sum (what a group contributed before it was lost stays counted), Retry
otherwise, which keeps the buckets whose sums all of them hold. Before that come the objections: different plans, or
parameters that differ.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spare_megatron.core.messages import Commit, Entry, Fence, Finish, Halt, Retry, VotesRead
from spare_megatron.core.slices import SliceCopy
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.core.votes import Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The attempt that is decided, as the log has it by now.

    Attributes:
        step: The step.
        members: The groups that are left, ascending.
        voters: All that began the attempt, also those that were lost since.
        is_discarded: A group with wrong parameters contributed to it: the sum is never committed.
        is_over: All steps are committed; it decides whether the run can end.
        is_shared: Each group has most parameters from another, so that a wrong value may have come to the majority.
    """

    step: int
    members: tuple[GroupId, ...]
    voters: tuple[Member, ...]
    is_discarded: bool
    is_over: bool
    is_shared: bool = False


def decide(attempted: Attempted, event: VotesRead, *, save: bool, is_last: bool, at_s: float) -> Entry | None:
    """The entry that decides the attempt, or None while somebody has yet to vote.

    Args:
        attempted: The attempt.
        event: The votes on it.
        save: Whether a commit is to take a checkpoint.
        is_last: Whether a commit is to end the run.
        at_s: The time on the clock of the log.
    """
    votes = event.votes
    try:
        counted = list(map(votes.__getitem__, attempted.members))
    except KeyError:
        return None
    # With 1000 groups every pass counts, and a driver may hand in one vote for all of them.
    different = counted[:1] + [vote for vote in counted if vote is not counted[0]]
    objection = _objection(attempted, votes, different)
    if objection is not None:
        return objection
    if attempted.is_discarded or not all(vote.is_complete for vote in different):
        return Retry(
            step=attempted.step,
            attempt=event.attempt,
            kept=() if attempted.is_discarded else _kept(different),
            recompute=attempted.is_discarded,
            gather=any(vote.lacks_params for vote in different),
        )
    if attempted.is_over:
        return Finish(step=attempted.step, attempt=event.attempt)
    return Commit(
        step=attempted.step,
        attempt=event.attempt,
        save=save,
        admit=event.waiting,
        is_last=is_last,
        restored=_restored(attempted, votes) if any(vote.restored for vote in different) else (),
        at_s=at_s,
        save_ends=tuple(sorted({end for vote in different for end in vote.save_ends})),
    )


def _kept(votes: Sequence[Vote]) -> tuple[int, ...]:
    """For each rank, the buckets whose sums all of these hold; none if one of them tells of no buckets."""
    return tuple(map(min, zip(*(vote.num_complete for vote in votes), strict=False)))


def _objection(attempted: Attempted, votes: Mapping[GroupId, Vote], of_members: Sequence[Vote]) -> Entry | None:
    """What has to be said before anybody asks whether the sum is complete.

    Where parameters differ, those of the majority of all who voted are right, and one group after the other is
    put out that has others. Whoever is lost already needs that only if nobody else has discarded the attempt. Shared
    parameters tell nobody who is right.
    """
    step = attempted.step
    if len({vote.plan_digest for vote in of_members}) > 1:
        return Halt(step=step, reason=f"groups have different plans: {_by_value(votes, 'plan_digest')}")
    cast = of_members if len(votes) == len(attempted.members) else votes.values()
    if len({vote.params_digest for vote in cast} - {""}) < 2:
        return None
    num_votes = Counter(vote.params_digest for vote in votes.values() if vote.params_digest)
    digest, num_agreeing = num_votes.most_common(1)[0]
    if attempted.is_shared or 2 * num_agreeing <= num_votes.total():
        return Halt(step=step, reason=f"groups have different parameters: {_by_value(votes, 'params_digest')}")
    wrong = {group for group, vote in votes.items() if vote.params_digest not in ("", digest)}
    if attempted.is_discarded:
        wrong &= set(attempted.members)
    if not wrong:
        return None
    reason = f"its parameters before step {step} differ from those of {num_agreeing} groups"
    group = min(wrong)
    return Fence(group=group, incarnation=dict(attempted.voters)[group], reason=reason, discard=True)


def _restored(attempted: Attempted, votes: Mapping[GroupId, Vote]) -> tuple[SliceCopy, ...]:
    incarnations = dict(attempted.voters)
    return tuple(
        SliceCopy(index, Member(group, incarnations[group]))
        for group in attempted.members
        for index in votes[group].restored
    )


def _by_value(votes: Mapping[GroupId, Vote], field: str) -> str:
    """`value: groups` for every value that the votes hold, for a message."""
    groups: dict[str, list[int]] = {}
    for group in sorted(votes):
        groups.setdefault(str(getattr(votes[group], field))[:12] or "none", []).append(group)
    return "; ".join(f"{value}: groups {ids}" for value, ids in sorted(groups.items()))
