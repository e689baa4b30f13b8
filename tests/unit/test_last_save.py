"""What is saved after the last step is compared as well; what does not count where no group is known to be wrong."""

import pytest

from spare_megatron.cli.progress import describe_request
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.controller.restart import RestartLimits
from spare_megatron.core.log.actions import (
    Action,
    AttemptFinish,
    FinishRun,
    ReadEntry,
    RefuseCheckpoint,
    SaveCheckpoint,
    StopHalted,
    UpdateModel,
)
from spare_megatron.core.log.entries import Commit, Entry, Fence, Finish, Halt, Restart, Retry
from spare_megatron.core.log.events import EndRequested
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.state_partitions import PartitionSetup
from tests.unit.controllers import begun, decided, fold, of_type

LAST = Commit(step=0, attempt=0, save=True, is_last=True)


SAVES = SavePolicy(interval_steps=2, saves_last=True)


def make_controller(
    num_groups: int = 4, *, partitions: PartitionSetup | None = None, steps: int = 9, saves: SavePolicy = SAVES
) -> Controller:
    """That of a run which saves its last step, every second one before, and may start again."""
    restarts = RestartLimits(max_restarts=1, window_s=1.0, wait_s=1.0)
    sizes = {"num_groups": num_groups, "redundancy": min(num_groups, 3), "m": 1, "steps": steps}
    return begun(**sizes, saves=saves, partitions=partitions, restarts=restarts)


def voted(controller: Controller, params: str) -> Entry:
    """What follows from votes with these parameter digests, a letter for each group."""
    cast = {
        GroupId(group): Vote(is_complete=True, plan_digest="p", params_digest=digest)
        for group, digest in enumerate(params)
        if digest != "."
    }
    return decided(controller, cast)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_request_that_no_vote_on_the_last_step_carries_saves_nothing_and_promises_nothing(steps: int) -> None:
    controller = make_controller(steps=steps, saves=SavePolicy())
    controller.handle(EndRequested(), now_s=0.0)
    actions = fold(controller, voted(controller, "aaaa"))
    assert saves_in(actions) == []
    assert (FinishRun(step=1, is_asked=False) in actions) == (steps == 1)
    for limit_s in (None, 25.0):
        assert "with a checkpoint if more were to come" in describe_request("SIGTERM", limit_s)


def saves_in(actions: list[Action]) -> list[SaveCheckpoint]:
    return of_type(actions, SaveCheckpoint)


def refusals_in(actions: list[Action]) -> list[RefuseCheckpoint]:
    return of_type(actions, RefuseCheckpoint)


@pytest.mark.parametrize("steps", [1, 9])
def test_a_run_ends_when_all_have_voted_on_what_it_has_saved_last(steps: int) -> None:
    """After the last step, or after one that its time has made the last."""
    controller = make_controller(steps=steps)
    actions = fold(controller, LAST)
    assert [type(action) for action in actions] == [UpdateModel, SaveCheckpoint, AttemptFinish, ReadEntry]
    finish = voted(controller, "aaaa")
    assert finish == Finish(step=1, attempt=1)
    assert fold(controller, finish) == [FinishRun(step=1)]
    assert controller._saves.saved == {0, 1}


def test_a_wrong_checkpoint_of_the_last_step_does_not_count_and_another_group_saves_it_again() -> None:
    controller = make_controller()
    [save] = saves_in(fold(controller, LAST))
    assert save.member == Member(GroupId(0))
    fence = voted(controller, "baaa")
    assert isinstance(fence, Fence)
    assert (fence.group, fence.discard) == (0, True)
    assert [(one.step, one.member) for one in refusals_in(fold(controller, fence))] == [(1, save.member)]
    assert controller._saves.saved == {0}
    retry = voted(controller, "baaa")
    assert retry == Retry(step=1, attempt=1, recompute=True)
    actions = fold(controller, retry)
    [again] = saves_in(actions)
    assert (again.step, again.is_last, again.epoch) == (1, True, 1)
    assert again.member != save.member
    assert isinstance(actions[-2], AttemptFinish), "it is compared, too"
    assert controller._saves.saved == {0, 1}
    assert voted(controller, ".aaa") == Finish(step=1, attempt=2)


def test_a_wrong_group_that_has_not_saved_the_last_step_costs_no_checkpoint() -> None:
    controller = make_controller()
    fold(controller, LAST)
    fence = voted(controller, "aaba")
    assert not refusals_in(fold(controller, fence))
    assert not saves_in(fold(controller, voted(controller, "aaba")))
    assert controller._saves.saved == {0, 1}


@pytest.mark.parametrize("is_last", [False, True])
def test_of_two_groups_that_differ_what_one_has_saved_of_it_does_not_count(*, is_last: bool) -> None:
    controller = make_controller(2)
    fold(controller, Commit(step=0, attempt=0, save=True, is_last=is_last))
    halt = voted(controller, "ab")
    assert isinstance(halt, Halt)
    actions = fold(controller, halt)
    assert [(one.step, one.reason) for one in refusals_in(actions)] == [(1, halt.reason)]
    assert actions[-1] == StopHalted(step=1, reason=halt.reason)


