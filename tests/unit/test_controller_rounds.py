"""Where rounds with other sites take place in the log, and how they are decided."""

from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import (
    AppendEntry,
    ApplySync,
    AttemptEvaluation,
    AttemptFinish,
    AttemptSync,
    BuildCommunicator,
    ComputeStep,
    FinishRun,
    SaveCheckpoint,
    TakeSnapshot,
)
from spare_megatron.core.log.entries import Commit, Entry, Evaluated, Fence, Halt, Restart, Retry, Synced, entry_fields
from spare_megatron.core.log.events import RunStarted, VotesRead
from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.core.log.votes import RoundResult, Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy
from spare_megatron.journal.fold import fold_log
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.stacking.placement import make_placement
from tests.unit.journal_in_memory import run_record
from tests.unit.test_controller import fence, fold

RESULT = RoundResult(1, (0, 2), "ab")


def begun(*, steps: int = 4, **setup: Any) -> Controller:
    terms = ControllerSetup(
        placement=make_placement("golomb", 4, 3), microbatches_per_shard=2, num_steps=steps, **setup
    )
    controller = Controller(terms)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def decided(controller: Controller, vote: Vote, *, waiting: tuple[Member, ...] = (), **others: Vote) -> Entry | None:
    """By this vote of all members but those named g0 and so on."""
    votes = {group: others.get(f"g{group}", vote) for group in controller.members}
    event = VotesRead(attempt=controller.attempt, votes=votes, waiting=waiting)
    actions = controller.handle(event, now_s=0.0)
    return actions[0].entry if actions and isinstance(actions[0], AppendEntry) else None


def plain(**fields: Any) -> Vote:
    return Vote(is_complete=True, plan_digest="p", **fields)


def kinds(actions: list[Any]) -> list[type[Any]]:
    return [type(action) for action in actions if not type(action).__name__.startswith(("Read", "Update"))]


def synced(controller: Controller) -> list[object]:
    return fold(controller, Synced(step=controller.step, attempt=controller.attempt, **RESULT._asdict()))


def test_a_vote_that_asks_for_a_round_has_one_follow_the_commit_and_nobody_admitted_before() -> None:
    controller = begun()
    newcomer = (Member(GroupId(1), 1),)
    commit = decided(controller, plain(), g2=plain(sync=True), waiting=newcomer)
    assert commit == Commit(step=0, attempt=0, sync=True)
    assert decided(controller, plain(), waiting=newcomer) == Commit(step=0, attempt=0, admit=newcomer)
    attempt, _ = fold(controller, commit)[1:]
    assert isinstance(attempt, AttemptSync)
    assert (attempt.step, attempt.attempt, attempt.voters) == (1, 1, controller.voters)
    entry = decided(controller, plain(synced=RESULT, params_digest="d"))
    assert entry == Synced(step=1, attempt=1, round=1, sites=(0, 2), digest="ab")
    apply, compute, *_ = fold(controller, entry)
    assert apply == ApplySync(entry=entry)
    assert isinstance(compute, ComputeStep)
    assert (controller.step, controller.attempt, controller.is_syncing) == (1, 2, False)


def test_a_round_that_did_not_come_about_changes_nothing() -> None:
    controller = begun()
    fold(controller, Commit(step=0, attempt=0, sync=True))
    assert decided(controller, plain(synced=RoundResult())) == Synced(step=1, attempt=1)


def test_a_loss_makes_another_attempt_and_no_patch() -> None:
    controller = begun()
    fold(controller, Commit(step=0, attempt=0, sync=True))
    assert kinds(fold(controller, fence(0))) == [BuildCommunicator]
    entry = decided(controller, replace(plain(), is_complete=False), g1=plain(synced=RESULT))
    assert entry == Retry(step=1, attempt=1)
    [attempt] = [action for action in fold(controller, entry) if isinstance(action, AttemptSync)]
    assert (attempt.attempt, attempt.voters[0]) == (2, Member(GroupId(1)))
    assert kinds(synced(controller)) == [ApplySync, ComputeStep, type(controller._attempt())]


