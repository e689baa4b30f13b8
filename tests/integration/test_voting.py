"""Whole attempts of leaders that vote by way of relays over real sockets, all in one thread."""

from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.core.log.actions import ReadVotes
from spare_megatron.core.log.entries import Commit, Entry, Fence, encode_entry
from spare_megatron.core.log.votes import Vote
from spare_megatron.formats.frames import Address
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import StoreTimeout
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.relay_link import RelayLink
from spare_megatron.voting.vote_relay import VoteRelay
from spare_megatron.voting.voting import RelayParts, Voting
from tests.memory_store import MemoryStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

LONG_S = 50.0
"""A wait of this length is a failure."""
SHORT_S = 0.05
"""Nothing is to come in this time."""


class Leader:
    """One leader with its store connection."""

    def __init__(
        self, member: Member, data: dict[str, Any], addresses: dict[Member, Address], collect_s: float
    ) -> None:
        self.member, self.store = member, MemoryStore(data)
        log = DecisionLog(self.store)  # type: ignore[arg-type]
        alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.agreement = GroupAgreement(member, alone, log, LONG_S, fan_in=2, num_positions=1)  # type: ignore[arg-type]
        relay = VoteRelay("127.0.0.1", 2)
        addresses[member] = relay.address
        link = RelayLink(member, addresses.get, LONG_S)
        self.parts = RelayParts(relay=relay, link=link, collect_s=collect_s)
        self.head, write = 0, lambda _: None
        self.voting = Voting(self.agreement, self.parts, head=lambda: self.head, write=write, probe=SilentProbe())

    def read_entry(self, index: int) -> Any:
        entry = self.voting.read_entry(index)
        self.head = index + 1
        return entry

    def vote(self, attempt: int, *, is_complete: bool = True) -> Any:
        return self.voting.vote(attempt, Vote(is_complete=is_complete, plan_digest="p"), VOTERS)

    def read_votes(self, num_left: int = 0) -> set[GroupId] | None:
        found = self.voting.read_votes(ReadVotes(attempt=0, voters=VOTERS, num_left=num_left))
        return set(found[0].votes) if found else None


VOTERS = tuple(Member(GroupId(group)) for group in range(4))


def leaders(collect_s: float = LONG_S) -> tuple[list[Leader], dict[str, Any]]:
    data: dict[str, Any] = {}
    addresses: dict[Member, Address] = {}
    return [Leader(member, data, addresses, collect_s) for member in VOTERS], data


def test_a_round_costs_the_store_a_few_operations_for_each_block_and_none_for_others() -> None:
    all_leaders, data = leaders()
    for attempt in range(4):
        assert all_leaders[1].vote(attempt) is None
        assert all_leaders[3].vote(attempt) is None
        assert all_leaders[0].vote(attempt) is None
        all_votes = all_leaders[2].vote(attempt)
        assert set(all_votes.votes) == {voter.group for voter in VOTERS}
        assert all(leader.voting.confirm() is None for leader in (all_leaders[0], all_leaders[2]))
        entry = Commit(step=attempt, attempt=attempt)
        all_leaders[2].agreement.append(attempt, entry)
        for leader in (all_leaders[0], all_leaders[2], all_leaders[1], all_leaders[3]):
            assert leader.voting.confirm() is None
            assert leader.read_entry(attempt) == entry
    assert [leader.store.num_casts for leader in all_leaders] == [4, 0, 4, 0]
    # The leader that appends the entry does not ask for it, and those that vote by way of a relay get it there.
    assert [leader.store.num_waits for leader in all_leaders] == [4, 0, 0, 0]
    # Of the attempts before the last two nothing is left.
    assert {key.split("/")[1] for key in data if key.startswith("vote")} == {"2", "3"}


def test_a_vote_whose_relay_dies_with_it_is_cast_directly() -> None:
    all_leaders, _ = leaders(SHORT_S)
    for number in (1, 3, 0):
        assert all_leaders[number].vote(0) is None
    all_leaders[2].parts.relay.close()
    assert all_leaders[3].voting.confirm() is None  # one vote is missing
    assert all_leaders[3].store.num_casts == 1
    assert all_leaders[0].read_votes() == {0, 1, 3}


def test_a_leader_that_votes_again_after_its_relay_died_decides_in_its_place() -> None:
    all_leaders, data = leaders()
    for number in (1, 3, 0):
        assert all_leaders[number].vote(0) is None
    assert all_leaders[2].vote(0) is not None
    all_leaders[2].parts.relay.close()  # it has the votes, and dies before it decides
    found = all_leaders[3].voting.confirm()
    assert found is not None
    assert set(found.votes) == {0, 1, 2, 3}
    assert data["votes/0"] == 5  # one of them twice


def after_fences(*lost: int) -> tuple[list[Leader], dict[str, Any]]:
    """Groups 0 and 1, the first of which is the relay of both, have voted, and read what fences these one by one."""
    all_leaders, data = leaders(SHORT_S)
    assert all_leaders[1].vote(0) is None
    assert all_leaders[0].vote(0) is None
    for index, group in enumerate(lost):
        data[keys.entry(index)] = encode_entry(Fence(group=GroupId(group), reason="killed"))
        for leader in all_leaders[:2]:
            assert leader.voting.confirm() is None
            assert leader.read_entry(index).group == group
    return all_leaders, data


