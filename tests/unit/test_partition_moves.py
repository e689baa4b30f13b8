"""StatePartitions that move to who holds the fewest: drawn by hand, and in random histories."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import (
    Ownership,
    PartitionCopy,
    PartitionSetup,
    Repair,
    StateWipeOut,
    first_ownership,
    hosted_by,
)


def members(*groups: int) -> tuple[Member, ...]:
    return tuple(Member(GroupId(group)) for group in groups)


def returned(group: int) -> Member:
    return Member(GroupId(group), 1)


def without(ownership: Ownership, *groups: int) -> Ownership:
    return ownership.for_members(member for member in ownership.members if member.group not in groups)


def committed(ownership: Ownership, *made: Repair) -> Ownership:
    """After a commit that has these copies."""
    return ownership.with_copies([PartitionCopy(copy.partition, copy.receiver) for copy in made], ownership.superseded)


def settled(ownership: Ownership) -> Ownership:
    """After commits that have all copies."""
    while ownership.repairs or ownership.moves:
        ownership = committed(ownership, *ownership.repairs, *pending(ownership))
    return ownership


def pending(ownership: Ownership) -> list[Repair]:
    return [move for move in ownership.moves if move.receiver not in ownership.hosts[move.partition]]


def held(ownership: Ownership) -> dict[int, int]:
    return {int(member.group): len(hosted_by(ownership.hosts, member)) for member in ownership.members}


def whole(num_groups: int, redundancy: int, groups_per_domain: int = 1) -> Ownership:
    partitioning = PartitionSetup(num_groups=num_groups, redundancy=redundancy, groups_per_domain=groups_per_domain)
    return first_ownership(partitioning, members(*range(num_groups)))


def back(ownership: Ownership, *groups: int) -> Ownership:
    return ownership.for_members((*ownership.members, *map(returned, groups)))


@pytest.mark.parametrize(("num_groups", "redundancy"), [(4, 2), (7, 3), (40, 2), (61, 3)])
def test_a_group_that_rejoins_gets_the_partitions_that_the_placement_gives_it(num_groups: int, redundancy: int) -> None:
    first = whole(num_groups, redundancy)
    repaired = settled(without(first, 1))
    assert max(held(repaired).values()) == redundancy + 1
    after = back(repaired, 1)
    assert after.repairs == ()
    assert {move.receiver for move in after.moves} == {returned(1)}
    even = settled(after)
    assert set(held(even).values()) == {redundancy}
    groups = [[host.group for host in row] for row in even.hosts]
    assert groups == [[host.group for host in row] for row in first.hosts]


def test_a_donor_lets_go_with_the_commit_after_the_one_that_has_the_copy() -> None:
    after = back(settled(without(whole(4, 2), 1)), 1)
    first, second = after.moves
    assert first.donor in after.hosts[first.partition]
    assert first.receiver not in after.hosts[first.partition]
    assert after.superseded == ()
    made = committed(after, first)
    assert set(made.hosts[first.partition]) == {*after.hosts[first.partition], first.receiver}
    assert made.moves == (first, second)
    assert made.superseded == (PartitionCopy(first.partition, first.donor),)
    done = committed(made)
    assert set(done.hosts[first.partition]) == {*after.hosts[first.partition], first.receiver} - {first.donor}
    assert done.moves == (second,)


def test_nothing_moves_while_a_copy_is_missing() -> None:
    broken = back(settled(without(whole(7, 2), 1)), 1)
    assert len(broken.moves) == 2
    lost = without(broken, next(group for group in range(2, 7) if Member(GroupId(group)) not in broken.moves[0]))
    assert lost.repairs
    assert lost.moves == ()
    assert settled(lost).repairs == ()


def test_a_move_becomes_a_repair_when_the_partition_loses_a_host() -> None:
    """From the same donor, so that what has come of it stays."""
    after = back(settled(without(whole(7, 3), 1)), 1)
    move = after.moves[0]
    other = next(host for host in after.hosts[move.partition] if host != move.donor)
    lost = without(after, other.group)
    assert move in lost.repairs
    assert lost.moves == ()
    donor_lost = without(after, move.donor.group)
    assert (move.partition, move.receiver) in {(repair.partition, repair.receiver) for repair in donor_lost.repairs}


def test_no_host_releases_its_copy_when_another_host_is_lost_before() -> None:
    after = back(settled(without(whole(7, 3), 1)), 1)
    move = after.moves[0]
    made = committed(after, move)
    other = next(host for host in made.hosts[move.partition] if host not in move)
    lost = without(made, other.group)
    assert lost.superseded == ()
    assert set(lost.hosts[move.partition]) == set(made.hosts[move.partition]) - {other}
    assert move.partition not in {repair.partition for repair in lost.repairs}


def test_a_move_releases_its_old_copy_though_copies_of_other_partitions_are_missing() -> None:
    after = back(settled(without(whole(7, 2), 1)), 1)
    move = after.moves[0]
    made = committed(after, move)
    lost = next(
        member for member in made.members if member not in made.hosts[move.partition] and member.incarnation == 0
    )
    broken = without(made, lost.group)
    assert broken.repairs
    assert broken.superseded == (PartitionCopy(move.partition, move.donor),)
    assert len(committed(broken).hosts[move.partition]) == 2


def test_a_group_that_comes_back_and_is_lost_leaves_the_others_as_they_were() -> None:
    repaired = settled(without(whole(7, 2), 1))
    after = back(repaired, 1)
    assert after.moves
    again = without(after, 1)
    assert (again.hosts, again.repairs, again.moves) == (repaired.hosts, (), ())


@pytest.mark.parametrize("groups_per_domain", [1, 2])
def test_a_drain_that_is_cancelled_leaves_no_partition_more_hosts_than_wanted(groups_per_domain: int) -> None:
    """Copies for the member that was to leave were kept beside its own, until a host was lost."""
    at_first = whole(6, 3, groups_per_domain)
    leaving = at_first.with_copies((), (), members(2))
    handed_over = leaving.with_copies(
        [PartitionCopy(copy.partition, copy.receiver) for copy in leaving.repairs], (), members(2)
    )
    assert [len(row) for row in handed_over.hosts].count(4) == 3
    stays = handed_over.with_copies(())
    assert stays.hosts == handed_over.hosts, "none is released before the copies are compared"
    assert {move.partition for move in stays.moves} >= set(hosted_by(handed_over.hosts, members(2)[0]))
    end = settled(stays)
    assert {len(row) for row in end.hosts} == {3}
    assert max(held(end).values()) - min(held(end).values()) <= 1
    num_domains = [len(end.setup.domains_of(row)) for row in end.hosts]
    assert num_domains == [len(at_first.setup.domains_of(row)) for row in at_first.hosts]


def test_moves_avoid_the_domains_of_the_other_hosts() -> None:
    for lost in range(9):
        even = settled(back(settled(without(whole(9, 2, 3), lost)), lost))
        assert all(len({host.group // 3 for host in row}) == 2 for row in even.hosts)
        assert max(held(even).values()) - min(held(even).values()) <= 1


def test_after_the_loss_and_return_of_a_domain_no_two_hosts_of_a_partition_share_one() -> None:
    for first in (0, 4, 8):
        domain = range(first, first + 4)
        lost = settled(without(whole(12, 2, 4), *domain))
        even = settled(back(lost, *domain))
        assert all(len({host.group // 4 for host in row}) == 2 for row in even.hosts)
        assert set(held(even).values()) == {2}


def test_after_a_restart_with_few_groups_nothing_is_left_to_move() -> None:
    partitioning = PartitionSetup(num_groups=7, redundancy=2)
    for lost in range(6):
        ownership = settled(first_ownership(partitioning, members(*range(lost, 7))))
        assert max(held(ownership).values()) - min(held(ownership).values()) <= 1


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("lose", "copy", "copy all", "return")), st.integers(0, 50)), max_size=25
)


@given(
    num_groups=st.integers(2, 9),
    redundancy=st.integers(1, 4),
    groups_per_domain=st.integers(1, 3),
    operations=OPERATIONS,
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_random_histories_end_evenly_and_never_with_fewer_hosts_than_there_can_be(
    num_groups: int, redundancy: int, groups_per_domain: int, operations: list[tuple[str, int]], seed: int
) -> None:
    ownership = whole(num_groups, min(redundancy, num_groups), groups_per_domain)
    for incarnation, (operation, which) in enumerate(operations, start=1):
        absent = sorted(set(range(num_groups)) - {member.group for member in ownership.members})
        made = [*ownership.repairs, *pending(ownership)]
        if operation == "lose" and len(ownership.members) > 1:
            lost = ownership.members[which % len(ownership.members)]
            try:
                ownership = without(ownership, lost.group)
            except StateWipeOut:
                return
        elif operation == "return" and absent:
            member = Member(GroupId(absent[which % len(absent)]), incarnation)
            ownership = ownership.for_members((member, *reversed(ownership.members)))
        elif operation.startswith("copy") and (made or ownership.superseded):
            ownership = step(ownership, made if operation == "copy all" else made[which % (len(made) + 1) :][:1])
        check(ownership)
    ends_evenly(ownership, Random(seed))


def step(ownership: Ownership, made: list[Repair]) -> Ownership:
    """A commit with these copies. A copy counts as soon as it is there, and one that moves makes it more even."""
    after = committed(ownership, *made)
    assert ownership.repairs or (unevenness(after) < unevenness(ownership) if made else True)
    return after


def unevenness(ownership: Ownership) -> tuple[int, int]:
    """Squares of what members hold, hosts that share domains; both without copies that are about to be released."""
    count = Counter(held(ownership))
    count.subtract(copy.member.group for copy in ownership.superseded)
    rows = [set(row) for row in ownership.hosts]
    for copy in ownership.superseded:
        rows[copy.partition].remove(copy.member)
    num_crowded = sum(len(row) - num_domains(ownership, row) for row in rows)
    return sum(number**2 for number in count.values()), num_crowded


def check(ownership: Ownership) -> None:
    num_wanted = min(ownership.setup.redundancy, len(ownership.members))
    superseded = {copy.partition: copy.member for copy in ownership.superseded}
    for index, row in enumerate(ownership.hosts):
        missing = [repair for repair in ownership.repairs if repair.partition == index]
        assert len(row) + len(missing) == num_wanted + (index in superseded)
        assert ownership.owners[index] in row
        assert superseded.get(PartitionId(index), row[0]) in row
    coming = pending(ownership)
    assert not (coming and ownership.repairs)
    assert len({move.partition for move in ownership.moves}) == len(ownership.moves)
    assert not {move.donor for move in ownership.moves} & {move.receiver for move in ownership.moves}
    for move in coming:
        row = ownership.hosts[move.partition]
        assert move.donor in row
        assert move.receiver in set(ownership.members) - set(row)
        assert num_domains(ownership, {*row, move.receiver} - {move.donor}) >= num_domains(ownership, row)


def num_domains(ownership: Ownership, hosts: set[Member] | tuple[Member, ...]) -> int:
    return len({host.group // ownership.setup.groups_per_domain for host in hosts})


def ends_evenly(ownership: Ownership, random: Random) -> None:
    """Copies are completed in any order, some of them at once."""
    while ownership.repairs or ownership.moves:
        made = [*ownership.repairs, *pending(ownership)]
        ownership = step(ownership, random.sample(made, random.randint(min(1, len(made)), len(made))))
        check(ownership)
    count = held(ownership)
    if ownership.setup.groups_per_domain == 1:
        assert max(count.values()) - min(count.values()) <= 1
    for giver, taker in product(ownership.members, repeat=2):
        for num_more in movable(ownership, giver, taker):
            assert count[giver.group] - count[taker.group] < (1 if num_more else 2)


def movable(ownership: Ownership, giver: Member, taker: Member) -> Iterator[int]:
    """How many more domains the hosts of partitions would span if these moved from one to the other, if any."""
    for row in ownership.hosts:
        num_more = num_domains(ownership, {*row, taker} - {giver}) - num_domains(ownership, row)
        if giver in row and taker not in row and num_more >= 0:
            yield num_more