def test_a_group_with_another_result_is_fenced_and_results_that_cannot_be_compared_halt() -> None:
    controller = begun()
    fold(controller, Commit(step=0, attempt=0, sync=True))
    vote = plain(synced=RESULT, params_digest="right")
    fenced = decided(controller, vote, g3=replace(vote, params_digest="other"))
    assert isinstance(fenced, Fence)
    assert (fenced.group, fenced.discard) == (3, True)
    assert isinstance(decided(controller, vote, g3=replace(vote, synced=RoundResult())), Halt)


def test_saves_and_snapshots_hold_the_state_after_the_round_and_an_evaluation_follows_it() -> None:
    controller = begun(
        saves=SavePolicy(interval_steps=1),
        snapshots=SnapshotPolicy(every_steps=1, redundancy=1, layout=Layout(num_groups=4)),
        evaluation=EvaluationPolicy(every_steps=1, microbatches_per_shard=1),
    )
    assert kinds(fold(controller, Commit(step=0, attempt=0, sync=True, save=True))) == [AttemptSync]
    actions = synced(controller)
    assert kinds(actions) == [ApplySync, SaveCheckpoint, TakeSnapshot, ComputeStep, AttemptEvaluation]
    [snapshot] = [action for action in actions if isinstance(action, TakeSnapshot)]
    assert (snapshot.step, snapshot.attempt) == (1, 0)
    fold(controller, Evaluated(step=1, attempt=2))
    actions = fold(controller, Commit(step=1, attempt=3, save=True))
    assert kinds(actions) == [SaveCheckpoint, TakeSnapshot, ComputeStep, AttemptEvaluation]


def test_a_round_after_the_last_step_precedes_the_end() -> None:
    controller = begun(steps=1)
    assert kinds(fold(controller, Commit(step=0, attempt=0, sync=True))) == [AttemptSync]
    assert kinds(synced(controller)) == [ApplySync, FinishRun]
    controller = begun(steps=1, saves=SavePolicy(saves_last=True))
    fold(controller, Commit(step=0, attempt=0, sync=True, save=True))
    assert kinds(synced(controller)) == [ApplySync, SaveCheckpoint, AttemptFinish]


def test_a_loss_in_the_round_after_the_last_step_saves_no_state_before_it() -> None:
    """It would be written to the same folder as the state after the round, and could be the last to be."""
    controller = begun(steps=1, saves=SavePolicy(saves_last=True))
    fold(controller, Commit(step=0, attempt=0, sync=True, save=True))
    again = kinds(fold(controller, fence(0), Retry(step=1, attempt=1)))
    assert AttemptSync in again
    assert SaveCheckpoint not in again
    assert kinds(synced(controller)) == [ApplySync, SaveCheckpoint, AttemptFinish]


def test_a_restart_ends_a_round() -> None:
    controller = begun()
    fold(controller, Commit(step=0, attempt=0, sync=True), *(fence(group) for group in range(4)))
    again = tuple(Member(GroupId(group), 1) for group in range(4))
    assert ComputeStep in kinds(fold(controller, Restart(step=0, members=again)))
    assert not controller.is_syncing


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([Synced(step=0, attempt=0)], "ends a round with other sites after 0 steps, and none was due"),
        ([Commit(step=0, attempt=0, sync=True), Commit(step=1, attempt=1)], "the round with other sites that was due"),
        ([Commit(step=0, attempt=0, sync=True), Synced(step=1, attempt=2)], "attempt 2 of step 1 ends a round"),
    ],
)
def test_what_no_correct_run_writes_is_found_in_its_journal(entries: list[Entry], text: str) -> None:
    found = fold_log({index: entry_fields(one) for index, one in enumerate(entries)}, run_record(num_groups=4))
    assert any(text in error for error in found.errors)
