"""The controller where the optimizer state is cut into partitions: gathers, repairs, state wipe-outs, the end."""

import pytest

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import (
    Action,
    AdmitGroups,
    AppendEntry,
    AttemptFinish,
    AttemptReduce,
    BuildCommunicator,
    ComputePatch,
    ComputeStep,
    FinishRun,
    GatherParams,
    LoadCheckpoint,
    ReadEntry,
    ReadVotes,
    SaveCheckpoint,
    StartRepairs,
    StopWipeOut,
    UpdateModel,
)
from spare_megatron.core.log.entries import (
    Commit,
    Entry,
    Fence,
    Finish,
    Restart,
    Retry,
)
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import PartitionDigest, Vote
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, hosted_by


def make_controller(redundancy: int = 2, steps: int = 3) -> Controller:
    setup = ControllerSetup(
        placement=make_placement("golomb", 4, 3),
        microbatches_per_shard=4,
        num_steps=steps,
        partitions=PartitionSetup(num_groups=4, redundancy=redundancy),
    )
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def fold(controller: Controller, *entries: Entry) -> list[Action]:
    """The actions of the last of some entries."""
    actions: list[Action] = []
    for entry in entries:
        actions = list(controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0))
    return actions


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def fence(group: int) -> Fence:
    return Fence(group=GroupId(group))


def decided(controller: Controller, attempt: AttemptReduce | AttemptFinish, **votes: Vote) -> Entry:
    """The entry after the votes of all members: complete, but for those that are given by g0=... and so on.

    Such votes may also be those of groups that were lost since.
    """
    complete = Vote(is_complete=True, plan_digest=attempt.plan_digest)
    cast = dict.fromkeys(controller.members, complete)
    cast |= {GroupId(int(name[1:])): vote for name, vote in votes.items()}
    [append] = controller.handle(VotesRead(attempt=attempt.attempt, votes=cast), now_s=0.0)
    assert isinstance(append, AppendEntry)
    return append.entry


def last_attempt(actions: list[Action]) -> AttemptReduce:
    [attempt] = [action for action in actions if isinstance(action, AttemptReduce)]
    return attempt


def test_every_update_is_followed_by_a_gather_from_the_owners() -> None:
    controller = make_controller()
    update, gather, save, compute, reduce, read = fold(controller, Commit(step=0, attempt=0, save=True))
    assert isinstance(update, UpdateModel)
    all_groups = tuple(Member(GroupId(g)) for g in range(4))
    assert gather == GatherParams(step=1, owners=all_groups)
    # What is saved is whole.
    hosts = controller.ownership and controller.ownership.hosts
    assert save == SaveCheckpoint(
        step=1, member=all_groups[0], voters=all_groups, epoch=0, hosts=hosts, owners=all_groups, doubtful=(1,)
    )
    assert kinds([compute, reduce, read]) == [ComputeStep, AttemptReduce, ReadEntry]


def test_a_save_after_the_last_step_says_that_it_is_the_last() -> None:
    for commit, is_last in (
        (Commit(step=0, attempt=0, save=True), False),
        (Commit(step=0, attempt=0, save=True, is_last=True), True),
    ):
        saves = [action for action in fold(make_controller(), commit) if isinstance(action, SaveCheckpoint)]
        assert [save.is_last for save in saves] == [is_last]


def test_a_group_without_parameters_makes_all_groups_gather_again_before_it_computes() -> None:
    controller = make_controller()
    begun = fold(controller, Commit(step=0, attempt=0))
    assert kinds(fold(controller, fence(1))) == [BuildCommunicator, StartRepairs, ReadVotes, ReadEntry]
    attempt = last_attempt(begun)
    lacking = Vote(is_complete=False, plan_digest=attempt.plan_digest, lacks_params=True)
    incomplete = Vote(is_complete=False, plan_digest=attempt.plan_digest)
    retry = decided(controller, attempt, g0=lacking, g2=incomplete, g3=incomplete)
    assert retry == Retry(step=1, attempt=1, gather=True)
    again = fold(controller, retry)
    assert kinds(again) == [GatherParams, ComputeStep, ComputePatch, AttemptReduce, ReadEntry]
    gather, compute, patch = again[:3]
    assert isinstance(gather, GatherParams)
    assert Member(GroupId(1)) not in gather.owners
    assert gather.step == 1
    assert isinstance(compute, ComputeStep)
    assert compute.plan in [action.plan for action in begun if isinstance(action, ComputeStep)]
    assert isinstance(patch, ComputePatch)
    assert (compute.into, patch.into) == (None, again[3])  # nothing leaves before the patch is added
    assert last_attempt(again).plan_digest == patch.plan.digest


