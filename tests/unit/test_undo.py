"""Undos as the controller decides them, and the snapshots that are kept for them."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from spare_megatron.core.audits.audits import AuditPolicy
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import (
    Action,
    AttemptReduce,
    AttemptUndo,
    BuildCommunicator,
    ComputeStep,
    LoadCheckpoint,
    RefuseCheckpoint,
    TakeSnapshot,
)
from spare_megatron.core.log.entries import Commit, Entry, Fence, Retry, Undo
from spare_megatron.core.log.votes import Held, Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy, Snapshots
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.stacking.paces import Rounds
from spare_megatron.stacking.state_partitions import PartitionSetup
from tests.unit.controllers import begun_with, decided, fold, setup_with

AUDITS = AuditPolicy(every_steps=3, seed=1, rounds=Rounds())  # in steps 2, 5, 8
SNAPSHOTS = SnapshotPolicy(every_steps=2, redundancy=1, layout=Layout(num_groups=4, num_nodes=4))
SETUP = setup_with(redundancy=4, m=2, steps=12, audits=AUDITS, snapshots=SNAPSHOTS, saves=SavePolicy(interval_steps=2))
PARTITIONED = replace(SETUP, partitions=PartitionSetup(num_groups=4, redundancy=2))
OUTVOTED = Fence(group=GroupId(2), reason="it is wrong", discard=True, is_outvoted=True)


def found_in_step_5(setup: ControllerSetup) -> tuple[Controller, list[Action]]:
    """Group 2 is outvoted in step 5: what it has computed since step 2 may be wrong. Returns what follows."""
    controller = begun_with(setup)
    for step in range(5):
        fold(controller, Commit(step=step, attempt=step, save=step in (1, 3)))
    assert controller.audited_steps == 3
    fold(controller, OUTVOTED)
    is_shared = setup.partitions is not None
    return controller, fold(controller, Retry(step=5, attempt=5, recompute=True, gather=is_shared))


def voted(controller: Controller, held: Sequence[Held], group: int = 3) -> Entry:
    votes = {group: Vote(is_complete=False, plan_digest="same") for group in controller.members}
    votes[GroupId(group)] = replace(votes[GroupId(group)], held=tuple(held))
    return decided(controller, votes)


def test_spoiled_steps_are_undone_by_the_snapshot_that_the_members_have_whole() -> None:
    controller, actions = found_in_step_5(SETUP)
    assert [type(action) for action in actions[:1]] == [AttemptUndo]
    assert not any(isinstance(action, ComputeStep | BuildCommunicator) for action in actions), "nothing is computed yet"
    entry = voted(controller, [Held(1, 0, "a"), Held(3, 0, "b")])
    assert entry == Undo(step=2, attempt=6, snapshot=1), "the newer one holds step 3, which is not audited"
    refused, load, compute, reduce, _ = fold(controller, entry)
    assert isinstance(refused, RefuseCheckpoint)
    assert refused.step == 4
    assert isinstance(load, LoadCheckpoint)
    assert (load.step, load.snapshot, load.rework_steps) == (2, 1, 3)
    assert load.holders == tuple(Member(GroupId(group)) for group in (0, 1)), "of those that copied it"
    assert isinstance(compute, ComputeStep)
    assert compute.plan.step == 2
    assert compute.plan.audits, "all are audited at once"
    assert isinstance(reduce, AttemptReduce)
    assert (controller.step, controller.attempt, controller.audited_steps) == (2, 7, 2)
    assert controller.members == (0, 1, 3)
    again = fold(controller, Commit(step=2, attempt=7))
    assert not any(isinstance(action, TakeSnapshot) for action in again)
    [taken] = [action for action in fold(controller, Commit(step=3, attempt=8)) if isinstance(action, TakeSnapshot)]
    assert taken.kept == (1,), "what is undone goes"


def test_without_a_whole_snapshot_the_step_is_computed_with_what_is_spoiled() -> None:
    controller, _ = found_in_step_5(SETUP)
    entry = voted(controller, [Held(3, 0, "b")])
    assert entry == Retry(step=5, attempt=6, recompute=True)
    actions = fold(controller, entry)
    assert [type(action) for action in actions[:2]] == [ComputeStep, AttemptReduce]
    again = fold(controller, Retry(step=5, attempt=7, recompute=True))
    assert not any(isinstance(action, AttemptUndo) for action in again), "it is asked once"


@pytest.mark.parametrize(
    "setup",
    [PARTITIONED, replace(SETUP, snapshots=None), replace(SETUP, snapshots=replace(SNAPSHOTS, every_steps=4))],
    ids=["partitioned state", "no snapshots", "none old enough"],
)
def test_what_cannot_be_undone_is_not_asked_about(setup: ControllerSetup) -> None:
    _, actions = found_in_step_5(setup)
    assert not any(isinstance(action, AttemptUndo) for action in actions)
    assert any(isinstance(action, ComputeStep) for action in actions)


def test_an_undo_of_another_attempt_or_to_a_later_step_is_refused() -> None:
    for entry in (Undo(step=2, attempt=5, snapshot=1), Undo(step=5, attempt=6, snapshot=1)):
        controller, _ = found_in_step_5(SETUP)
        with pytest.raises(ValueError, match="goes back to the state after"):
            fold(controller, entry)


@pytest.mark.parametrize("seed", range(40))
def test_the_newest_audited_snapshot_is_kept_beside_the_newest_ones_and_no_more_than_three(seed: int) -> None:
    """Whatever the intervals of audits and snapshots are; against all that were ever taken."""
    random = Random(seed)
    every, audited_every = random.randint(2, 6), random.randint(1, 20)
    snapshots = Snapshots(replace(SNAPSHOTS, every_steps=every))
    held: set[int] = set()
    taken: list[int] = []
    audited = most = 0
    for step in range(1, 120):
        if step % audited_every == 0:
            audited = step
        for action in snapshots.after(step, step, [GroupId(0), GroupId(1)], audited_steps=audited):
            held = {attempt for attempt in held if attempt in action.kept} | {action.attempt}
            taken.append(step)
        wanted = max((one for one in taken if one <= audited), default=None)
        assert wanted is None or wanted in held
        assert [one.attempt for one in snapshots.clean(audited)][-1:] == ([] if wanted is None else [wanted])
        most = max(most, len(held))
    assert most == (2 if audited_every <= every else 3) or most == 2