def test_after_a_loss_the_relay_reads_the_votes_for_its_block() -> None:
    """Each of 10,000 groups read what hundreds of relays had written."""
    all_leaders, _ = after_fences(3)
    assert all_leaders[1].read_votes() is None
    assert all_leaders[1].store.num_reads == 0
    assert all_leaders[0].read_votes() == {0, 1}


def test_a_leader_that_left_its_vote_to_a_lost_relay_reads_the_votes_itself() -> None:
    """All who have cast votes may be lost: no other group would decide."""
    all_leaders, _ = after_fences(3, 0)
    assert all_leaders[1].store.num_casts == 0
    assert all_leaders[1].read_votes() == {0, 1}


def test_after_a_loss_no_leader_reads_votes_before_all_who_are_left_may_have_voted() -> None:
    """Of thousands of votes that are not cast yet each would be looked for."""
    all_leaders, _ = after_fences(3)
    assert all_leaders[0].read_votes(num_left=3) is None
    assert all_leaders[0].store.num_reads == 0
    assert all_leaders[2].vote(0) is None
    assert all_leaders[0].read_votes(num_left=3) == {0, 1, 2}


def test_after_a_loss_who_has_cast_its_vote_itself_reads_the_votes() -> None:
    all_leaders, data = leaders(SHORT_S)
    for number in (1, 3, 0):
        assert all_leaders[number].vote(0) is None
    all_leaders[2].parts.relay.close()
    assert all_leaders[3].voting.confirm() is None
    data[keys.entry(0)] = encode_entry(Fence(group=GroupId(2), reason="killed"))
    all_leaders[3].read_entry(0)
    assert all_leaders[3].read_votes() == {0, 1, 3}


def test_a_group_that_has_not_voted_in_time_is_fenced_and_not_those_that_wait_for_it() -> None:
    """All groups that waited were lost for one that hung."""
    all_leaders, data = leaders(SHORT_S)
    for number in (1, 3, 0):
        assert all_leaders[number].vote(0) is None
    all_leaders[2].parts.relay.close()
    assert all_leaders[3].voting.confirm() is None
    fence = all_leaders[0].read_entry(0)
    assert isinstance(fence, Fence)
    assert fence.group == 2
    assert fence.reason == f"it has not voted on attempt 0: {keys.entry(0)} was not written within 50 s"
    assert all_leaders[3].read_entry(0) == fence
    assert [key for key in data if key.startswith("log/")] == [keys.entry(0)]
    with pytest.raises(StoreTimeout):
        all_leaders[0].read_entry(1)  # group 2 is out, and no other group is to blame


def test_a_decision_that_is_missing_although_all_have_voted_fences_no_other_group() -> None:
    all_leaders, data = leaders()
    for number in (1, 3, 0, 2):
        all_leaders[number].vote(0)
    with pytest.raises(StoreTimeout):
        all_leaders[0].read_entry(0)
    assert keys.entry(0) not in data


def test_votes_for_less_than_the_whole_sum_cost_no_more() -> None:
    all_leaders, _ = leaders()
    assert [all_leaders[number].vote(0, is_complete=False) for number in (1, 3, 0)] == [None, None, None]
    all_votes = all_leaders[2].vote(0, is_complete=False)
    assert set(all_votes.votes) == {voter.group for voter in VOTERS}
    assert [leader.store.num_casts for leader in all_leaders] == [1, 0, 1, 0]


def one_commit_later() -> tuple[list[Leader], dict[str, Any]]:
    """Groups 0 and 1, the first of which is the relay of both, have read a commit."""
    all_leaders, data = leaders()
    for leader in all_leaders[1], all_leaders[0]:
        assert leader.vote(0) is None
    data[keys.entry(0)] = encode_entry(Commit(step=0, attempt=0))
    assert all_leaders[0].read_entry(0) == all_leaders[1].read_entry(0)
    return all_leaders, data


def test_a_relay_that_learns_of_a_loss_waits_for_its_block_which_finds_out_by_itself() -> None:
    """Most of thousands of groups voted directly after a loss."""
    all_leaders, data = one_commit_later()
    data[keys.entry(1)] = encode_entry(Fence(group=GroupId(3), reason="killed"))
    store, has_looked = all_leaders[0].store, []

    def look(key: str) -> bool:
        has_looked.append(key)
        if len(has_looked) == 2:  # it has read the fence, and there is nothing after that
            assert all_leaders[1].vote(1, is_complete=False) is None
        return key in data

    store.exists = look  # type: ignore[method-assign]
    assert all_leaders[0].vote(1, is_complete=False) is None
    assert has_looked == [keys.entry(1), keys.entry(2)]
    assert [leader.store.num_casts for leader in all_leaders[:2]] == [2, 0]
    for leader in all_leaders[0], all_leaders[1]:
        assert leader.voting.confirm() is None
        assert isinstance(leader.read_entry(1), Fence)
    assert all_leaders[1].store.num_waits == 0


@pytest.mark.parametrize(
    "entry",
    [
        Fence(group=GroupId(1), reason="killed"),
        Fence(group=GroupId(0), reason="killed"),
        Commit(step=1, attempt=1),
    ],
    ids=["it is lost", "the relay is", "the attempt is decided"],
)
def test_a_relay_does_not_wait_for_a_vote_of_which_the_log_says_that_it_will_not_come_or_is_not_needed(
    entry: Entry,
) -> None:
    all_leaders, data = one_commit_later()
    data[keys.entry(1)] = encode_entry(entry)
    assert all_leaders[0].vote(1, is_complete=False) is None
    assert all_leaders[0].store.num_casts == 2