def test_a_group_that_has_computed_neither_patch_gets_the_second_after_the_first() -> None:
    controller = make_controller(redundancy=3)
    begun = fold(controller, Commit(step=0, attempt=0))
    one = fold(controller, fence(1), Retry(step=1, attempt=1))
    two = fold(controller, fence(2), Retry(step=1, attempt=2, gather=True))
    computed = [action for action in two if isinstance(action, ComputeStep | ComputePatch)]
    earlier = [action.plan for action in (*begun, *one) if isinstance(action, ComputeStep | ComputePatch)]
    assert [action.plan for action in computed[:2]] == earlier
    assert [action.into for action in computed] == [None, None, last_attempt(two)]
    assert len({action.plan.digest for action in computed}) == 3


def test_a_discarded_step_is_gathered_and_computed_from_zero() -> None:
    controller = make_controller(redundancy=3)
    begun = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    fold(controller, Fence(group=GroupId(1), discard=True))
    lacking = Vote(is_complete=False, plan_digest=begun.plan_digest, lacks_params=True)
    retry = decided(controller, begun, g0=lacking)
    assert retry == Retry(step=1, attempt=1, recompute=True, gather=True)
    assert kinds(fold(controller, retry)) == [GatherParams, ComputeStep, AttemptReduce, ReadEntry]


def test_a_gather_that_breaks_without_a_loss_gets_a_new_communicator() -> None:
    controller = make_controller()
    fold(controller, Commit(step=0, attempt=0))
    assert kinds(fold(controller, Retry(step=1, attempt=1, gather=True)))[:2] == [BuildCommunicator, GatherParams]


def test_a_retry_without_a_gather_gathers_nothing() -> None:
    controller = make_controller()
    fold(controller, Commit(step=0, attempt=0), fence(1))
    assert kinds(fold(controller, Retry(step=1, attempt=1))) == [ComputePatch, AttemptReduce, ReadEntry]


def test_finished_copies_are_voted_committed_and_folded() -> None:
    controller = make_controller()
    [repairs] = [action for action in fold(controller, fence(1)) if isinstance(action, StartRepairs)]
    first, second = repairs.repairs
    assert controller.ownership is not None
    attempt = last_attempt(fold(controller, Retry(step=0, attempt=0)))
    vote = Vote(is_complete=True, plan_digest=attempt.plan_digest, restored=(first.partition,))
    commit = decided(controller, attempt, **{f"g{first.receiver.group}": vote})
    assert isinstance(commit, Commit)
    assert commit.restored == (PartitionCopy(first.partition, first.receiver),)
    update, started, gather = fold(controller, commit)[:3]
    assert kinds([update, gather]) == [UpdateModel, GatherParams]
    assert started == StartRepairs(repairs=(second,), hosts=controller.ownership.hosts)
    assert first.receiver in controller.ownership.hosts[first.partition]


def test_the_copy_of_a_group_that_is_fenced_by_then_is_none() -> None:
    controller = make_controller(redundancy=3)
    [repairs] = [action for action in fold(controller, fence(1)) if isinstance(action, StartRepairs)]
    repair = repairs.repairs[0]
    assert StopWipeOut not in kinds(fold(controller, fence(repair.receiver.group)))
    fold(controller, Commit(step=0, attempt=0, restored=(PartitionCopy(repair.partition, repair.receiver),)))
    assert controller.ownership is not None
    assert repair.receiver not in controller.ownership.hosts[repair.partition]


