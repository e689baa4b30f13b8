"""What the controller decides when the parameters of groups differ."""

import pytest

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import (
    AppendEntry,
    AttemptReduce,
    BuildCommunicator,
    ComputeStep,
    ReadEntry,
    ReadVotes,
    SaveCheckpoint,
)
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart, Retry
from spare_megatron.core.log.events import RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch
from tests.unit.test_controller import fence, fold, halted, make_controller, members

AGAIN = Retry(step=0, attempt=0, recompute=True)


def with_params(digests: str, incomplete: str = "") -> dict[GroupId, Vote]:
    """Votes of groups 0, 1, ..., a letter for the digest of each; - for one that brings none, . for no vote."""
    return {
        GroupId(g): Vote(
            is_complete=str(g) not in incomplete, plan_digest="p", params_digest="" if digest == "-" else digest
        )
        for g, digest in enumerate(digests)
        if digest != "."
    }


def decided(controller: Controller, cast: dict[GroupId, Vote]) -> Entry:
    [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=cast), now_s=0.0)
    assert isinstance(append, AppendEntry)
    assert append.index == controller.head
    return append.entry


def test_a_group_whose_parameters_differ_from_the_majority_is_fenced_and_its_part_of_the_sum_discarded() -> None:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    cast = with_params("aaba")
    entry = decided(controller, cast)
    assert isinstance(entry, Fence)
    assert (entry.group, entry.discard, entry.error) == (2, True, "")
    assert "differ from those of 3 groups" in entry.reason
    build, read_votes, _ = fold(controller, entry)
    assert build == BuildCommunicator(key=0, epoch=1, members=(0, 1, 3))
    assert read_votes == ReadVotes(attempt=0, voters=members(0, 1, 2, 3), num_left=3)
    assert decided(controller, cast) == AGAIN, "though all survivors hold the sum"
    compute, reduce, _ = fold(controller, AGAIN)
    assert isinstance(compute, ComputeStep), "from zero: its part may stand in the sums of some buckets"
    computed = sorted(item for group in (0, 1, 3) for item in compute.plan.work.of(GroupId(group)))
    assert computed == [Microbatch(shard, k) for shard in range(4) for k in range(4)]
    assert compute.into == reduce
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.attempt, reduce.members, reduce.kept) == (1, (0, 1, 3), ())
    assert decided(controller, with_params("aa.a")) == Commit(step=0, attempt=1)


def test_several_groups_that_differ_are_fenced_one_after_the_other() -> None:
    controller = make_controller(num_groups=5, redundancy=5)
    controller.handle(RunStarted(), now_s=0.0)
    cast = with_params("cabaa")
    fenced = []
    while isinstance(entry := decided(controller, cast), Fence):
        fenced.append(entry.group)
        fold(controller, entry)
    assert fenced == [0, 2]
    assert entry == AGAIN


@pytest.mark.parametrize(("digests", "num_groups"), [("aabb", 4), ("ab", 2), ("abc", 3), ("aabc", 4)])
def test_without_a_majority_the_run_halts(digests: str, num_groups: int) -> None:
    controller = make_controller(num_groups=num_groups, redundancy=num_groups)
    controller.handle(RunStarted(), now_s=0.0)
    assert "different parameters: a: groups [0" in halted(controller, with_params(digests))


def test_a_group_that_brings_no_digest_is_not_compared() -> None:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    assert decided(controller, with_params("-aaa")) == Commit(step=0, attempt=0)


def test_a_group_lost_for_another_reason_after_it_voted_still_discards_the_sum_that_it_spoiled() -> None:
    """Its supervisor was faster than the comparison of the votes. All groups hold the sum, with its part in it."""
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    _, read_votes, _ = fold(controller, fence(2))
    assert controller.members == (0, 1, 3)
    assert read_votes == ReadVotes(attempt=0, voters=members(0, 1, 2, 3), num_left=3)
    cast = with_params("aaba")
    entry = decided(controller, cast)
    assert isinstance(entry, Fence)
    assert (entry.group, entry.discard) == (2, True)
    assert fold(controller, entry) == [read_votes, ReadEntry(index=2)]
    assert decided(controller, cast) == AGAIN
    *_, reduce, _ = fold(controller, AGAIN)
    assert isinstance(reduce, AttemptReduce)
    assert reduce.voters == members(0, 1, 3)


def test_what_such_a_group_saved_of_it_is_not_started_from() -> None:
    controller = make_controller(saves=SavePolicy(interval_steps=1))
    controller.handle(RunStarted(), now_s=0.0)
    actions = fold(controller, Commit(step=0, attempt=0, save=True))
    (writer,) = [action.member.group for action in actions if isinstance(action, SaveCheckpoint)]
    fold(controller, fence(writer))
    cast = with_params("".join("b" if group == writer else "a" for group in range(4)))
    entry = decided(controller, cast)
    assert isinstance(entry, Fence)
    assert (entry.group, entry.discard) == (writer, True)
    assert controller._saves.saved == {0, 1}
    fold(controller, entry)
    assert controller._saves.saved == {0}


def test_a_lost_group_counts_in_the_vote_on_the_right_parameters() -> None:
    controller = make_controller(num_groups=3)
    controller.handle(RunStarted(), now_s=0.0)
    fold(controller, fence(0))
    entry = decided(controller, with_params("aab"))
    assert isinstance(entry, Fence)
    assert entry.group == 2


def test_what_was_kept_of_a_step_is_given_up_when_an_attempt_of_it_is_discarded() -> None:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    _, reduce, _ = fold(controller, Retry(step=0, attempt=0, kept=(2,)))[-3:]
    assert isinstance(reduce, AttemptReduce)
    assert reduce.kept == (2,)
    fold(controller, decided(controller, with_params("aaba")))
    entry = decided(controller, with_params("aaba"))
    assert entry == Retry(step=0, attempt=1, recompute=True)
    *_, reduce, _ = fold(controller, entry)
    assert isinstance(reduce, AttemptReduce)
    assert reduce.kept == ()


def test_nothing_is_compared_before_every_survivor_has_voted() -> None:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    assert controller.handle(VotesRead(attempt=0, votes=with_params("ab.a")), now_s=0.0) == ()


def test_a_commit_of_a_discarded_sum_is_refused() -> None:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    fold(controller, Fence(group=GroupId(2), discard=True))
    with pytest.raises(ValueError, match="was discarded, and is committed"):
        fold(controller, Commit(step=0, attempt=0))


def test_what_was_discarded_before_a_restart_is_over_with_it() -> None:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    all_groups = (*members(0, 1, 3), Member(GroupId(2), 1))
    fold(controller, Fence(group=GroupId(2), discard=True), Restart(step=0, members=all_groups))
    assert decided(controller, with_params("aaaa")) == Commit(step=0, attempt=1)
