"""The controller as a fold of the log, and the protocol driven by hand and at random."""

from dataclasses import replace

import pytest

from spare_megatron.core.controller.controller import MAX_RETRIES_WITHOUT_LOSS, Controller
from spare_megatron.core.controller.decision import fence_silent_voters
from spare_megatron.core.log.actions import (
    AdmitGroups,
    AppendEntry,
    AttemptFinish,
    AttemptReduce,
    BuildCommunicator,
    ComputePatch,
    ComputeStep,
    FinishRun,
    LoadCheckpoint,
    ReadEntry,
    ReadVotes,
    SaveCheckpoint,
    StopHalted,
    StopWipeOut,
    UpdateModel,
)
from spare_megatron.core.log.entries import (
    Commit,
    Entry,
    Fence,
    Finish,
    Halt,
    OwnFailure,
    Restart,
    Retry,
)
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.plans import Microbatch
from tests.unit.controllers import begun, decided, fence, fold, members, setup_with


def microbatches(*pairs: tuple[int, int]) -> tuple[Microbatch, ...]:
    """By shard and index."""
    return tuple(Microbatch(ShardId(shard), k) for shard, k in pairs)


def votes(controller: Controller, **outcomes: bool) -> VotesRead:
    """Votes of all groups, complete unless set otherwise by g0=False and so on."""
    digest = controller._plans[-1].digest
    cast = {
        GroupId(g): Vote(is_complete=outcomes.get(f"g{g}", True), plan_digest=digest)
        for g in range(4)
        if outcomes.get(f"g{g}", True) is not None
    }
    return VotesRead(attempt=controller.attempt, votes=cast)


def test_a_run_starts_with_a_communicator_over_all_groups_and_every_group_on_parts_of_its_shards() -> None:
    build, compute, reduce, read = Controller(setup_with()).handle(RunStarted(), now_s=0.0)
    assert build == BuildCommunicator(key=-1, epoch=0, members=(0, 1, 2, 3))
    assert isinstance(compute, ComputeStep)
    assert compute.plan.work.of(GroupId(2)) == microbatches((0, 2), (2, 0), (2, 3), (3, 1))
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.step, reduce.attempt, reduce.members) == (0, 0, (0, 1, 2, 3))
    assert read == ReadEntry(index=0)


def test_a_commit_updates_the_model_and_begins_the_next_step_on_a_new_attempt() -> None:
    controller = begun()
    update, compute, reduce, read = fold(controller, Commit(step=0, attempt=0))
    assert update == UpdateModel(step=0, attempt=0)
    assert isinstance(compute, ComputeStep)
    assert compute.plan.step == 1
    assert isinstance(reduce, AttemptReduce)
    assert reduce.attempt == 1
    assert read == ReadEntry(index=1)


def test_the_last_commit_finishes_the_run() -> None:
    controller = begun(steps=1)
    update = UpdateModel(step=0, attempt=0, is_last=True)
    assert fold(controller, Commit(step=0, attempt=0)) == [update, FinishRun(step=1)]


def test_the_first_commit_that_is_written_after_the_end_of_the_time_is_the_last() -> None:
    controller = begun(ends_at_s=10.0)
    [early] = controller.handle(votes(controller), now_s=9.9)
    assert early == AppendEntry(index=0, entry=Commit(step=0, attempt=0, at_s=9.9))
    [late] = controller.handle(votes(controller), now_s=10.0)
    assert late == AppendEntry(index=0, entry=Commit(step=0, attempt=0, is_last=True, at_s=10.0))


def test_a_run_ends_with_the_commit_of_an_attempt_if_any_group_was_asked_to_end_it() -> None:
    """If only the group that decides were asked, a run would go on whose slowest group was not asked."""
    controller = begun(steps=3)
    cast = votes(controller)
    asked = {**cast.votes, GroupId(2): replace(cast.votes[GroupId(2)], ends=True)}
    [entry] = controller.handle(replace(cast, votes=asked), now_s=0.0)
    last = Commit(step=0, attempt=0, save=True, is_last=True, is_asked=True, at_s=0.0)
    assert entry == AppendEntry(index=0, entry=last)
    update, save, attempt, _ = fold(controller, entry.entry)
    assert update == UpdateModel(step=0, attempt=0, is_last=True)
    assert isinstance(save, SaveCheckpoint), "though no setting asks for checkpoints"
    assert save.is_last
    assert isinstance(attempt, AttemptFinish)
    assert fold(controller, Finish(step=1, attempt=1)) == [FinishRun(step=1, is_asked=True)]