def test_a_copy_does_not_count_if_its_donor_was_lost_since_the_vote_for_then_it_begins_anew() -> None:
    controller = make_controller(redundancy=3)
    [repairs] = [action for action in fold(controller, fence(1)) if isinstance(action, StartRepairs)]
    attempt = last_attempt(fold(controller, Retry(step=0, attempt=0)))
    repair = repairs.repairs[0]
    vote = Vote(is_complete=True, plan_digest=attempt.plan_digest, restored=(repair.partition,))
    [again] = [action for action in fold(controller, fence(repair.donor.group)) if isinstance(action, StartRepairs)]
    assert (repair.partition, repair.receiver) in [(one.partition, one.receiver) for one in again.repairs]
    commit = decided(controller, attempt, **{f"g{repair.receiver.group}": vote})
    assert commit == Commit(step=0, attempt=1)


def test_a_state_partition_that_loses_all_hosts_is_a_wipe_out_at_once() -> None:
    controller = make_controller()
    assert controller.ownership is not None
    one, two = (host.group for host in controller.ownership.hosts[2])
    fold(controller, fence(one))
    assert fold(controller, fence(two)) == [StopWipeOut(step=0, partitions=(PartitionId(2),))]


def test_a_copy_in_time_averts_the_wipe_out() -> None:
    controller = make_controller()
    assert controller.ownership is not None
    one, two = (host.group for host in controller.ownership.hosts[2])
    [repairs] = [action for action in fold(controller, fence(one)) if isinstance(action, StartRepairs)]
    copies = tuple(PartitionCopy(repair.partition, repair.receiver) for repair in repairs.repairs)
    fold(controller, Commit(step=0, attempt=0, restored=copies))
    assert StopWipeOut not in kinds(fold(controller, fence(two)))


def test_the_run_ends_only_when_all_parameters_are_whole() -> None:
    controller = make_controller(steps=1)
    update, gather, attempt, read = fold(controller, Commit(step=0, attempt=0))
    assert kinds([update, gather, read]) == [UpdateModel, GatherParams, ReadEntry]
    assert isinstance(attempt, AttemptFinish)
    assert (attempt.step, attempt.attempt) == (1, 1)
    lacking = Vote(is_complete=False, plan_digest=attempt.plan_digest, lacks_params=True)
    retry = decided(controller, attempt, g2=lacking)
    assert retry == Retry(step=1, attempt=1, gather=True)
    build, gather, attempt, read = fold(controller, retry)
    assert kinds([build, gather, attempt, read]) == [BuildCommunicator, GatherParams, AttemptFinish, ReadEntry]
    assert isinstance(attempt, AttemptFinish)
    finish = decided(controller, attempt)
    assert finish == Finish(step=1, attempt=2)
    assert fold(controller, finish) == [FinishRun(step=1)]


def test_a_loss_after_the_last_step_has_the_rest_gather_again_and_finish() -> None:
    controller = make_controller(steps=1)
    *_, attempt, _ = fold(controller, Commit(step=0, attempt=0))
    assert isinstance(attempt, AttemptFinish)
    fold(controller, fence(3))
    lacking = Vote(is_complete=False, plan_digest=attempt.plan_digest, lacks_params=True)
    retry = decided(controller, attempt, g0=lacking, g1=lacking, g2=lacking)
    gather, *_ = fold(controller, retry)
    assert isinstance(gather, GatherParams)
    assert Member(GroupId(3)) not in gather.owners


def test_who_is_admitted_gets_parameters_from_its_donor_and_copies_by_repair() -> None:
    controller = make_controller()
    back = Member(GroupId(1), 1)
    actions = fold(controller, fence(1), Commit(step=0, attempt=0, admit=(back,)))
    assert kinds(actions) == [
        UpdateModel,
        GatherParams,
        AdmitGroups,
        BuildCommunicator,
        StartRepairs,
        ComputeStep,
        AttemptReduce,
        ReadEntry,
    ]
    assert controller.ownership is not None
    assert back in controller.ownership.members
    assert hosted_by(controller.ownership.hosts, back) == ()


