"""A wipe-out of shards in the controller: groups with all state wait for hosts, and compute the step from zero sums."""

from dataclasses import replace
from itertools import combinations

import pytest

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.restart import MAX_RESUMES_WITHOUT_COMMIT, RestartLimits, decide_pause
from spare_megatron.core.log.actions import (
    AdmitGroups,
    AppendEntry,
    AttemptEvaluation,
    AttemptReduce,
    AwaitHosts,
    BuildCommunicator,
    ComputeStep,
    GatherParams,
    SaveCheckpoint,
    StopWipeOut,
)
from spare_megatron.core.log.entries import (
    VERSION,
    Commit,
    Entry,
    Fence,
    GiveUp,
    Restart,
    Resume,
    Retry,
    decode_entry,
    encode_entry,
)
from spare_megatron.core.log.events import EndRequested, EntryRead, HostsRead, RunStarted
from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId, Member, Slabs
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import PartitionSetup

WAIT_S = 60.0
SETUP = ControllerSetup(
    placement=make_placement("golomb", 4, 2),  # shard 1 is hosted by groups 1 and 0
    microbatches_per_shard=2,
    num_steps=9,
    restarts=RestartLimits(max_restarts=1, window_s=1e6, wait_s=WAIT_S),
    pause_s=WAIT_S,
)
LOST = (Fence(group=GroupId(0)), Fence(group=GroupId(1)))
BACK = (Member(GroupId(0), 1), Member(GroupId(1), 1))


def begun(setup: ControllerSetup = SETUP) -> Controller:
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def fold(controller: Controller, *entries: Entry) -> list[object]:
    """The actions of the last of some entries."""
    actions: list[object] = []
    for entry in entries:
        actions = list(controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0))
    return actions


def paused(setup: ControllerSetup = SETUP) -> Controller:
    controller = begun(setup)
    fold(controller, Commit(step=0, attempt=0), *LOST, Retry(step=1, attempt=1, kept=(1,)))
    assert controller.pause is not None
    return controller


def read(controller: Controller, *waiting: Member, waited_s: float = 0.0) -> list[object]:
    return list(controller.handle(HostsRead(waiting=waiting, waited_s=waited_s), now_s=0.0))


def test_survivors_wait_for_the_hosts_of_a_shard_and_compute_the_step_from_zero_with_them() -> None:
    controller = paused()
    wait = controller.pause
    assert wait == AwaitHosts(index=4, step=1, epoch=2, voters=(Member(2), Member(3)), shards=(1,))
    assert read(controller) == [wait]
    assert read(controller, Member(GroupId(0), 0)) == [wait], "that incarnation is fenced"
    append, again = read(controller, BACK[0], Member(GroupId(1), 0))
    assert append == AppendEntry(index=4, entry=Resume(step=1, attempt=2, admit=BACK[:1]))
    assert again == wait
    admit, build, compute, reduce, _ = fold(controller, append.entry)
    assert isinstance(admit, AdmitGroups)
    assert (admit.members, admit.earlier) == (BACK[:1], (Member(2), Member(3)))
    assert build == BuildCommunicator(key=4, epoch=3, members=(0, 2, 3))
    assert isinstance(compute, ComputeStep)
    work = [item for group in (0, 2, 3) for item in compute.plan.work.of(GroupId(group))]
    assert sorted(work) == [Microbatch(shard, k) for shard in range(4) for k in range(2)]
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.step, reduce.attempt, reduce.kept) == (1, 3, ())
    assert controller.pause is None


def test_training_resumes_with_the_stages_of_those_that_come_back() -> None:
    controller = paused(replace(SETUP, num_stages=4, slabs=Slabs(8, (4, 3, 2))))
    event = HostsRead(waiting=BACK, stages={BACK[1].group: 3, GroupId(3): 2})
    append, _ = controller.handle(event, now_s=0.0)
    assert append == AppendEntry(index=4, entry=Resume(step=1, attempt=2, admit=BACK, stages=(4, 3)))
    fold(controller, append.entry)
    assert controller.stages == {BACK[1].group: 3}


@pytest.mark.parametrize(("num_groups", "redundancy"), [(4, 1), (5, 2), (7, 3)])
def test_training_resumes_exactly_when_every_shard_has_a_host(num_groups: int, redundancy: int) -> None:
    """Against all sets of survivors and of waiting groups."""
    placement = make_placement("golomb", num_groups, redundancy)
    groups = range(num_groups)
    for num_left in range(1, num_groups):
        for left in combinations(groups, num_left):
            others = [group for group in groups if group not in left]
            for number in range(len(others) + 1):
                for back in combinations(others, number):
                    wait = AwaitHosts(index=0, step=3, epoch=1, voters=tuple(map(Member, left)), shards=())
                    asked = [Member(GroupId(group), 1) for group in back]
                    entry = decide_pause(wait, placement, 5, asked, 0.0, WAIT_S)
                    there = {*left, *back}
                    is_covered = all(there & set(hosts) for hosts in placement.hosts)
                    expected = Resume(step=3, attempt=5, admit=tuple(asked)) if is_covered else None
                    assert entry == expected


def test_losses_and_second_fences_in_a_pause_are_further_entries() -> None:
    controller = paused()
    [again] = fold(controller, Fence(group=GroupId(0)))
    assert again == controller.pause
    assert again.index == 5
    [again] = fold(controller, Fence(group=GroupId(1), incarnation=1))
    assert read(controller, BACK[1]) == [again], "it was fenced while it waited"
    build, again = fold(controller, Fence(group=GroupId(2)))
    assert build == BuildCommunicator(key=6, epoch=3, members=(3,))
    assert again.shards == (1, 2)
    later = Member(GroupId(1), 2)
    entry = read(controller, BACK[0], later)[0].entry
    assert entry == Resume(step=1, attempt=2, admit=(BACK[0], later))
    fold(controller, entry)
    assert controller.voters == (BACK[0], later, Member(3))


