"""Which groups hold, send and copy partitions of the optimizer state: by hand, and at random against brute force."""

import pickle
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import (
    Hosts,
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


def without(ownership: Ownership, *groups: int) -> Ownership:
    return ownership.for_members(member for member in ownership.members if member.group not in groups)


def copied(ownership: Ownership) -> Ownership:
    """All copies are made."""
    return ownership.with_copies([PartitionCopy(repair.partition, repair.receiver) for repair in ownership.repairs])


def test_at_first_the_hosts_are_those_of_the_placement_and_every_home_is_an_owner() -> None:
    ownership = first_ownership(PartitionSetup(num_groups=7, redundancy=3), members(*range(7)))
    assert ownership.owners == members(*range(7))
    assert ownership.repairs == ()
    for row, placed in zip(ownership.hosts, make_placement("golomb", 7, 3).hosts, strict=True):
        assert row == members(*sorted(placed))


def test_a_lost_group_leaves_its_partitions_to_the_other_hosts_and_every_missing_copy_to_repair() -> None:
    before = first_ownership(PartitionSetup(num_groups=4, redundancy=2), members(*range(4)))
    gone = hosted_by(before.hosts, Member(GroupId(1)))
    after = without(before, 1)
    assert hosted_by(after.hosts, Member(GroupId(1))) == ()
    assert [repair.partition for repair in after.repairs] == sorted(gone)
    for repair in after.repairs:
        assert after.hosts[repair.partition] == (repair.donor,)
        assert repair.receiver in members(0, 2, 3)
    assert len({repair.receiver for repair in after.repairs}) == 2
    kept = [index for index in range(4) if before.owners[index] != Member(GroupId(1))]
    assert [after.owners[index] for index in kept] == [before.owners[index] for index in kept]


def test_a_finished_copy_makes_a_host_and_only_if_a_repair_asked_for_it() -> None:
    broken = without(first_ownership(PartitionSetup(num_groups=4, redundancy=2), members(*range(4))), 1)
    first, second = broken.repairs
    stranger = PartitionCopy(first.partition, *(set(members(0, 2, 3)) - {first.donor, first.receiver}))
    done = broken.with_copies([PartitionCopy(first.partition, first.receiver), stranger])
    assert done.hosts[first.partition] == tuple(sorted((first.donor, first.receiver)))
    assert done.repairs == (second,)
    assert copied(done).repairs == ()


def test_a_repair_goes_on_from_another_host_when_its_donor_is_lost() -> None:
    whole = first_ownership(PartitionSetup(num_groups=7, redundancy=3), members(*range(7)))
    broken = without(whole, 0)
    repair = next(repair for repair in broken.repairs if repair.receiver.group != 0)
    other = next(host for host in broken.hosts[repair.partition] if host != repair.donor)
    after = without(broken, repair.donor.group)
    again = [
        other for other in after.repairs if (other.partition, other.receiver) == (repair.partition, repair.receiver)
    ]
    assert again == [Repair(repair.partition, other, repair.receiver)]


def test_copies_are_made_by_as_many_groups_as_there_are_rather_than_by_one_that_holds_nothing() -> None:
    whole = first_ownership(PartitionSetup(num_groups=7, redundancy=3), members(*range(7)))
    returned = copied(without(whole, 0)).for_members((*members(*range(1, 7)), Member(GroupId(0), 1)))
    after = without(returned, 3)
    assert len({repair.receiver for repair in after.repairs}) == min(len(after.repairs), 6)
    assert Member(GroupId(0), 1) in {repair.receiver for repair in after.repairs}


def test_the_most_endangered_partitions_are_copied_first() -> None:
    whole = first_ownership(PartitionSetup(num_groups=7, redundancy=3), members(*range(7)))
    broken = without(whole, 0, 1)
    num_left = [len(broken.hosts[repair.partition]) for repair in broken.repairs]
    assert num_left == sorted(num_left)
    assert num_left[0] < num_left[-1]


def test_a_partition_without_a_host_is_a_wipe_out_that_names_it() -> None:
    whole = first_ownership(PartitionSetup(num_groups=4, redundancy=2), members(*range(4)))
    with pytest.raises(StateWipeOut, match=r"^no surviving host for partitions 1$") as caught:
        without(whole, *(host.group for host in whole.hosts[1]))
    assert caught.value.partitions == (1,)
    assert pickle.loads(pickle.dumps(caught.value)).partitions == (1,)
    repaired = copied(without(whole, whole.hosts[1][0].group))
    assert without(repaired, whole.hosts[1][1].group).hosts[1]


def test_a_group_that_rejoins_has_no_partitions_and_gets_what_is_missing() -> None:
    pair = first_ownership(PartitionSetup(num_groups=2, redundancy=2), members(0, 1))
    alone = without(pair, 1)
    assert alone.repairs == ()  # no group is there to take a copy
    back = alone.for_members((Member(GroupId(0)), Member(GroupId(1), 1)))
    assert hosted_by(back.hosts, Member(GroupId(1), 1)) == ()
    assert back.repairs == tuple(
        Repair(PartitionId(index), Member(GroupId(0)), Member(GroupId(1), 1)) for index in range(2)
    )


def test_after_a_restart_without_some_groups_others_replace_them() -> None:
    ownership = first_ownership(PartitionSetup(num_groups=7, redundancy=2), members(0, 1, 2, 4, 5))
    assert {len(row) for row in ownership.hosts} == {2}
    assert ownership.repairs == ()
    load = Counter(host for row in ownership.hosts for host in row)
    assert max(load.values()) - min(load.values()) <= 1


def test_copies_avoid_the_domains_of_the_other_hosts() -> None:
    partitioning = PartitionSetup(num_groups=9, redundancy=2, groups_per_domain=3)
    for lost in range(9):
        ownership = copied(without(first_ownership(partitioning, members(*range(9))), lost))
        assert all(len({host.group // 3 for host in row}) == 2 for row in ownership.hosts)


def fewest_owned(hosts: Hosts) -> int:
    """The least possible number of partitions that one host owns at most, as an integer program."""
    able = sorted({host for row in hosts for host in row})
    pairs = [(index, host) for index, row in enumerate(hosts) for host in row]
    cost = [0.0] * len(pairs) + [1.0]
    one_owner = [[float(index == of) for of, _ in pairs] + [0.0] for index in range(len(hosts))]
    at_most = [[float(host == of) for _, of in pairs] + [-1.0] for host in able]
    found = milp(
        cost,
        constraints=[LinearConstraint(one_owner, 1, 1), LinearConstraint(at_most, ub=0)],
        integrality=[1] * len(cost),
        bounds=Bounds(0, len(hosts)),
    )
    assert found.success
    return round(found.fun)


@given(
    num_groups=st.integers(2, 8),
    redundancy=st.integers(1, 3),
    groups_per_domain=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(("lose", "copy", "return")), st.integers(0, 20)), max_size=12),
)
@settings(max_examples=50)
def test_random_histories(
    num_groups: int, redundancy: int, groups_per_domain: int, moves: list[tuple[str, int]]
) -> None:
    partitioning = PartitionSetup(
        num_groups=num_groups, redundancy=min(redundancy, num_groups), groups_per_domain=groups_per_domain
    )
    ownership = first_ownership(partitioning, members(*range(num_groups)))
    held = [set(row) for row in ownership.hosts]
    for number, (move, which) in enumerate(moves, start=1):
        if move == "lose" and len(ownership.members) > 1:
            lost = ownership.members[which % len(ownership.members)]
            held = [row - {lost} for row in held]
            left = [member for member in ownership.members if member != lost]
            if not all(held):
                with pytest.raises(StateWipeOut):
                    ownership.for_members(left)
                return
            ownership = ownership.for_members(left)
        elif move == "copy" and ownership.repairs:
            repair = ownership.repairs[which % len(ownership.repairs)]
            held[repair.partition].add(repair.receiver)
            ownership = ownership.with_copies([PartitionCopy(repair.partition, repair.receiver)])
        elif move == "return":
            absent = sorted(set(range(num_groups)) - {member.group for member in ownership.members})
            if absent:
                back = Member(GroupId(absent[which % len(absent)]), number)
                ownership = ownership.for_members((*ownership.members, back))
        assert [set(row) for row in ownership.hosts] == held
        check(ownership)


def check(ownership: Ownership) -> None:
    num_wanted = min(ownership.setup.redundancy, len(ownership.members))
    for index, row in enumerate(ownership.hosts):
        receivers = {repair.receiver for repair in ownership.repairs if repair.partition == index}
        assert len(receivers) == sum(repair.partition == index for repair in ownership.repairs)
        assert not receivers & set(row)
        assert receivers <= set(ownership.members)
        assert len(row) + len(receivers) == max(num_wanted, len(row))
        assert ownership.owners[index] in row
    assert all(repair.donor in ownership.hosts[repair.partition] for repair in ownership.repairs)
    assert max(Counter(ownership.owners).values()) == fewest_owned(ownership.hosts)


def test_any_two_partitions_share_at_most_one_host_where_that_is_possible() -> None:
    ownership = first_ownership(PartitionSetup(num_groups=13, redundancy=3), members(*range(13)))
    assert all(len(set(one) & set(two)) <= 1 for one, two in combinations(ownership.hosts, 2))
