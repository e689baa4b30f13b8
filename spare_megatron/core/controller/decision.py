"""Decides an attempt: the next log entry once every survivor has voted.

First come groups that have found their own numbers wrong, then objections: different plans or state
(`core.controller.comparison`), groups that lack a resource of their own again, then audits (`core.audits.audits`) and
suspects. Without one, Commit follows if every survivor holds the complete sum, else Retry, which keeps the buckets
whose sums all survivors hold, and none if a sum is wrong. An evaluation is decided by the sums in the votes, so each
loss takes work away and needs a Retry; a round with other sites by the result in the votes. Groups that do not vote in
time are fenced.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spare_megatron.core.audits import audits
from spare_megatron.core.audits.suspects import confirmation, first_questions, suspicions
from spare_megatron.core.controller.comparison import by_value, objection
from spare_megatron.core.log.entries import (
    Commit,
    Entry,
    Evaluated,
    Fence,
    Finish,
    Halt,
    OwnFailure,
    Retry,
    Synced,
    Undo,
)
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.loss_sums import added
from spare_megatron.core.log.votes import WRONG_NUMBERS, Attempted, RoundResult, Vote, host_digests
from spare_megatron.core.saves.snapshot_policy import WholeSnapshot
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.state_partitions import Ownership, PartitionCopy


def decide(
    attempted: Attempted, event: VotesRead, *, save: bool, is_last: bool, at_s: float, is_asked: bool = False
) -> Entry | None:
    """The entry that decides the attempt, or None while a vote is missing; `at_s` is on the clock of the log."""
    votes = event.votes
    try:
        counted = list(map(votes.__getitem__, attempted.members))
    except KeyError:
        return None
    # Each pass over 1000 votes costs; a driver may pass one vote object for all groups.
    first = next(iter(counted), None)
    different = counted[:1] + [vote for vote in counted if vote is not first]
    if stated := {group: vote for group, vote in votes.items() if vote.wrong_numbers}:
        if (found := _found_by_itself(attempted, stated)) is not None:
            return found
        attempted = replace(attempted, is_discarded=True)  # the group is lost since it voted
    if (objection := _objection(attempted, votes, different)) is not None:
        return objection
    wrong = _voting("has_wrong_sum", attempted, votes, different)
    if _is_at_fault(wrong, attempted, votes):
        reason = "it alone found sums over groups wrong, in two attempts in succession"
        incarnation = dict(attempted.voters)[wrong[0]]
        return Fence(group=wrong[0], incarnation=incarnation, reason=reason, discard=True)
    failing = _voting("failure", attempted, votes, different)
    failures = tuple(OwnFailure(group, votes[group].failure) for group in failing)
    if (repeated := _repeated(failures, attempted)) is not None:
        return repeated
    if attempted.disputes or any(vote.audits or vote.losses for vote in votes.values()):
        entry = _judge_audits(attempted, votes, different, may_question=not wrong)
        if entry is not None:
            return entry
    is_anew = attempted.is_discarded or bool(wrong)
    is_work_lost = attempted.is_evaluation and len(attempted.members) < len(attempted.voters)
    if is_anew or is_work_lost or not all(vote.is_complete for vote in different):
        return Retry(
            step=attempted.step,
            attempt=attempted.attempt,
            kept=() if is_anew else _kept(different),
            recompute=is_anew,
            gather=(is_anew and attempted.is_shared) or any(vote.lacks_params for vote in different),
            wrong_sums=wrong,
            failures=failures,
        )
    if attempted.is_sync:
        return _synced(attempted, different)
    if attempted.is_evaluation:
        return Evaluated(step=attempted.step, attempt=attempted.attempt, sums=added(vote.sums for vote in counted))
    if attempted.is_over:
        return Finish(step=attempted.step, attempt=attempted.attempt)
    step, attempt = attempted.step, attempted.attempt
    commit = Commit(step=step, attempt=attempt, save=save, is_last=is_last, is_asked=is_asked, at_s=at_s)
    return _with_votes(commit, attempted, event, different)


def _with_votes(commit: Commit, attempted: Attempted, event: VotesRead, different: Sequence[Vote]) -> Commit:
    """The commit with what the votes ask for and have reached."""
    votes, incarnations = event.votes, dict(attempted.voters)
    sync = any(vote.sync for vote in different)
    has_digests = any(vote.partition_digests for vote in different)
    return replace(
        commit,
        admit=() if sync else event.waiting,  # a newcomer gets the state after the round
        restored=_restored(attempted, votes) if any(vote.restored for vote in different) else (),
        released=attempted.ownership.superseded if attempted.ownership else (),
        proven=_proven(attempted.ownership, attempted, votes) if attempted.ownership and has_digests else (),
        save_ends=tuple(sorted({end for vote in different for end in vote.save_ends})),
        drain=tuple(Member(group, incarnations[group]) for group in _voting("leaves", attempted, votes, different)),
        sync=sync,
    )


def _synced(attempted: Attempted, different: Sequence[Vote]) -> Entry:
    """The end of a round with other sites: digests of its result have been compared like those of other state."""
    results = {vote.synced for vote in different} - {None}
    if len(results) > 1:
        return Halt(step=attempted.step, reason=f"groups have different results of a round with other sites: {results}")
    result = next(iter(results), None) or RoundResult()
    return Synced(step=attempted.step, attempt=attempted.attempt, **result._asdict())


def decide_undo(retry: Retry, found: WholeSnapshot | None) -> Undo | Retry:
    """The entry of an attempt about an undo, to the newest snapshot that is whole; without one the step is computed
    with what is spoiled.
    """
    if found is None:
        return replace(retry, recompute=True, kept=())
    return Undo(step=found.step, attempt=retry.attempt, snapshot=found.attempt)


def fence_silent_voters(
    attempt: int, voters: Iterable[Member], voted: Collection[GroupId], cause: str
) -> tuple[Fence, ...]:
    """Fences of the voters without a vote, once the decision on the attempt is overdue; empty if all have voted.

    >>> [fence.group for fence in fence_silent_voters(4, [Member(0), Member(1), Member(2)], {0, 2}, "too late")]
    [1]
    """
    reason = f"it has not voted on attempt {attempt}: {cause}"
    silent = [voter for voter in voters if voter.group not in voted]
    return tuple(Fence(group=voter.group, incarnation=voter.incarnation, reason=reason) for voter in silent)


def _found_by_itself(attempted: Attempted, stated: Mapping[GroupId, Vote]) -> Fence | Halt | None:
    """The end of the member whose own checks have found wrong numbers, or of the run if several voters state that."""
    group, vote = min(stated.items())
    if len(stated) > 1:
        texts = "; ".join(f"group {one}: {stated[one].wrong_numbers}" for one in sorted(stated)[:2])
        reason = f"{WRONG_NUMBERS} in {len(stated)} groups in one attempt, which no redundancy masks: {texts}"
        return Halt(step=attempted.step, reason=reason)
    if group not in attempted.members:
        return None
    fence = _fence(attempted, group, f"its {WRONG_NUMBERS}: {vote.wrong_numbers}", vote.wrong_positions)
    return replace(fence, error=WRONG_NUMBERS)


def _fence(attempted: Attempted, group: GroupId, reason: str, positions: tuple[int, ...]) -> Fence:
    """The end of a group that has computed wrongly."""
    fence = Fence(group=group, incarnation=dict(attempted.voters)[group], reason=reason, wrong_positions=positions)
    return replace(fence, discard=True, is_outvoted=True)


def _voting(
    field: str, attempted: Attempted, votes: Mapping[GroupId, Vote], different: Sequence[Vote]
) -> tuple[GroupId, ...]:
    """The members whose vote has this field set; `different` votes are those among them."""
    if not any(getattr(vote, field) for vote in different):
        return ()
    return tuple(group for group in attempted.members if getattr(votes[group], field))


def _is_at_fault(wrong: Sequence[GroupId], attempted: Attempted, votes: Mapping[GroupId, Vote]) -> bool:
    """Whether the only group that found sums wrong is to blame: it was before, and to all others they came right.

    Sums of state partitions come to some groups alone, so that they say nothing of those that send them.
    """
    if len(wrong) != 1 or tuple(wrong) != attempted.wrong_sums or attempted.is_shared or attempted.is_discarded:
        return False
    others = [votes[group] for group in attempted.members if group != wrong[0]]
    return bool(others) and all(vote.is_complete for vote in others)


def _repeated(failures: Sequence[OwnFailure], attempted: Attempted) -> Fence | Halt | None:
    """The end of the first group that fails by itself for the second time in this step; of the run if all groups do.

    While all fail for the first time, none of them stands out, so that all try again.
    """
    again = [failure for failure in failures if failure.group in attempted.failed]
    if not again or len(again) < len(failures) == len(attempted.members):
        return None
    group, cause = again[0]
    if len(again) == len(attempted.members):
        return Halt(step=attempted.step, reason=f"no group can connect to the others, group {group} for this: {cause}")
    reason = f"it could not connect to the others in two attempts of step {attempted.step}: {cause}"
    return Fence(group=group, incarnation=dict(attempted.voters)[group], reason=reason)


def _kept(votes: Sequence[Vote]) -> tuple[int, ...]:
    """For each position, the leading buckets whose sums all votes hold; empty if a vote reports no buckets."""
    return tuple(map(min, zip(*(vote.num_complete for vote in votes), strict=False)))


def _objection(attempted: Attempted, votes: Mapping[GroupId, Vote], of_members: Sequence[Vote]) -> Entry | None:
    if len({vote.plan_digest for vote in of_members}) > 1:
        return Halt(step=attempted.step, reason=f"groups have different plans: {by_value(votes, 'plan_digest')}")
    cast = of_members if len(votes) == len(attempted.members) else votes.values()
    if any(vote.partition_digests for vote in cast) or _differ("params_digest", cast) or _differ("state_digest", cast):
        return objection(attempted, votes)
    return None


def _differ(field: str, votes: Iterable[Vote]) -> bool:
    return len({getattr(vote, field) for vote in votes} - {""}) > 1


def _judge_audits(
    attempted: Attempted, votes: Mapping[GroupId, Vote], of_members: Sequence[Vote], *, may_question: bool
) -> Entry | None:
    """What follows from audits and suspects: a fence, a question to further hosts, or the end of the run; None if all
    agree.

    Digests of groups lost since they voted count: their gradients are in the sum.
    """
    if attempted.is_discarded and not any(dispute.differs for dispute in attempted.disputes):
        return None  # everything is computed again, audits included
    disputes = _disputes(attempted, votes, may_question=may_question and not attempted.is_discarded)
    members, hosts = attempted.members, attempted.hosts
    able = [audits.able_to_compute(one.microbatch.shard, members, hosts, disputes) for one in disputes]
    found = first_questions(
        audits.judge(one, members, groups) if one.differs else confirmation(one, groups)
        for one, groups in zip(disputes, able, strict=True)
    )
    for verdict in found:
        if isinstance(verdict, audits.Outvoted):
            return _fence(attempted, verdict.group, verdict.reason, verdict.positions)
    undecided = [verdict.reason for verdict in found if isinstance(verdict, audits.Undecided)]
    has_questions = any(isinstance(verdict, audits.Dispute) for verdict in found)
    if undecided and not has_questions:
        return Halt(step=attempted.step, reason=undecided[0], discard=True)
    carried = tuple(
        verdict if isinstance(verdict, audits.Dispute) else audits.unasked(one)
        for one, verdict in zip(disputes, found, strict=True)
        if isinstance(verdict, audits.Dispute) or one.differs
    )
    # Without a question, one of those that differ is lost since it voted, and the sum holds what may be wrong.
    if has_questions or (carried and not attempted.is_discarded):
        return _question(attempted, of_members, carried)
    return None


def _disputes(attempted: Attempted, votes: Mapping[GroupId, Vote], *, may_question: bool) -> list[audits.Dispute]:
    """Those under way with what the groups have voted, and new ones; suspects only if `may_question`."""
    digests = {group: vote.audits for group, vote in votes.items()}
    losses = {group: vote.losses for group, vote in votes.items()}
    under_way = [audits.with_statements(one, losses if one.is_suspicion else digests) for one in attempted.disputes]
    disputes = [one for one in under_way if one.differs or may_question]
    found = [*audits.mismatches(digests)]
    if may_question:
        found += [replace(new, is_suspicion=True) for new in audits.mismatches(losses)]
        found += suspicions(losses, attempted.questioned) if attempted.may_question else ()
    known = {(one.microbatch, one.is_suspicion) for one in disputes}
    for new in found:
        if (new.microbatch, new.is_suspicion) not in known:
            known.add((new.microbatch, new.is_suspicion))
            disputes.append(new)
    return disputes


def _question(attempted: Attempted, of_members: Sequence[Vote], disputes: tuple[audits.Dispute, ...]) -> Retry:
    """Has the disputed microbatches computed; all sums stay if they will not be committed.

    Else those of the last bucket do not, so that its sum still completes only if every member takes part.
    """
    kept = _kept(of_members)
    if not any(dispute.differs for dispute in disputes) and all(vote.is_complete for vote in of_members):
        kept = tuple(max(number - 1, 0) for number in kept)
    return Retry(
        step=attempted.step,
        attempt=attempted.attempt,
        kept=kept,
        gather=any(vote.lacks_params for vote in of_members),
        disputes=disputes,
    )


def _restored(attempted: Attempted, votes: Mapping[GroupId, Vote]) -> tuple[PartitionCopy, ...]:
    if len(attempted.members) < len(attempted.voters):
        return ()  # a copy whose donor was lost after the vote starts anew
    return tuple(PartitionCopy(index, voter) for voter in attempted.voters for index in votes[voter.group].restored)


def _proven(ownership: Ownership, attempted: Attempted, votes: Mapping[GroupId, Vote]) -> tuple[PartitionCopy, ...]:
    """Copies whose digests count from here on: all hosts of the partition, at least two, have reported its state.

    A copy compared with its donor alone could outvote a third host that is right.
    """
    members = [voter for voter in attempted.voters if voter.group in attempted.members]
    by_partition = host_digests({member.group: votes[member.group] for member in members})
    fresh = [
        PartitionCopy(digest.partition, member)
        for member in members
        for digest in votes[member.group].partition_digests
        if not digest.is_proven
    ]
    return tuple(
        copy
        for copy in fresh
        if len(reported := by_partition[copy.partition]) > 1
        and reported.keys() >= {host.group for host in ownership.hosts[copy.partition]}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """What a commit says of the members that ask to leave."""

    drain: tuple[Member, ...]
    """Those that leave with it."""
    leaving: tuple[Member, ...]
    """Those whose state partitions others are to host; empty if every group holds all state."""
    ready: tuple[Member, ...]
    """Those that could leave, but for checkpoints that they write or have written."""


def departures(
    asked: Iterable[Member],
    members: Collection[Member],
    placement: Placement,
    ownership: Ownership | None,
    *,
    writers: Collection[Member] = (),
    last_resort: bool = False,
) -> Departures:
    """Grants members their leave in ascending order, as long as every shard keeps a host and one group stays.

    The others wait. `writers` wait until their checkpoints are complete and compared. With `last_resort` every group
    can compute every shard.

    >>> from spare_megatron.stacking.placement import make_placement
    >>> ring, members = make_placement("golomb", 3, 2), [Member(group) for group in range(3)]
    >>> departures(members[:2], members, ring, None).drain  # without both shard 1 has no host
    (Member(group=0, incarnation=0),)
    """
    staying, granted = set(members), []
    for member in sorted(asked):
        left = frozenset(other.group for other in staying if other != member)
        if left and (last_resort or not placement.uncovered(left)):
            staying.discard(member)
            granted.append(member)
    ready = tuple(member for member in granted if ownership is None or ownership.has_handed_over(member))
    return Departures(
        drain=tuple(member for member in ready if member not in writers),
        leaving=() if ownership is None else tuple(granted),
        ready=ready,
    )