def test_a_readmitted_group_takes_partitions_over_and_their_donors_release_them_one_commit_later() -> None:
    controller = make_controller(steps=9)
    [repairs] = [action for action in fold(controller, fence(1)) if isinstance(action, StartRepairs)]
    copies = tuple(PartitionCopy(repair.partition, repair.receiver) for repair in repairs.repairs)
    back = Member(GroupId(1), 1)
    fold(controller, Commit(step=0, attempt=0, restored=copies))
    actions = fold(controller, Commit(step=1, attempt=1, admit=(back,)))
    [started] = [action for action in actions if isinstance(action, StartRepairs)]
    assert (started.repairs, started.copies, started.is_compared) == ((), started.moves, False)
    first, second = started.moves
    assert {first.receiver, second.receiver} == {back}

    attempt = last_attempt(actions)
    vote = Vote(is_complete=True, plan_digest=attempt.plan_digest, restored=(first.partition,))
    commit = decided(controller, attempt, g1=vote)
    assert isinstance(commit, Commit)
    assert (commit.restored, commit.released) == ((PartitionCopy(first.partition, back),), ())
    actions = fold(controller, commit)
    [started] = [action for action in actions if isinstance(action, StartRepairs)]
    assert started.is_compared
    assert started.copies == (second,)
    assert {first.donor, back} <= set(started.hosts[first.partition])

    commit = decided(controller, last_attempt(actions))
    assert isinstance(commit, Commit)
    assert commit.released == (PartitionCopy(first.partition, first.donor),)
    [started] = [action for action in fold(controller, commit) if isinstance(action, StartRepairs)]
    assert (started.moves, started.is_compared) == ((second,), False)
    assert back in started.hosts[first.partition]
    assert first.donor not in started.hosts[first.partition]


def test_a_restart_gives_every_state_partition_all_its_hosts() -> None:
    controller = make_controller()
    present = tuple(Member(GroupId(group), 1) for group in range(4))
    fold(controller, fence(0), fence(1))
    load, *_ = fold(controller, Restart(step=0, members=present))
    assert controller.ownership is not None
    assert load == LoadCheckpoint(step=0, rework_steps=0, hosts=controller.ownership.hosts, members=present)
    assert {len(row) for row in controller.ownership.hosts} == {2}
    assert controller.ownership.repairs == ()


def test_a_restart_from_the_last_step_trains_no_further() -> None:
    controller = make_controller(steps=1)
    fold(controller, Commit(step=0, attempt=0, save=True))
    present = tuple(Member(GroupId(group), 1) for group in range(4))
    actions = fold(controller, Restart(step=1, members=present))
    assert kinds(actions) == [LoadCheckpoint, BuildCommunicator, StartRepairs, AttemptFinish, ReadEntry]
    # That communicator has been used by then: a retry needs another.
    assert kinds(fold(controller, Retry(step=1, attempt=2, gather=True)))[:2] == [BuildCommunicator, GatherParams]


def test_without_state_partitions_there_are_no_repairs() -> None:
    setup = ControllerSetup(placement=make_placement("golomb", 4, 3), microbatches_per_shard=4, num_steps=1)
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    assert controller.ownership is None
    assert kinds(fold(controller, fence(1), Commit(step=0, attempt=0))) == [UpdateModel, FinishRun]


def test_a_redundancy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="redundancy"):
        make_controller(redundancy=5)


def vote_with(attempt: AttemptReduce | AttemptFinish, partitions: dict[int, str], params: str = "a") -> Vote:
    """A vote with these digests of state partitions, by their numbers."""
    digests = tuple(PartitionDigest(PartitionId(number), sha256) for number, sha256 in partitions.items())
    return Vote(is_complete=True, plan_digest=attempt.plan_digest, params_digest=params, partition_digests=digests)