def test_a_run_that_halts_for_another_reason_keeps_its_checkpoint() -> None:
    controller = make_controller(2)
    fold(controller, Commit(step=0, attempt=0, save=True))
    assert fold(controller, Halt(step=1, reason="groups have different plans")) == [
        StopHalted(step=1, reason="groups have different plans")
    ]


@pytest.mark.parametrize(("later", "is_refused"), [(1, True), (2, False)])
def test_what_two_commits_have_compared_counts_whatever_is_found_later(later: int, *, is_refused: bool) -> None:
    controller = make_controller(2)
    fold(controller, Commit(step=0, attempt=0, save=True))
    fold(controller, *(Commit(step=step, attempt=step) for step in range(1, 1 + later)))
    assert bool(refusals_in(fold(controller, voted(controller, "ab")))) == is_refused


def test_what_was_saved_before_a_restart_counts_whatever_is_found_later() -> None:
    controller = make_controller(2)
    incarnations = tuple(Member(GroupId(group), 1) for group in range(2))
    fold(controller, Commit(step=0, attempt=0, save=True), Restart(step=1, members=incarnations))
    assert not refusals_in(fold(controller, voted(controller, "ab"))), "they have loaded the same, and it is whole"


@pytest.mark.parametrize("is_last", [False, True])
def test_where_all_gather_anew_and_no_group_is_fenced_earlier_saves_do_not_count(*, is_last: bool) -> None:
    """An owner has sent what it does not hold: its hosts are right, and the group that saves may have the wrong one."""
    controller = make_controller(partitions=PartitionSetup(num_groups=4, redundancy=3))
    [save] = saves_in(fold(controller, Commit(step=0, attempt=0, save=True, is_last=is_last)))
    actions = fold(controller, Retry(step=1, attempt=1, recompute=True, gather=True))
    assert [(one.step, one.member) for one in refusals_in(actions)] == [(1, save.member)]
    again = saves_in(actions)
    assert len(again) == is_last
    assert all(one.member != save.member for one in again), "who wrote the first may be at it still"


def test_a_group_that_restarts_after_the_time_limit_ends_with_the_same_step() -> None:
    """All groups were lost before they had voted on the last checkpoint, and that cannot be read."""
    controller = make_controller()
    incarnations = tuple(Member(GroupId(group), 1) for group in range(4))
    fold(controller, Commit(step=0, attempt=0, save=True), Commit(step=1, attempt=1, save=True, is_last=True))
    fold(controller, Restart(step=1, members=incarnations))
    last = voted(controller, "aaaa")
    assert last == Commit(step=1, attempt=3, save=True, is_last=True)
    assert isinstance(fold(controller, last)[-2], AttemptFinish)


def test_a_group_that_restarts_from_the_last_step_compares_it_and_ends() -> None:
    controller = make_controller()
    incarnations = tuple(Member(GroupId(group), 1) for group in range(4))
    actions = fold(controller, LAST, Restart(step=1, members=incarnations))
    assert isinstance(actions[-2], AttemptFinish)
    assert fold(controller, voted(controller, "aaaa")) == [FinishRun(step=1)]


def unproven_in(controller: Controller, *entries: Entry) -> tuple[int, ...]:
    """With the save that the last of some entries asks for."""
    [save] = saves_in(fold(controller, *entries))
    return save.doubtful


def test_a_checkpoint_followed_by_fewer_than_two_commits_is_unproven_and_supersedes_no_valid_one() -> None:
    controller = make_controller()
    found = [unproven_in(controller, Commit(step=step, attempt=step, save=True)) for step in range(4)]
    assert found == [(1,), (1, 2), (2, 3), (3, 4)]


def test_a_refused_or_undone_checkpoint_stays_unproven_until_it_is_saved_again() -> None:
    controller = make_controller()
    incarnations = tuple(Member(GroupId(group), 1) for group in range(4))
    commits = [Commit(step=step, attempt=step, save=True) for step in range(4)]
    fold(controller, *commits, Restart(step=2, members=incarnations))
    again = [Commit(step=step, attempt=step + 3, save=step != 3) for step in range(2, 5)]
    assert unproven_in(controller, again[0]) == (3, 4)
    assert unproven_in(controller, *again[1:]) == (4, 5), "undone, and not compared yet"
    refused = fold(controller, Fence(group=GroupId(1), incarnation=1, reason="it differs", discard=True))
    assert [one.step for one in refusals_in(refused)] == [5]
    retry = Retry(step=5, attempt=8, recompute=True)
    later = [retry, Commit(step=5, attempt=9), Commit(step=6, attempt=10, save=True)]
    assert unproven_in(controller, *later) == (4, 5, 7)
