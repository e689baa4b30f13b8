"""What follows when sums over groups contradict their checksums: the step anew, and blame only where it is sure."""

import pytest

from spare_megatron.core.controller.controller import MAX_RETRIES_WITHOUT_LOSS, Controller
from spare_megatron.core.log.actions import AppendEntry, ComputeStep, StopHalted
from spare_megatron.core.log.entries import Commit, Entry, Fence, Retry
from spare_megatron.core.log.events import RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.state_partitions import PartitionSetup
from tests.unit.test_controller import fence, fold, make_controller


def begun() -> Controller:
    controller = make_controller()
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def decided(controller: Controller, wrong: set[int], incomplete: frozenset[int] = frozenset()) -> Entry:
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
    controller = begun()
    entry = decided(controller, {0, 1, 2, 3})
    groups = tuple(map(GroupId, range(4)))
    assert entry == Retry(step=0, attempt=0, recompute=True, wrong_sums=groups)
    first = controller._plans[0]
    _, compute, *_ = fold(controller, entry)
    assert isinstance(compute, ComputeStep)
    assert compute.plan.work.digest == first.work.digest
    assert compute.plan.digest != first.digest, "or groups would take it for what they have computed"
    assert decided(controller, set()) == Commit(step=0, attempt=1)


def test_a_group_that_alone_receives_a_wrong_sum_is_lost_the_second_time() -> None:
    controller = begun()
    entry = decided(controller, {2})
    assert entry == Retry(step=0, attempt=0, recompute=True, wrong_sums=(GroupId(2),))
    fold(controller, entry)
    entry = decided(controller, {2})
    assert isinstance(entry, Fence)
    assert (entry.group, entry.discard) == (2, True)
    assert "it alone found sums over groups wrong" in entry.reason
    fold(controller, entry)
    assert decided(controller, set()) == Retry(step=0, attempt=1, recompute=True)


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
    controller = begun()
    fold(controller, decided(controller, first))
    assert isinstance(decided(controller, second, frozenset(incomplete)), Retry)


def test_what_a_group_found_in_the_step_before_is_not_held_against_it() -> None:
    controller = begun()
    fold(controller, decided(controller, {2}), Commit(step=0, attempt=1))
    assert isinstance(decided(controller, {2}), Retry)


def test_with_state_partitions_parameters_are_gathered_anew_and_no_group_is_blamed() -> None:
    controller = make_controller(partitions=PartitionSetup(num_groups=4, redundancy=2))
    controller.handle(RunStarted(), now_s=0.0)
    for attempt in range(2):
        entry = decided(controller, {2})
        assert entry == Retry(step=0, attempt=attempt, recompute=True, gather=True, wrong_sums=(GroupId(2),))
        fold(controller, entry)


def test_a_loss_in_the_attempt_does_not_save_a_wrong_sum() -> None:
    controller = begun()
    fold(controller, fence(1))
    entry = decided(controller, {0}, frozenset({2, 3}))
    assert entry == Retry(step=0, attempt=0, recompute=True, wrong_sums=(GroupId(0),))


def test_sums_that_are_wrong_again_and_again_halt_the_run() -> None:
    controller = begun()
    for _ in range(MAX_RETRIES_WITHOUT_LOSS):
        fold(controller, decided(controller, {0, 1, 2, 3}))
    entry = decided(controller, {0, 1, 2, 3})
    [stop] = fold(controller, entry)
    assert isinstance(stop, StopHalted)
    assert "contradicted their checksums on groups 0, 1, 2, 3" in stop.reason
