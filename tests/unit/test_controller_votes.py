"""What the controller decides on votes that differ: parameters, other state, sums, and the buckets that groups hold."""

import pytest

from spare_megatron.core.controller.controller import MAX_RETRIES_WITHOUT_LOSS, Controller
from spare_megatron.core.log.actions import (
    AppendEntry,
    AttemptReduce,
    BuildCommunicator,
    ComputePatch,
    ComputeStep,
    ReadEntry,
    ReadVotes,
    SaveCheckpoint,
    StopHalted,
)
from spare_megatron.core.log.entries import Commit, Entry, Fence, Finish, Restart, Retry
from spare_megatron.core.log.events import RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import PartitionSetup
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


Cast = dict[GroupId, Vote]


def with_state(digests: str, **donors: int) -> Cast:
    """Votes of groups 0, 1, ..., a letter for each digest, . for no vote; `g1=0`: group 1 has it from group 0."""
    return {
        GroupId(group): Vote(
            is_complete=True,
            plan_digest="p",
            params_digest="same",
            state_digest=digest,
            copied_from=None if f"g{group}" not in donors else GroupId(donors[f"g{group}"]),
        )
        for group, digest in enumerate(digests)
        if digest != "."
    }


def begun_with(num_groups: int) -> Controller:
    controller = make_controller(num_groups=num_groups, redundancy=num_groups)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def fences_of(controller: Controller, cast: Cast) -> tuple[list[int], Entry]:
    """Groups fenced for wrong state, and the entry that follows."""
    groups = []
    while isinstance(entry := decided(controller, cast), Fence):
        assert entry.discard
        assert "its state before step 0 differs from that of " in entry.reason
        groups.append(int(entry.group))
        fold(controller, entry)
    return groups, entry


def test_where_all_agree_the_step_is_committed() -> None:
    assert fences_of(begun_with(4), with_state("aaaa", g3=0)) == ([], Commit(step=0, attempt=0))


def test_a_donor_with_wrong_state_is_fenced_with_its_newcomer() -> None:
    groups, entry = fences_of(begun_with(4), with_state("bbaa", g1=0))
    assert groups == [0, 1]
    assert entry == Retry(step=0, attempt=0, recompute=True)


def test_two_newcomers_of_one_donor_do_not_outvote_the_others() -> None:
    groups, _ = fences_of(begun_with(5), with_state("bbbaa", g1=0, g2=0))
    assert groups == [0, 1, 2]


def test_a_newcomer_whose_copy_differs_from_its_donor_is_fenced_alone() -> None:
    groups, _ = fences_of(begun_with(4), with_state("abaa", g1=0))
    assert groups == [1]


def test_a_group_that_is_no_donor_is_found_as_well() -> None:
    groups, _ = fences_of(begun_with(4), with_state("aaba", g1=0))
    assert groups == [2]


@pytest.mark.parametrize(
    ("digests", "donors"),
    [
        ("bba", {"g1": 0}),  # the donor, its newcomer, and one more
        (".ab", {"g1": 0}),  # the same, and the donor is lost before it reports: the newcomer's digest stands for it
        ("abb", {"g1": 0, "g2": 0}),  # a donor alone, which may have changed since, or before
        ("bbaa", {"g1": 0, "g3": 2}),
        ("ab", {"g1": 0}),
    ],
)
def test_without_a_majority_on_state_the_run_halts(digests: str, donors: dict[str, int]) -> None:
    controller = begun_with(len(digests))
    if digests.startswith("."):
        fold(controller, Fence(group=GroupId(0)))
    assert "the same parameters and different state: " in halted(controller, with_state(digests, **donors))


def test_a_group_without_a_state_digest_is_not_compared() -> None:
    cast = with_state("aaa", g1=0) | {GroupId(3): Vote(is_complete=True, plan_digest="p", params_digest="same")}
    assert decided(begun_with(4), cast) == Commit(step=0, attempt=0)


def test_wrong_parameters_are_reported_before_wrong_state() -> None:
    cast = with_state("aab")
    cast[GroupId(1)] = Vote(is_complete=True, plan_digest="p", params_digest="other", state_digest="a")
    entry = decided(begun_with(3), cast)
    assert isinstance(entry, Fence)
    assert (entry.group, entry.reason) == (1, "its parameters before step 0 differ from those of 2 groups")


def test_what_was_saved_after_the_last_step_is_saved_again_by_a_group_with_right_state() -> None:
    """No update follows in whose parameters it would show."""
    controller = make_controller(steps=1, saves=SavePolicy(saves_last=True))
    controller.handle(RunStarted(), now_s=0.0)
    fold(controller, Commit(step=0, attempt=0, save=True))
    entry = decided(controller, with_state("baaa"))
    assert isinstance(entry, Fence)
    assert (entry.group, entry.reason) == (0, "its state before step 1 differs from that of 3 groups")
    fold(controller, entry)
    again = decided(controller, with_state("baaa"))
    assert isinstance(again, Retry)
    fold(controller, again)
    assert decided(controller, with_state(".aaa")) == Finish(step=1, attempt=2)


def begun_for_sums() -> Controller:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def decided_on_sums(controller: Controller, wrong: set[int], incomplete: frozenset[int] = frozenset()) -> Entry:
    """The entry after votes of all groups, of which these have found sums wrong, and others lack theirs."""
    cast = {
        group: Vote(
            is_complete=group not in wrong | incomplete,
            plan_digest=controller._plans[-1].digest,
            num_complete=(3,),
            has_wrong_sum=group in wrong,
        )
        for group in controller.members
    }
    [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=cast), now_s=0.0)
    assert isinstance(append, AppendEntry)
    return append.entry


