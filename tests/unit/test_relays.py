"""Who votes by way of whom, and what a relay accepts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.core.log.entries import Fence, Retry
from spare_megatron.core.log.relays import Blocks, BlockVotes
from spare_megatron.stacking.layout import GroupId, Member


def members(*groups: int) -> tuple[Member, ...]:
    return tuple(Member(GroupId(group)) for group in groups)


def test_consecutive_groups_vote_by_way_of_the_first_of_them() -> None:
    blocks = Blocks(members(0, 1, 2, 3, 4, 5, 6), 3)
    assert blocks.relays == members(0, 3, 6)
    assert [blocks.relay_of(voter).group for voter in members(0, 1, 2, 3, 4, 5, 6)] == [0, 0, 0, 3, 3, 3, 6]
    assert blocks.block_of(*members(3)) == members(3, 4, 5)


def test_up_to_the_fan_in_every_group_votes_directly() -> None:
    assert Blocks(members(0, 1, 2), 3).relays == members(0, 1, 2)
    assert Blocks(members(0, 1, 2, 3), 3).relays == members(0, 3)
    assert Blocks(members(4, 5), 3).relays == members(4, 5)  # who is left of one block
    assert Blocks(members(0, 1, 2, 3), 1).relays == members(0, 1, 2, 3)


def test_the_next_one_takes_the_place_of_a_lost_relay_and_other_blocks_stay() -> None:
    blocks = Blocks(members(1, 2, 3, 4, 5), 3)
    assert blocks.block_of(*members(1)) == members(1, 2)
    assert blocks.block_of(*members(3)) == members(3, 4, 5)


def test_a_new_incarnation_votes_in_the_block_of_its_group() -> None:
    voters = (*members(0, 1), Member(GroupId(2), 4), *members(3))
    blocks = Blocks(voters, 2)
    assert blocks.relay_of(voters[3]) == voters[2]
    assert blocks.block_of(voters[2]) == voters[2:]


@given(groups=st.sets(st.integers(0, 100), min_size=1), fan_in=st.integers(1, 40))
def test_every_voter_is_in_the_block_of_its_relay_and_in_no_other(groups: set[int], fan_in: int) -> None:
    voters = members(*sorted(groups))
    blocks = Blocks(voters, fan_in)
    found = [voter for relay in blocks.relays for voter in blocks.block_of(relay)]
    assert sorted(found) == sorted(voters)
    for relay in blocks.relays:
        assert 1 <= len(blocks.block_of(relay)) <= fan_in
        assert blocks.relay_of(relay) == relay
        assert all(blocks.relay_of(voter) == relay for voter in blocks.block_of(relay))


@given(groups=st.sets(st.integers(0, 100), min_size=2), fan_in=st.integers(1, 40), data=st.data())
def test_a_loss_changes_no_block_but_its_own(groups: set[int], fan_in: int, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(sorted(groups)))
    before = Blocks(members(*sorted(groups)), fan_in)
    left = members(*sorted(groups - {lost}))
    after = Blocks(left, fan_in)
    if len({voter.group // fan_in for voter in left}) == 1:
        assert after.relays == left
        return
    for voter in left:
        if before.relay_of(voter) != before.relay_of(*members(lost)):
            assert after.relay_of(voter) == before.relay_of(voter)


@pytest.mark.parametrize(
    ("attempt", "voter"),
    [
        (6, Member(GroupId(1))),  # an attempt that is over
        (8, Member(GroupId(1))),
        (7, Member(GroupId(1), 1)),  # another incarnation
        (7, Member(GroupId(3))),  # another block
    ],
)
def test_a_relay_takes_no_vote_on_another_attempt_or_of_another_group(attempt: int, voter: Member) -> None:
    votes = BlockVotes(7, members(0, 1, 2), *members(0), "mine")
    assert not votes.add_vote(attempt, voter, "yes")
    assert votes.votes == {Member(GroupId(0)): "mine"}
    assert votes.missing == set(members(1, 2))


def test_a_vote_that_is_reported_twice_is_one_vote() -> None:
    votes = BlockVotes(7, members(0, 1), *members(0), "mine")
    assert votes.add_vote(7, *members(1), "first")
    assert votes.add_vote(7, *members(1), "second")
    assert votes.votes == dict(zip(members(0, 1), ("mine", "first"), strict=True))
    assert not votes.missing


def test_a_loss_costs_a_block_only_the_vote_of_the_lost_one_and_another_entry_ends_the_wait() -> None:
    back = Member(GroupId(2), 1)
    votes = BlockVotes(7, (*members(0, 1), back), *members(0), "mine")
    assert not votes.fold(Fence(group=GroupId(9), reason="killed"))
    assert not votes.fold(Fence(group=GroupId(2), reason="of its first incarnation"))
    assert votes.missing == {*members(1), back}
    assert not votes.fold(Fence(group=GroupId(2), incarnation=1, reason="killed"))
    assert votes.missing == set(members(1))
    assert votes.fold(Fence(group=GroupId(0), reason="the relay is"))
    assert votes.fold(Retry(step=3, attempt=7))