def test_a_run_that_is_asked_to_end_in_its_last_step_has_finished_and_saves() -> None:
    controller = begun(steps=1)
    cast = votes(controller)
    asked = {group: replace(vote, ends=True) for group, vote in cast.votes.items()}
    [entry] = controller.handle(replace(cast, votes=asked), now_s=0.0)
    assert entry == AppendEntry(index=0, entry=Commit(step=0, attempt=0, save=True, at_s=0.0))
    assert isinstance(fold(controller, entry.entry)[0], UpdateModel)


def test_a_group_that_reads_the_last_commit_ends_with_its_step_and_admits_no_group() -> None:
    controller = begun()
    last = Commit(step=0, attempt=0, admit=(Member(GroupId(1), 1),), is_last=True)
    update = UpdateModel(step=0, attempt=0, is_last=True)
    assert fold(controller, fence(1), last) == [update, FinishRun(step=1)]
    assert controller.members == (0, 2, 3)


def test_a_fence_decides_nothing_but_asks_for_votes_and_a_new_communicator() -> None:
    controller = begun()
    assert fold(controller, fence(1)) == [
        BuildCommunicator(key=0, epoch=1, members=(0, 2, 3)),
        ReadVotes(attempt=0, voters=members(0, 1, 2, 3), num_left=3),
        ReadEntry(index=1),
    ]


def test_the_same_fence_twice_changes_nothing() -> None:
    controller = begun()
    assert fold(controller, fence(1), fence(1)) == [
        ReadVotes(attempt=0, voters=members(0, 1, 2, 3), num_left=3),
        ReadEntry(index=2),
    ]
    assert controller.epoch == 1


def test_a_loss_after_all_groups_reduced_commits_without_a_patch() -> None:
    controller = begun()
    fold(controller, fence(1))
    [append] = controller.handle(votes(controller), now_s=0.0)
    assert append == AppendEntry(index=1, entry=Commit(step=0, attempt=0))


def test_one_survivor_without_the_sum_makes_the_attempt_fail() -> None:
    controller = begun()
    fold(controller, fence(1))
    [append] = controller.handle(votes(controller, g2=False), now_s=0.0)
    assert append == AppendEntry(index=1, entry=Retry(step=0, attempt=0))


def test_the_vote_of_a_lost_group_does_not_count() -> None:
    controller = begun()
    fold(controller, fence(1))
    [append] = controller.handle(votes(controller, g1=False), now_s=0.0)
    assert append.entry == Commit(step=0, attempt=0)


def test_an_overdue_decision_fences_the_silent_incarnations_and_not_those_that_wait_for_them() -> None:
    voters = [Member(GroupId(group), group) for group in range(4)]
    [first, second] = fence_silent_voters(7, voters, {GroupId(0), GroupId(3)}, "it took 50 s")
    assert [first.hits(voter) for voter in voters] == [False, True, False, False]
    assert [second.hits(voter) for voter in voters] == [False, False, True, False]
    assert first.reason == "it has not voted on attempt 7: it took 50 s"
    assert not first.discard, "what it may have contributed is not wrong"
    assert fence_silent_voters(7, voters, {voter.group for voter in voters}, "the last vote decides nothing") == ()


def test_nothing_is_decided_before_every_survivor_has_voted() -> None:
    controller = begun()
    cast = dict(votes(controller).votes)
    del cast[GroupId(3)]
    assert controller.handle(VotesRead(attempt=0, votes=cast), now_s=0.0) == ()


def test_a_retry_after_a_loss_patches_what_the_lost_group_owed_of_its_shards_with_at_most_two_each() -> None:
    controller = begun()
    compute, reduce, read = fold(controller, fence(1), Retry(step=0, attempt=0))
    assert isinstance(compute, ComputePatch)
    patched = [item for group in range(4) for item in compute.plan.work.of(GroupId(group))]
    assert sorted(patched) == [*microbatches((1, 0), (1, 3), (2, 1), (3, 2))]
    assert compute.plan.work.makespan == 2
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.attempt, reduce.members) == (1, (0, 2, 3))
    assert read == ReadEntry(index=2)


def test_a_retry_without_a_loss_rebuilds_the_communicator_and_computes_nothing() -> None:
    controller = begun()
    build, reduce, _ = fold(controller, Retry(step=0, attempt=0))
    assert build == BuildCommunicator(key=0, epoch=0, members=(0, 1, 2, 3))
    assert isinstance(reduce, AttemptReduce)
    assert reduce.attempt == 1


def test_reductions_that_always_fail_halt_the_run() -> None:
    controller = begun()
    entries = [Retry(step=0, attempt=attempt) for attempt in range(MAX_RETRIES_WITHOUT_LOSS + 1)]
    [stop] = fold(controller, *entries)
    assert isinstance(stop, StopHalted)