def test_a_pause_ends_the_run_only_after_the_wait_or_when_the_run_is_to_end() -> None:
    controller = paused()
    assert read(controller, waited_s=WAIT_S - 0.1) == [controller.pause]
    append, _ = read(controller, waited_s=WAIT_S)
    assert isinstance(append.entry, GiveUp)
    assert "groups [0, 1], which host shards [1]" in append.entry.reason
    assert "checkpoint.restart_wait_s=60" in append.entry.reason
    [stop] = fold(controller, append.entry)
    assert isinstance(stop, StopWipeOut)
    assert (stop.is_final, stop.shards, stop.step) == (True, (1,), 1)
    asked = paused()
    asked.handle(EndRequested(), now_s=0.0)
    assert isinstance(read(asked, BACK[0])[0].entry, Resume)
    assert isinstance(read(asked)[0].entry, GiveUp)


def test_without_a_pause_or_a_whole_copy_of_the_state_only_a_restart_follows() -> None:
    without = begun(replace(SETUP, pause_s=None))
    [stop] = fold(without, Commit(step=0, attempt=0), *LOST, Retry(step=1, attempt=1))
    assert stop == StopWipeOut(step=1, shards=(1,))
    controller = paused()
    [stop] = fold(controller, Fence(group=GroupId(2)), Fence(group=GroupId(3)))
    assert stop == StopWipeOut(step=1, shards=(0, 1, 2, 3))
    assert controller.pause is None
    partitioned = paused(replace(SETUP, partitions=PartitionSetup(num_groups=4, redundancy=3)))
    [stop] = fold(partitioned, Fence(group=GroupId(2)))
    assert isinstance(stop, StopWipeOut)
    assert stop.partitions
    assert partitioned.pause is None
    fold(controller, Restart(step=0, members=tuple(Member(GroupId(group), 2) for group in range(4))))
    assert controller.num_restarts == 1


def test_with_partitioned_state_all_gather_parameters_before_they_admit() -> None:
    controller = paused(replace(SETUP, partitions=PartitionSetup(num_groups=4, redundancy=3)))
    gather, admit, build, *_ = fold(controller, Resume(step=1, attempt=2, admit=BACK))
    assert isinstance(gather, GatherParams)
    assert {owner.group for owner in gather.owners} <= {2, 3}
    assert isinstance(admit, AdmitGroups)
    assert isinstance(build, BuildCommunicator)


def test_an_evaluation_is_computed_again_too() -> None:
    evaluation = EvaluationPolicy(every_steps=1, microbatches_per_shard=1)
    controller = begun(replace(SETUP, evaluation=evaluation))
    fold(controller, Commit(step=0, attempt=0), *LOST)
    [build_or_wait, *_] = fold(controller, Retry(step=1, attempt=1))
    assert isinstance(controller.pause or build_or_wait, AwaitHosts)
    *_, compute, attempt, _ = fold(controller, Resume(step=1, attempt=2, admit=BACK))
    assert isinstance(compute, ComputeStep)
    assert compute.plan.is_evaluation
    assert compute.plan.work.num_microbatches == 4
    assert isinstance(attempt, AttemptEvaluation)


def test_a_step_that_is_paused_again_and_again_ends_the_run() -> None:
    controller = paused()
    for number in range(1, MAX_RESUMES_WITHOUT_COMMIT + 1):
        back = tuple(Member(GroupId(group), number) for group in (0, 1))
        fences = [Fence(group=member.group, incarnation=number) for member in back]
        fold(controller, Resume(step=1, attempt=controller.attempt, admit=back), *fences)
        last = fold(controller, Retry(step=1, attempt=controller.attempt))
    assert isinstance(last[-1], StopWipeOut)
    assert last[-1].is_final
    assert "5 times" in last[-1].reason


def test_entries_that_do_not_fit_a_pause_are_refused() -> None:
    for entry in (Commit(step=1, attempt=2), Retry(step=1, attempt=2), Resume(step=1, attempt=1, admit=BACK)):
        with pytest.raises(ValueError, match="log entry"):
            fold(paused(), entry)
    with pytest.raises(ValueError, match="every shard had a host"):
        fold(begun(), Resume(step=0, attempt=0, admit=BACK))


def test_an_entry_of_another_version_is_refused_by_name() -> None:
    resume = Resume(step=1, attempt=2, admit=BACK)
    earlier = '{"attempt": 0, "entry": "commit", "step": 0}'
    later = encode_entry(resume).replace(f'"version":{VERSION}', '"version":99')
    for text, found in ((earlier, 1), (later, 99)):
        with pytest.raises(ValueError, match=f"version {found}; this program reads version {VERSION}"):
            decode_entry(text)


def test_the_loss_of_a_group_that_was_admitted_just_before_a_pause_counts_for_the_cadence() -> None:
    """It took no part in the last attempt before its admission, and none began after it."""
    controller = begun(replace(SETUP, saves=SavePolicy(group_life_s=1e6)))
    fold(controller, Fence(group=GroupId(2)), Commit(step=0, attempt=0), *LOST)
    actions = fold(controller, Commit(step=1, attempt=1, admit=(Member(GroupId(2), 1),)))
    assert isinstance(actions[-1], AwaitHosts)
    fold(controller, Fence(group=GroupId(2), incarnation=1), Resume(step=2, attempt=2, admit=BACK))
    [save] = [one for one in fold(controller, Commit(step=2, attempt=3, save=True)) if isinstance(one, SaveCheckpoint)]
    assert save.cadence is not None
    assert save.cadence.num_losses == 4
