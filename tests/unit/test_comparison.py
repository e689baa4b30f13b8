"""Finds groups with wrong state by the digests in votes, and when the digest of a copy counts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from spare_megatron.core.controller.comparison import NO_DIGEST, majority_holds, objection
from spare_megatron.core.controller.decision import decide
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Retry
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.votes import Attempted, PartitionDigest, Vote
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, first_ownership


def attempted(num_groups: int, *, lost: str = "", is_discarded: bool = False, num_hosts: int = 0) -> Attempted:
    """An attempt of some groups. A state partition is to have so many hosts; at first as many as there are groups."""
    slicing = PartitionSetup(num_groups=num_groups, redundancy=num_hosts or num_groups)
    all_groups = [GroupId(group) for group in range(num_groups)]
    return Attempted(
        step=7,
        attempt=9,
        members=tuple(group for group in all_groups if str(group) not in lost),
        voters=tuple(Member(group, 3) for group in all_groups),
        is_discarded=is_discarded,
        is_over=False,
        ownership=first_ownership(slicing, map(Member, all_groups)),
    )


def votes(params: str, *partitions: str) -> dict[GroupId, Vote]:
    """Votes of groups 0, 1, ...: a letter for the digest of the parameters, then of each partition.

    Capitals mark a copy made since the last comparison; - for one that hosts no copy.
    """
    return {
        GroupId(group): Vote(
            is_complete=True,
            plan_digest="p",
            params_digest=digest,
            partition_digests=tuple(
                PartitionDigest(PartitionId(number), row[group].lower(), row[group].islower())
                for number, row in enumerate(partitions)
                if row[group] != "-"
            ),
        )
        for group, digest in enumerate(params)
    }


def fences_of(attempt: Attempted, cast: dict[GroupId, Vote]) -> Iterator[Fence]:
    """One fence after the other, as the log would have them, until nothing more is reported."""
    while (entry := objection(attempt, cast)) is not None:
        assert isinstance(entry, Fence), entry
        assert entry.discard
        yield entry
        left = tuple(group for group in attempt.members if group != entry.group)
        attempt = replace(attempt, members=left, is_discarded=True)


def groups(attempt: Attempted, cast: dict[GroupId, Vote]) -> list[int]:
    return [int(fence.group) for fence in fences_of(attempt, cast)]


def test_where_all_agree_nothing_is_disputed() -> None:
    assert objection(attempted(4), votes("aaaa", "bb--", "-cc-", "--dd", "e--e")) is None


def test_an_owner_whose_wrong_value_all_others_have_is_found_by_its_replicas() -> None:
    """Group 0 owns partition 0 and has sent what 3 and 4 took over; only 1 and 2 have computed it themselves."""
    [fence] = fences_of(attempted(5), votes("xyyxx", "xyy--"))
    assert (fence.group, fence.incarnation) == (0, 3)
    assert fence.reason == "its state of partition 0 before step 7 differs from that of 2 other hosts"


def test_parameters_from_a_wrong_owner_fence_no_other_group() -> None:
    assert groups(attempted(5), votes("xyyxz", "xyy--")) == [0]


def test_two_hosts_that_differ_are_both_fenced() -> None:
    fences = list(fences_of(attempted(4), votes("aaba", "a-b-")))
    assert [fence.group for fence in fences] == [0, 2]
    reason = "groups [0, 2] hold different state of partition 0 before step 7, and no majority is right"
    assert {fence.reason for fence in fences} == {reason}


def test_a_copy_that_was_made_since_the_last_comparison_does_not_speak_for_its_donor() -> None:
    """Group 3 has copied from 1, which is wrong: together they are no majority. Nor is 1 that of itself and 3."""
    assert groups(attempted(4), votes("aaaa", "-a-A")) == []
    assert groups(attempted(4), votes("aaaa", "ba-A")) == [0, 1, 3]
    assert groups(attempted(4), votes("aaaa", "-a-B")) == [1, 3]
    assert groups(attempted(4), votes("aaaa", "aa-B")) == [3]


def test_a_copy_that_replaces_its_donor_lowers_the_weight_of_no_host() -> None:
    """Group 3 has copied from 0, which releases the partition when all agree; until then it has one host more."""
    assert groups(attempted(5, num_hosts=3), votes("aaaaa", "abaA-")) == [1]
    assert groups(attempted(5, num_hosts=3), votes("aaaaa", "aaaB-")) == [3]
    assert groups(attempted(5, num_hosts=3), votes("aaaaa", "baaB-")) == [0, 3], "the donor was wrong before"
    assert groups(attempted(5, num_hosts=2), votes("aaaaa", "ab-A-")) == [0, 1, 3]
    assert groups(attempted(5, num_hosts=1), votes("aaaaa", "a--B-")) == [3]


def test_where_all_hosts_agree_a_group_that_differs_is_fenced_alone() -> None:
    fences = list(fences_of(attempted(4), votes("aaba", "cc--", "-dd-")))
    assert [fence.group for fence in fences] == [2]
    assert "its parameters before step 7 differ from those of 3 groups" in fences[0].reason


ANEW = Retry(step=7, attempt=9, recompute=True, gather=True)


def test_where_an_owner_has_sent_what_it_does_not_hold_its_hosts_are_right_against_the_majority() -> None:
    assert objection(attempted(5), votes("aabbb", "cc---", "--dd-")) == ANEW


def test_hosts_outweigh_a_majority_that_a_lost_group_may_have_sent_wrong_values() -> None:
    """Group 0 owned partition 0, and is gone without a vote. Group 4 has some wrong value, too."""
    cast = votes("-bbaaa", "-cc---", "---dd-")
    del cast[GroupId(0)]
    assert objection(attempted(6, lost="0"), cast) == ANEW


def test_hosts_that_agree_decide_where_parameters_have_no_majority() -> None:
    assert objection(attempted(4), votes("aabb", "c-c-", "-dd-")) == ANEW


def test_a_partition_with_one_host_is_unconfirmed_and_a_majority_decides() -> None:
    """If the host has changed since it sent them, its state is wrong: the state partition is wiped out."""
    assert groups(attempted(4), votes("abbb", "c---", "-dd-")) == [0]
    entry = objection(attempted(4), votes("aabb", "cc--", "---d"))
    assert isinstance(entry, Halt)
    assert "groups have different parameters: a: groups [0, 1]; b: groups [2, 3]" in entry.reason


def test_nothing_is_compared_while_a_member_lacks_parameters() -> None:
    cast = votes("aab-", "aab-")
    lacking = Vote(is_complete=False, plan_digest="p", lacks_params=True)
    cast[GroupId(3)] = lacking
    assert objection(attempted(4), cast) is None
    assert groups(attempted(4, lost="3"), cast) == [2], "who is lost is not waited for"


def test_a_lost_group_that_was_wrong_still_discards_the_attempt() -> None:
    cast = votes("aaba", "aab-")
    [fence] = fences_of(attempted(4, lost="2"), cast)
    assert fence.group == 2
    assert objection(attempted(4, lost="2", is_discarded=True), cast) is None


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
def test_who_remains_is_more_than_half_of_the_hosts_by_copies_that_were_compared_before(num_hosts: int) -> None:
    """All states and histories of the hosts of a state partition, against the sentence itself."""
    for letters in product("abcABC", repeat=num_hosts):
        cast = votes("p" * (num_hosts + 1), "".join(letters) + "-")
        remaining = set(range(num_hosts)) - set(groups(attempted(num_hosts + 1), cast))
        expected = set(range(num_hosts))
        if len({one.lower() for one in letters}) > 1:
            right = [value for value in "abc" if 2 * letters.count(value) > num_hosts]
            expected = {host for host in expected if letters[host].lower() in right}
        assert remaining == expected, letters


@pytest.mark.parametrize("num_others", [1, 2, 3, 4])
def test_a_copy_is_confirmed_by_more_than_half_of_the_others_whatever_the_rest_publishes(num_others: int) -> None:
    """Against all completions of what is known so far."""
    values = ["a", "b", NO_DIGEST]
    for others in product([*values, None], repeat=num_others):
        choices = [values if other is None else [other] for other in others]
        verdicts = {2 * known.count("a") > num_others for known in product(*choices)}
        assert majority_holds("a", others) == (verdicts.pop() if len(verdicts) == 1 else None), others


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
