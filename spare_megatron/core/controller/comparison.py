"""Finds wrong state by the digests in votes, and decides which groups to fence.

Without state partitions, the parameters of the majority of votes are right; copied state counts as one opinion with its
donor's. With partitions, hosts are compared first: what more than half of the proven copies say is right, else all
hosts are fenced. If parameters differ, the minority is fenced, or no group if the majority may be wrong; the attempt is
void then. Rules and reasons: docs/protocol_wrong_numbers.md.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from spare_megatron.core.log.entries import Entry, Fence, Halt, Retry
from spare_megatron.core.log.votes import Attempted, HostDigests, Vote, host_digests
from spare_megatron.stacking.layout import GroupId

LEAST_HOSTS_TO_COMPARE = 3
"""Hosts of a partition of which more than half are right when the state of one of them is wrong."""

NO_DIGEST = "lacking"
"""A group that lacks parameters publishes this for newcomers instead of a digest."""


def objection(attempted: Attempted, votes: Mapping[GroupId, Vote]) -> Entry | None:
    """The entry that objects to differing state, or None. Fences one group at a time, lowest first."""
    if any(votes[group].lacks_params for group in attempted.members):
        return None
    by_partition = host_digests(votes)
    if attempted.is_shared and any(not votes[group].params_digest for group in attempted.members):
        params = {vote.params_digest for vote in votes.values()} - {""}
        if len(params) > 1 or any(len({digest.value for digest in of.values()}) > 1 for of in by_partition.values()):
            return Retry(step=attempted.step, attempt=attempted.attempt, recompute=True, gather=True)
        return None
    of_params = _wrong_partitions(attempted, by_partition) or _wrong_params(attempted, votes, by_partition)
    for found in (of_params, _wrong_state(attempted, votes)):
        if found is None:
            continue
        if not isinstance(found, dict):
            return found
        to_fence = found.keys() & set(attempted.members) if attempted.is_discarded else found.keys()
        if to_fence:
            group = min(to_fence)
            return Fence(group=group, incarnation=dict(attempted.voters)[group], reason=found[group], discard=True)
    return None


def _wrong_partitions(attempted: Attempted, by_partition: HostDigests) -> dict[GroupId, str]:
    wrong: dict[GroupId, str] = {}
    step, ownership = attempted.step, attempted.ownership
    for number, by_group in sorted(by_partition.items()):
        if len({digest.value for digest in by_group.values()}) < 2:
            continue
        proven = Counter(digest.value for digest in by_group.values() if digest.is_proven)
        right, num_agreeing = (proven.most_common(1) or [("", 0)])[0]
        reason = f"its state of partition {number} before step {step} differs from that of {num_agreeing} other hosts"
        num_hosts = min(len(by_group), ownership.setup.redundancy if ownership else len(by_group))
        if 2 * num_agreeing <= num_hosts:
            right, ids = "", [int(group) for group in sorted(by_group)]
            reason = (
                f"groups {ids} hold different state of partition {number} before step {step}, and no majority is right"
            )
        for group, digest in by_group.items():
            if digest.value != right:
                wrong.setdefault(group, reason)
    return wrong


def _wrong_params(
    attempted: Attempted, votes: Mapping[GroupId, Vote], by_partition: HostDigests
) -> dict[GroupId, str] | Retry | Halt | None:
    """The groups whose parameters are wrong, and why; or the entry if none is fenced. All hosts agree."""
    counts = Counter(vote.params_digest for vote in votes.values() if vote.params_digest)
    if len(counts) < 2:
        return None
    digest, num_agreeing = counts.most_common(1)[0]
    wrong = {group for group, vote in votes.items() if vote.params_digest not in ("", digest)}
    has_majority = 2 * num_agreeing > counts.total()
    if by_partition and all(len(hosts) > 1 for hosts in by_partition.values()):
        has_silent = any(voter.group not in votes for voter in attempted.voters)
        is_from_owner = any(hosts.keys() <= wrong for hosts in by_partition.values())
        if not has_majority or has_silent or is_from_owner:
            return Retry(step=attempted.step, attempt=attempted.attempt, recompute=True, gather=True)
    if not has_majority:
        reason = f"groups have different parameters: {by_value(votes, 'params_digest')}"
        return Halt(step=attempted.step, reason=reason, discard=True)
    reason = f"its parameters before step {attempted.step} differ from those of {num_agreeing} groups"
    return dict.fromkeys(wrong, reason)


def _wrong_state(attempted: Attempted, votes: Mapping[GroupId, Vote]) -> dict[GroupId, str] | Halt | None:
    """Without partitions: the groups whose state is wrong, and why; Halt if it is unknown whose is."""
    reported = {group: vote for group, vote in votes.items() if vote.state_digest}
    if len({vote.state_digest for vote in reported.values()}) < 2:
        return None
    digests = {
        (group if vote.copied_from is None else vote.copied_from, vote.state_digest) for group, vote in reported.items()
    }
    counts = Counter(digest for _, digest in digests)
    digest, num_agreeing = counts.most_common(1)[0]
    if 2 * num_agreeing <= counts.total():
        reason = f"groups have the same parameters and different state: {by_value(reported, 'state_digest')}"
        return Halt(step=attempted.step, reason=reason, discard=True)
    reason = f"its state before step {attempted.step} differs from that of {num_agreeing} groups"
    return {group: reason for group, vote in reported.items() if vote.state_digest != digest}


def majority_holds(digest: str, others: Sequence[str | None]) -> bool | None:
    """Whether more than half of the other groups hold the parameters that a newcomer has copied; None while unknown.

    `others` are the digests of the earlier groups that are not lost, None for those yet to publish one.

    >>> [majority_holds("a", others) for others in (["a", None, "a"], ["a", None, "b"], ["b", "b", None])]
    [True, None, False]
    """
    same = sum(other == digest for other in others)
    different = sum(other is not None and other != digest for other in others)
    if 2 * same > len(others):
        return True
    return False if 2 * different >= len(others) else None


def by_value(votes: Mapping[GroupId, Vote], field: str) -> str:
    groups: dict[str, list[int]] = {}
    for group in sorted(votes):
        groups.setdefault(str(getattr(votes[group], field))[:12] or "none", []).append(group)
    return "; ".join(f"{value}: groups {ids}" for value, ids in sorted(groups.items()))