def test_a_wrong_sum_is_not_committed_and_nothing_of_its_attempt_stays() -> None:
    controller = begun_for_sums()
    entry = decided_on_sums(controller, {0, 1, 2, 3})
    groups = tuple(map(GroupId, range(4)))
    assert entry == Retry(step=0, attempt=0, recompute=True, wrong_sums=groups)
    first = controller._plans[0]
    _, compute, *_ = fold(controller, entry)
    assert isinstance(compute, ComputeStep)
    assert compute.plan.work.digest == first.work.digest
    assert compute.plan.digest != first.digest, "or groups would take it for what they have computed"
    assert decided_on_sums(controller, set()) == Commit(step=0, attempt=1)


def test_a_group_that_alone_receives_a_wrong_sum_is_lost_the_second_time() -> None:
    controller = begun_for_sums()
    entry = decided_on_sums(controller, {2})
    assert entry == Retry(step=0, attempt=0, recompute=True, wrong_sums=(GroupId(2),))
    fold(controller, entry)
    entry = decided_on_sums(controller, {2})
    assert isinstance(entry, Fence)
    assert (entry.group, entry.discard) == (2, True)
    assert "it alone found sums over groups wrong" in entry.reason
    fold(controller, entry)
    assert decided_on_sums(controller, set()) == Retry(step=0, attempt=1, recompute=True)


@pytest.mark.parametrize(
    ("first", "second", "incomplete"),
    [
        ({1}, {2}, set()),
        ({1, 2}, {2}, set()),
        ({2}, {1, 2}, set()),
        ({2}, {2}, {0}),  # what came to group 0 is not known
        ({0, 1, 2, 3}, {0, 1, 2, 3}, set()),
    ],
)
def test_no_group_is_blamed_while_it_may_be_another(first: set[int], second: set[int], incomplete: set[int]) -> None:
    controller = begun_for_sums()
    fold(controller, decided_on_sums(controller, first))
    assert isinstance(decided_on_sums(controller, second, frozenset(incomplete)), Retry)


def test_what_a_group_found_in_the_step_before_is_not_held_against_it() -> None:
    controller = begun_for_sums()
    fold(controller, decided_on_sums(controller, {2}), Commit(step=0, attempt=1))
    assert isinstance(decided_on_sums(controller, {2}), Retry)


def test_with_state_partitions_parameters_are_gathered_anew_and_no_group_is_blamed() -> None:
    controller = make_controller(partitions=PartitionSetup(num_groups=4, redundancy=2))
    controller.handle(RunStarted(), now_s=0.0)
    for attempt in range(2):
        entry = decided_on_sums(controller, {2})
        assert entry == Retry(step=0, attempt=attempt, recompute=True, gather=True, wrong_sums=(GroupId(2),))
        fold(controller, entry)


def test_a_loss_in_the_attempt_does_not_save_a_wrong_sum() -> None:
    controller = begun_for_sums()
    fold(controller, fence(1))
    entry = decided_on_sums(controller, {0}, frozenset({2, 3}))
    assert entry == Retry(step=0, attempt=0, recompute=True, wrong_sums=(GroupId(0),))


def test_sums_that_are_wrong_again_and_again_halt_the_run() -> None:
    controller = begun_for_sums()
    for _ in range(MAX_RETRIES_WITHOUT_LOSS):
        fold(controller, decided_on_sums(controller, {0, 1, 2, 3}))
    entry = decided_on_sums(controller, {0, 1, 2, 3})
    [stop] = fold(controller, entry)
    assert isinstance(stop, StopHalted)
    assert "contradicted their checksums on groups 0, 1, 2, 3" in stop.reason


def begun_for_buckets() -> Controller:
    controller = make_controller()
    compute, reduce = controller.handle(RunStarted(), now_s=0.0)[1:3]
    assert isinstance(compute, ComputeStep)
    assert compute.into == reduce
    return controller


def decided_on_buckets(controller: Controller, num_complete: dict[int, tuple[int, ...]]) -> object:
    """What is decided on the votes of groups that hold this many buckets, and not all."""
    cast = {
        GroupId(group): Vote(is_complete=False, plan_digest=controller._plans[-1].digest, num_complete=counts)
        for group, counts in num_complete.items()
    }
    [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=cast), now_s=0.0)
    assert isinstance(append, AppendEntry)
    return append.entry


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ({0: (3, 0), 2: (2, 4), 3: (5, 1)}, (2, 0)),
        ({0: (3, 1), 1: (0, 0), 2: (2, 4), 3: (5, 1)}, (2, 1)),  # the lost group's own say does not count
        ({0: (3, 1), 2: (2, 4), 3: ()}, ()),  # one that has reduced nothing reports no buckets
    ],
)
def test_a_retry_keeps_for_each_rank_what_all_survivors_hold(
    counts: dict[int, tuple[int, ...]], kept: tuple[int, ...]
) -> None:
    controller = begun_for_buckets()
    fold(controller, fence(1))
    entry = decided_on_buckets(controller, counts)
    assert entry == Retry(step=0, attempt=0, kept=kept)
    assert isinstance(entry, Retry)
    compute, reduce, _ = fold(controller, entry)
    assert isinstance(reduce, AttemptReduce)
    assert reduce.kept == kept
    assert isinstance(compute, ComputePatch)
    assert compute.into == reduce


def test_the_next_step_keeps_nothing_of_this_one() -> None:
    controller = begun_for_buckets()
    *_, reduce, _ = fold(controller, Retry(step=0, attempt=0, kept=(4, 4)), Commit(step=0, attempt=1))
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.step, reduce.kept) == (1, ())
