"""Which groups hold, send, copy and move partitions of the optimizer state: by hand, and at random."""

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from spare_megatron.core.saves.partition_copies import PartitionCopies
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
    recipients,
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


def returned(group: int) -> Member:
    return Member(GroupId(group), 1)


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
        check_moves(ownership)
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


def check_moves(ownership: Ownership) -> None:
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
        check_moves(ownership)
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


@pytest.mark.parametrize("seed", range(20))
def test_every_host_and_receiver_gets_its_sums_through_any_history_and_the_owner_sends_them(seed: int) -> None:
    random = Random(seed)
    num_groups = random.randint(3, 9)
    owned = first_ownership(
        PartitionSetup(num_groups=num_groups, redundancy=random.randint(2, 3)),
        [Member(GroupId(group)) for group in range(num_groups)],
    )
    for incarnation in range(1, 20):
        assert_all_get_theirs(owned)
        owned = changed(owned, random, incarnation)


def changed(owned: Ownership, random: Random, incarnation: int) -> Ownership:
    """After a loss, a return, or copies that have become whole."""
    absent = sorted(set(range(owned.setup.num_groups)) - {member.group for member in owned.members})
    match random.randrange(3):
        case 0 if len(owned.members) > 2:
            lost = random.choice(owned.members)
            try:
                return owned.for_members(member for member in owned.members if member != lost)
            except StateWipeOut:
                return owned
        case 1 if absent:
            return owned.for_members([*owned.members, Member(GroupId(random.choice(absent)), incarnation)])
        case _:
            copies = [PartitionCopy(copy.partition, copy.receiver) for copy in (*owned.repairs, *owned.moves)]
            return owned.with_copies(random.sample(copies, len(copies) // 2), owned.superseded)


def assert_all_get_theirs(owned: Ownership) -> None:
    found = recipients(owned)
    assert len(found) == len(owned.hosts)
    for number, row in enumerate(found):
        assert row[0] == owned.owners[number].group
        assert list(row[1:]) == sorted(set(row[1:]) - {row[0]})
        for member in owned.members:
            updates = member in owned.hosts[number] or any(
                copy.partition == number and copy.receiver == member for copy in (*owned.repairs, *owned.moves)
            )
            assert (member.group in row) == updates


def test_a_host_of_a_later_attempt_of_a_step_was_a_recipient_of_every_earlier_one() -> None:
    """What kept sums rest on: fences add no host, whichever groups are lost in whatever order."""
    for seed in range(20):
        random = Random(seed)
        members = [Member(GroupId(group)) for group in range(8)]
        owned = first_ownership(PartitionSetup(num_groups=8, redundancy=3), members)
        before = recipients(owned)
        for _ in range(4):
            lost = random.choice(owned.members)
            try:
                owned = owned.for_members(member for member in owned.members if member != lost)
            except StateWipeOut:
                break
            for number, row in enumerate(owned.hosts):
                assert {host.group for host in row} <= set(before[number])


def test_a_copy_asked_for_by_a_fence_begins_with_the_step_after_also_where_its_donor_changes() -> None:
    me, one, other = (Member(GroupId(group)) for group in range(3))
    hosts = ((one, other), (one, other))
    copying = PartitionCopies(me, lambda number: 2)
    old, new = Repair(PartitionId(0), one, me), Repair(PartitionId(1), one, me)
    copying.assign([old], hosts, 0.0, first_step=0)
    copying.assign([old, new], hosts, 1.0, first_step=8)
    assert (copying.first_step(old), copying.first_step(new)) == (0, 8)
    moved = [Repair(number, other, me) for number in (PartitionId(0), PartitionId(1))]
    copying.assign(moved, hosts, 2.0, first_step=9)
    assert [copying.first_step(repair) for repair in moved] == [0, 8]