def test_a_group_lost_while_patching_leaves_its_own_and_its_patch_work_to_the_next_patch() -> None:
    controller = begun(num_groups=4, redundancy=4)
    first, *_ = fold(controller, fence(1), Retry(step=0, attempt=0))
    assert isinstance(first, ComputePatch)
    owed = {*first.plan.work.of(GroupId(2)), *microbatches((0, 2), (1, 3), (2, 0), (3, 1))}
    second, *_ = fold(controller, fence(2), Retry(step=0, attempt=1))
    assert isinstance(second, ComputePatch)
    assert {item for group in (0, 3) for item in second.plan.work.of(GroupId(group))} == owed


def test_a_wipe_out_is_met_only_after_the_step_that_survived_it_is_committed() -> None:
    controller = begun(redundancy=1)
    update, stop = fold(controller, fence(1), Commit(step=0, attempt=0))
    assert update == UpdateModel(step=0, attempt=0)
    assert stop == StopWipeOut(step=1, shards=(1,))


def test_a_wipe_out_that_costs_the_step_stops_at_once() -> None:
    controller = begun(redundancy=1)
    assert fold(controller, fence(1), Retry(step=0, attempt=0)) == [StopWipeOut(step=0, shards=(1,))]


def halted(controller: Controller, cast: dict[GroupId, Vote]) -> str:
    """The reason for which votes on the first attempt halt the run."""
    halt = decided(controller, cast)
    assert isinstance(halt, Halt)
    assert fold(controller, halt) == [StopHalted(step=0, reason=halt.reason)]
    return halt.reason


def test_groups_with_different_plans_halt_before_anything_is_applied() -> None:
    controller = begun()
    cast = {GroupId(g): Vote(is_complete=True, plan_digest="other" if g == 2 else "a") for g in range(4)}
    assert "different plans: a: groups [0, 1, 3]; other: groups [2]" in halted(controller, cast)


def test_an_entry_that_does_not_fit_the_state_is_refused() -> None:
    controller = begun()
    with pytest.raises(ValueError, match="step 1 is committed in attempt 0 of step 0"):
        fold(controller, Commit(step=1, attempt=0))
    with pytest.raises(ValueError, match="the next one to fold"):
        begun().handle(EntryRead(index=7, entry=fence(1)), now_s=0.0)


LACKING = "too many open files; raise `ulimit -n`"


def failing(controller: Controller, *groups: int) -> dict[GroupId, Vote]:
    """Incomplete votes of all members, of which these groups lack a resource."""
    vote = Vote(is_complete=False, plan_digest=controller._plans[-1].digest)
    return {group: replace(vote, failure=LACKING) if group in groups else vote for group in controller.members}


def failed(controller: Controller, *groups: int) -> Entry:
    """The entry that follows if these groups lack a resource, folded."""
    entry = decided(controller, failing(controller, *groups))
    fold(controller, entry)
    return entry


def test_a_group_that_lacks_a_resource_twice_in_a_step_is_fenced_for_it_and_the_others_go_on() -> None:
    controller = begun()
    assert failed(controller, 2) == Retry(step=0, attempt=0, failures=(OwnFailure(GroupId(2), LACKING),))
    assert failed(controller) == Retry(step=0, attempt=1), "a reduction that breaks otherwise forgets nothing"
    lost = failed(controller, 2)
    reason = f"it could not connect to the others in two attempts of step 0: {LACKING}"
    assert lost == Fence(group=GroupId(2), reason=reason)
    assert controller.members == (0, 1, 3)
    assert isinstance(failed(controller), Retry)


def test_a_group_that_lacks_a_resource_once_in_each_step_is_not_fenced() -> None:
    controller = begun(steps=9)
    for step in range(4):
        assert isinstance(failed(controller, 2), Retry)
        fold(controller, Commit(step=step, attempt=controller.attempt))
    assert controller.members == (0, 1, 2, 3)


def test_of_several_groups_that_lack_a_resource_again_each_is_fenced() -> None:
    controller = begun()
    assert isinstance(failed(controller, 1, 2), Retry)
    assert [failed(controller, 1, 2), failed(controller, 2)] == [
        Fence(group=GroupId(g), reason=f"it could not connect to the others in two attempts of step 0: {LACKING}")
        for g in (1, 2)
    ]
    assert controller.members == (0, 3)


