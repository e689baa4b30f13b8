"""What the controller keeps of a failed attempt, bucket by bucket."""

import pytest

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import AppendEntry, AttemptReduce, ComputePatch, ComputeStep
from spare_megatron.core.log.entries import Commit, Retry
from spare_megatron.core.log.events import RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import GroupId
from tests.unit.test_controller import fence, fold, make_controller


def begun() -> Controller:
    controller = make_controller()
    compute, reduce = controller.handle(RunStarted(), now_s=0.0)[1:3]
    assert isinstance(compute, ComputeStep)
    assert compute.into == reduce
    return controller


def decided(controller: Controller, num_complete: dict[int, tuple[int, ...]]) -> object:
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
    controller = begun()
    fold(controller, fence(1))
    entry = decided(controller, counts)
    assert entry == Retry(step=0, attempt=0, kept=kept)
    assert isinstance(entry, Retry)
    compute, reduce, _ = fold(controller, entry)
    assert isinstance(reduce, AttemptReduce)
    assert reduce.kept == kept
    assert isinstance(compute, ComputePatch)
    assert compute.into == reduce


def test_the_next_step_keeps_nothing_of_this_one() -> None:
    controller = begun()
    *_, reduce, _ = fold(controller, Retry(step=0, attempt=0, kept=(4, 4)), Commit(step=0, attempt=1))
    assert isinstance(reduce, AttemptReduce)
    assert (reduce.step, reduce.kept) == (1, ())
