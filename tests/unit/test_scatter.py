"""Which groups get the sums of a partition's gradients, against the log's hosts and copies in random histories."""

from random import Random

import pytest

from spare_megatron.core.saves.partition_copies import PartitionCopies
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import (
    Ownership,
    PartitionCopy,
    PartitionSetup,
    Repair,
    StateWipeOut,
    first_ownership,
    recipients,
)


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