def test_if_all_groups_lack_a_resource_the_run_halts_with_the_cause_and_fences_none() -> None:
    controller = begun()
    assert isinstance(failed(controller, 3), Retry)
    assert isinstance(failed(controller, 0, 1, 2, 3), Retry), "three of them for the first time"
    halt = failed(controller, 0, 1, 2, 3)
    assert halt == Halt(step=0, reason=f"no group can connect to the others, group 0 for this: {LACKING}")


def test_a_run_that_halts_for_failed_reductions_says_what_a_group_lacked() -> None:
    controller = begun()
    retry = Retry(step=0, attempt=0, failures=(OwnFailure(GroupId(1), LACKING),))
    for attempt in range(MAX_RETRIES_WITHOUT_LOSS):
        fold(controller, replace(retry, attempt=attempt))
    [stop] = fold(controller, replace(retry, attempt=MAX_RETRIES_WITHOUT_LOSS))
    assert isinstance(stop, StopHalted)
    assert stop.reason.endswith(f"though no group was lost; group 1: {LACKING}")


def test_a_waiting_group_is_admitted_by_the_commit_and_works_from_the_next_step_on() -> None:
    controller = begun()
    fold(controller, fence(1), Commit(step=0, attempt=0))
    cast = {GroupId(g): Vote(is_complete=True, plan_digest="a") for g in (0, 2, 3)}
    event = VotesRead(attempt=1, votes=cast, waiting=(Member(GroupId(1), 1),))
    [append] = controller.handle(event, now_s=0.0)
    assert append == AppendEntry(index=2, entry=Commit(step=1, attempt=1, admit=(Member(GroupId(1), 1),)))
    update, admit, build, compute, reduce, _ = fold(controller, append.entry)
    assert update == UpdateModel(step=1, attempt=1)
    assert admit == AdmitGroups(step=2, members=(Member(GroupId(1), 1),), donors=members(0), earlier=members(0, 2, 3))
    assert build == BuildCommunicator(key=2, epoch=2, members=(0, 1, 2, 3))
    assert isinstance(compute, ComputeStep)
    assert (compute.plan.work.makespan, len(compute.plan.work.of(GroupId(1)))) == (4, 4)
    assert isinstance(reduce, AttemptReduce)
    assert reduce.members == (0, 1, 2, 3)


def test_a_late_fence_of_an_earlier_incarnation_has_no_effect() -> None:
    controller = begun()
    fold(controller, fence(1), Commit(step=0, attempt=0, admit=(Member(GroupId(1), 1),)))
    voters = (Member(GroupId(0)), Member(GroupId(1), 1), Member(GroupId(2)), Member(GroupId(3)))
    assert fold(controller, fence(1)) == [ReadVotes(attempt=1, voters=voters, num_left=4), ReadEntry(index=3)]
    assert (controller.voters, controller.epoch) == (voters, 2)
    fold(controller, fence(1, incarnation=1))
    assert (controller.voters, controller.epoch) == (members(0, 2, 3), 3)


def test_the_writer_of_the_commit_decides_when_a_checkpoint_is_due() -> None:
    controller = Controller(setup_with(steps=9, saves=SavePolicy(interval_s=100.0)))
    controller.handle(RunStarted(), now_s=1000.0)
    due = []
    for step, now_s in enumerate((1050.0, 1099.0, 1100.0, 1150.0, 1205.0)):
        cast = {GroupId(g): Vote(is_complete=True, plan_digest="a") for g in range(4)}
        [append] = controller.handle(VotesRead(attempt=step, votes=cast), now_s=now_s)
        assert isinstance(append, AppendEntry)
        actions = controller.handle(EntryRead(index=step, entry=append.entry), now_s=now_s)
        due.append(any(isinstance(action, SaveCheckpoint) and action.step == step + 1 for action in actions))
    assert due == [False, False, True, False, True]


def test_a_restart_begins_the_step_after_the_checkpoint_in_the_first_order() -> None:
    controller = begun(redundancy=1)
    fold(controller, Commit(step=0, attempt=0), Commit(step=1, attempt=1), fence(1), Retry(step=2, attempt=2))
    all_groups = (Member(GroupId(0)), Member(GroupId(1), 1), Member(GroupId(2)), Member(GroupId(3)))
    load, build, compute, reduce, read = fold(controller, Restart(step=1, members=all_groups))
    assert load == LoadCheckpoint(step=1, rework_steps=1, members=all_groups)
    assert build == BuildCommunicator(key=4, epoch=2, members=(0, 1, 2, 3))
    assert isinstance(compute, ComputeStep)
    assert compute.plan.step == 1
    assert compute.plan.work.of(GroupId(1)) == tuple(Microbatch(1, k) for k in range(4))
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.attempt, reduce.members) == (4, (0, 1, 2, 3))
    assert read == ReadEntry(index=5)
