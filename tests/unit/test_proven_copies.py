"""When the digest of a copy counts: every way in which one corruption, copies and losses can follow each other."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations

import pytest

from spare_megatron.core.controller.decision import decide
from spare_megatron.core.log.entries import Commit, Entry, Fence
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.votes import Attempted, PartitionDigest, Vote
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, first_ownership

NUM_GROUPS = 4
GROUPS = tuple(GroupId(group) for group in range(NUM_GROUPS))
MEMBERS = tuple(map(Member, GROUPS))
PARTITION = PartitionId(0)
RIGHT, WRONG = "right", "wrong"

Copies = Mapping[GroupId, tuple[str, bool]]
"""Who has a copy of the partition: what it holds, and whether its digest counts."""


def votes_of(copies: Copies, reporters: tuple[GroupId, ...]) -> dict[GroupId, Vote]:
    """The votes of all groups, of which some report the partition."""
    return {
        group: Vote(
            is_complete=True,
            plan_digest="p",
            params_digest="p" if group in reporters or group not in copies else "",
            partition_digests=(PartitionDigest(PARTITION, *copies[group]),) if group in reporters else (),
        )
        for group in GROUPS
    }


def entry_of(copies: Copies, votes: dict[GroupId, Vote], fenced: frozenset[GroupId], redundancy: int) -> Entry:
    ownership = first_ownership(PartitionSetup(num_groups=NUM_GROUPS, redundancy=redundancy), MEMBERS)
    hosts = tuple(Member(group) for group in sorted(copies))
    attempted = Attempted(
        step=1,
        attempt=1,
        members=tuple(group for group in GROUPS if group not in fenced),
        voters=MEMBERS,
        is_discarded=bool(fenced),
        is_over=False,
        ownership=replace(ownership, hosts=(hosts, *ownership.hosts[1:])),
    )
    entry = decide(attempted, VotesRead(attempt=1, votes=votes), save=False, is_last=False, at_s=0.0)
    assert entry is not None
    return entry


def after_vote(copies: Copies, reporters: tuple[GroupId, ...], redundancy: int) -> dict[GroupId, tuple[str, bool]]:
    """Who has what when the votes are decided: others are fenced."""
    votes, left = votes_of(copies, reporters), dict(copies)
    while isinstance(entry := entry_of(left, votes, frozenset(copies) - frozenset(left), redundancy), Fence):
        del left[entry.group]
    proven = entry.proven if isinstance(entry, Commit) else ()
    return {
        group: (held, is_proven or PartitionCopy(PARTITION, Member(group)) in proven)
        for group, (held, is_proven) in left.items()
    }


def ways_on(copies: Copies, redundancy: int) -> Iterator[dict[GroupId, tuple[str, bool]]]:
    """All that may come next, but for a corruption."""
    hosts = sorted(copies)
    subsets = chain.from_iterable(combinations(hosts, num) for num in range(1, len(hosts) + 1))
    for reporters in subsets:
        after = after_vote(copies, reporters, redundancy)
        lost_right = any(held == RIGHT for group, (held, _) in copies.items() if group not in after)
        kept_wrong = any(held == WRONG for held, _ in after.values())
        assert not (lost_right and kept_wrong), f"{reporters} of {dict(copies)} report, and {after} continues"
        yield after
    for group in hosts:
        yield {other: copies[other] for other in hosts if other != group}
    for receiver in set(GROUPS) - set(hosts) if len(hosts) <= redundancy else ():  # one more where a partition moves
        for donor in hosts:
            yield {**copies, receiver: (copies[donor][0], False)}


@pytest.mark.parametrize("redundancy", [2, 3])
def test_a_wrong_host_never_outvotes_a_right_one_for_any_copy_and_order_of_reports(redundancy: int) -> None:
    first = dict.fromkeys(GROUPS[:redundancy], (RIGHT, True))
    pending: list[tuple[dict[GroupId, tuple[str, bool]], bool]] = [(first, False)]
    seen = set()
    while pending:
        copies, is_corrupted = pending.pop()
        key = (tuple(sorted(copies.items())), is_corrupted)
        if key in seen or not copies:  # without any it is wiped out
            continue
        seen.add(key)
        pending += [(after, is_corrupted) for after in ways_on(copies, redundancy)]
        if not is_corrupted:
            pending += [({**copies, group: (WRONG, copies[group][1])}, True) for group in copies]
    assert len(seen) > 100