def test_after_an_owner_was_wrong_all_gather_anew_from_its_replicas_and_compute_from_zero() -> None:
    """Partition 0 is on groups 0, 2 and 3, and its owner is 0."""
    controller = make_controller(redundancy=3)
    begun = fold(controller, Commit(step=0, attempt=0))
    attempt = last_attempt(begun)
    wrong, right = vote_with(attempt, {0: "x"}, "x"), vote_with(attempt, {0: "y"}, "y")
    cast = {"g0": wrong, "g1": vote_with(attempt, {}, "x"), "g2": right, "g3": right}
    fenced = decided(controller, attempt, **cast)
    assert isinstance(fenced, Fence)
    assert (fenced.group, fenced.discard) == (0, True)
    assert StartRepairs in kinds(fold(controller, fenced))
    retry = decided(controller, attempt, **cast)
    assert retry == Retry(step=1, attempt=1, recompute=True, gather=True)
    gather, *rest = fold(controller, retry)
    assert isinstance(gather, GatherParams)
    assert gather.is_anew
    assert gather.owners[0].group in (2, 3)
    assert kinds(rest) == [ComputeStep, AttemptReduce, ReadEntry]


def test_two_hosts_that_differ_are_a_wipe_out_that_says_so() -> None:
    """Partition 0 is on groups 0 and 3."""
    controller = make_controller(redundancy=2)
    attempt = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    others = vote_with(attempt, {})
    cast = {"g0": vote_with(attempt, {0: "x"}), "g1": others, "g2": others, "g3": vote_with(attempt, {0: "y"})}
    first = decided(controller, attempt, **cast)
    fold(controller, first)
    second = decided(controller, attempt, **cast)
    [stop] = fold(controller, second)
    assert isinstance(stop, StopWipeOut)
    assert 0 in stop.partitions
    assert stop.cause == "groups [0, 3] hold different state of partition 0 before step 1, and no majority is right"


def test_where_hosts_differ_and_others_report_nothing_all_report_before_any_is_fenced() -> None:
    """Partition 0 is on groups 0, 2 and 3. Group 3 may have copied from 0, and would stay while 0 and 2 are fenced."""
    controller = make_controller(redundancy=3)
    attempt = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    cast = {"g0": vote_with(attempt, {0: "x"}), "g1": vote_with(attempt, {}), "g2": vote_with(attempt, {0: "y"})}
    entry = decided(controller, attempt, **cast)
    assert entry == Retry(step=1, attempt=1, recompute=True, gather=True)
    [gather] = [action for action in fold(controller, entry) if isinstance(action, GatherParams)]
    assert gather.is_anew, "groups that gather anew report their state"


def test_a_copy_is_proven_by_the_commit_that_has_compared_it_with_all_other_hosts() -> None:
    """Partition 0 is on groups 0, 2 and 3."""
    controller = make_controller(redundancy=3)
    attempt = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    fresh = Vote(
        is_complete=True,
        plan_digest=attempt.plan_digest,
        params_digest="a",
        partition_digests=(PartitionDigest(PartitionId(0), "x", is_proven=False),),
    )
    proven = vote_with(attempt, {0: "x"})
    for cast, is_proven in (
        ({"g3": fresh}, False),
        ({"g0": proven, "g3": fresh}, False),
        ({"g0": proven, "g2": proven, "g3": fresh}, True),
    ):
        commit = decided(controller, attempt, **cast)
        assert isinstance(commit, Commit)
        assert commit.proven == ((PartitionCopy(PartitionId(0), Member(GroupId(3))),) if is_proven else ())
    update = fold(controller, commit)[0]
    assert isinstance(update, UpdateModel)
    assert update.proven == commit.proven


def test_state_is_compared_once_more_before_the_run_ends() -> None:
    controller = make_controller(redundancy=3, steps=1)
    [finish] = [a for a in fold(controller, Commit(step=0, attempt=0)) if isinstance(a, AttemptFinish)]
    right, wrong = vote_with(finish, {0: "y"}), vote_with(finish, {0: "x"})
    cast = {"g0": wrong, "g1": vote_with(finish, {}), "g2": right, "g3": right}
    fold(controller, decided(controller, finish, **cast))
    retry = decided(controller, finish, **cast)
    assert retry == Retry(step=1, attempt=1, recompute=True, gather=True)
    gather, again, _ = fold(controller, retry)
    assert isinstance(gather, GatherParams)
    assert gather.is_anew
    assert isinstance(again, AttemptFinish)
    assert decided(controller, again) == Finish(step=1, attempt=2)
