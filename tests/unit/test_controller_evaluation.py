"""Where evaluations take place in the log, and how they are decided."""

import json
from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import (
    Action,
    AdmitGroups,
    AppendEntry,
    AttemptEvaluation,
    AttemptFinish,
    AttemptReduce,
    ComputePatch,
    ComputeStep,
    FinishRun,
    ReportEvaluation,
    SaveCheckpoint,
    StopWipeOut,
)
from spare_megatron.core.log.entries import (
    Commit,
    Entry,
    Evaluated,
    Fence,
    Restart,
    Retry,
    encode_entry,
)
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.loss_sums import EvaluationPolicy, SetSum
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.formats.codec import decode, encode
from spare_megatron.journal.fold import fold_log
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch
from tests.unit.controllers import begun, fence, fold
from tests.unit.journal_in_memory import run_record

LARGE = 10**40
"""No float holds it."""


def evaluating(*, steps: int = 4, **setup: Any) -> Controller:
    """Every two steps, with more microbatches than a step has."""
    evaluation = EvaluationPolicy(every_steps=2, microbatches_per_shard=3)
    return begun(m=2, steps=steps, evaluation=evaluation, **setup)


def commits(controller: Controller, num_steps: int) -> list[object]:
    """The actions of the last of some commits, evaluations left out before it decided."""
    actions: list[object] = []
    for _ in range(num_steps):
        actions = fold(controller, Commit(step=controller.step, attempt=controller.attempt))
    return actions


def decided(controller: Controller, **changes: Any) -> Entry | None:
    """By votes of all groups with a sum each; those of the groups named g0 and so on are changed or left out."""
    cast = {GroupId(g): Vote(is_complete=True, plan_digest="p", sums=(SetSum("a", LARGE + g, 10),)) for g in range(4)}
    for name, vote in changes.items():
        cast[GroupId(int(name[1:]))] = vote
    seen = {group: vote for group, vote in cast.items() if vote is not None}
    actions = controller.handle(VotesRead(attempt=controller.attempt, votes=seen), now_s=0.0)
    return actions[0].entry if actions and isinstance(actions[0], AppendEntry) else None


def kinds(actions: list[Any]) -> list[type[Action]]:
    return [type(action) for action in actions if not type(action).__name__.startswith(("Read", "Build", "Update"))]


def test_an_evaluation_follows_the_commit_and_precedes_the_next_step() -> None:
    controller = evaluating()
    assert kinds(commits(controller, 1)) == [ComputeStep, AttemptReduce]
    actions = commits(controller, 1)
    assert kinds(actions) == [ComputeStep, AttemptEvaluation]
    [compute] = [action for action in actions if isinstance(action, ComputeStep)]
    assert (compute.plan.step, compute.plan.is_evaluation, compute.into) == (2, True, None)
    assert compute.plan.work.of(GroupId(1)) == (Microbatch(1, 0), Microbatch(2, 1), Microbatch(3, 2))
    entry = decided(controller)
    assert entry == Evaluated(step=2, attempt=2, sums=(SetSum("a", 4 * LARGE + 6, 40),))
    report, compute, attempt, _ = fold(controller, entry)
    assert report == ReportEvaluation(step=2, attempt=2, sums=entry.sums)
    assert isinstance(compute, ComputeStep)
    assert isinstance(attempt, AttemptReduce)
    assert (compute.plan.step, compute.plan.is_evaluation, attempt.attempt) == (2, False, 3)


def test_sums_are_exact_in_votes_and_entries() -> None:
    sums = (SetSum("a", LARGE, 7), SetSum("b", None, 3))
    assert decode(encode(sums), tuple[SetSum, ...]) == sums


def test_a_loss_is_not_hidden_by_a_value_that_is_not_finite() -> None:
    controller = evaluating()
    commits(controller, 2)
    entry = decided(controller, g1=Vote(is_complete=True, plan_digest="p", sums=(SetSum("a", None, 10),)))
    assert isinstance(entry, Evaluated)
    assert entry.sums == (SetSum("a", None, 40),)


def test_a_loss_takes_a_vote_with_it_and_costs_a_patch() -> None:
    controller = evaluating()
    commits(controller, 2)
    fold(controller, fence(3))
    entry = decided(controller)
    assert entry == Retry(step=2, attempt=2)
    actions = fold(controller, entry)
    assert kinds(actions) == [ComputePatch, AttemptEvaluation]
    patch, attempt, _ = actions
    patched = [item for group in range(3) for item in patch.plan.work.of(GroupId(group))]
    assert sorted(patched) == [Microbatch(0, 1), Microbatch(1, 2), Microbatch(3, 0)]
    assert patch.plan.is_evaluation
    assert attempt.attempt == 3
    assert decided(controller, g3=None) == Evaluated(step=2, attempt=3, sums=(SetSum("a", 3 * LARGE + 3, 30),))


def test_nothing_of_an_evaluation_is_patched_in_the_step_after_it() -> None:
    controller = evaluating()
    commits(controller, 2)
    fold(controller, Evaluated(step=2, attempt=2), fence(0))
    patch, _, _ = fold(controller, Retry(step=2, attempt=3))
    assert isinstance(patch, ComputePatch)
    assert not patch.plan.is_evaluation
    assert patch.plan.work.num_microbatches == 2


def test_a_group_whose_parameters_differ_has_all_evaluate_again() -> None:
    controller = evaluating()
    commits(controller, 2)
    cast = {
        f"g{group}": Vote(is_complete=True, plan_digest="p", params_digest="b" if group == 2 else "a")
        for group in range(4)
    }
    found = decided(controller, **cast)
    assert isinstance(found, Fence)
    assert (found.group, found.discard) == (2, True)
    fold(controller, found)
    assert decided(controller, **cast) == Retry(step=2, attempt=2, recompute=True)
    with pytest.raises(ValueError, match="was discarded"):
        fold(controller, Evaluated(step=2, attempt=2))


def test_groups_that_come_back_are_admitted_before_the_evaluation_and_take_part_in_it() -> None:
    controller = evaluating()
    fold(controller, fence(3), Commit(step=0, attempt=0))
    actions = fold(controller, Commit(step=1, attempt=1, admit=(Member(GroupId(3), 1),)))
    assert kinds(actions) == [AdmitGroups, ComputeStep, AttemptEvaluation]
    assert actions[-2].voters[-1] == Member(GroupId(3), 1)


def test_the_last_evaluation_follows_the_save_and_precedes_the_end() -> None:
    saving = evaluating(steps=3, saves=SavePolicy(interval_steps=3, saves_last=True))
    commits(saving, 2)
    fold(saving, Evaluated(step=2, attempt=2))
    actions = fold(saving, Commit(step=2, attempt=3, save=True))
    assert kinds(actions) == [SaveCheckpoint, ComputeStep, AttemptEvaluation]
    assert kinds(fold(saving, Evaluated(step=3, attempt=4))) == [ReportEvaluation, AttemptFinish]
    plain = evaluating(steps=2)
    assert kinds(commits(plain, 2)) == [ComputeStep, AttemptEvaluation]
    assert kinds(fold(plain, Evaluated(step=2, attempt=2))) == [ReportEvaluation, FinishRun]


def test_a_run_that_ends_early_evaluates_at_its_end() -> None:
    controller = evaluating(steps=9)
    assert kinds(fold(controller, Commit(step=0, attempt=0, is_last=True))) == [ComputeStep, AttemptEvaluation]


def test_a_run_evaluates_nothing_before_its_first_step() -> None:
    controller = evaluating(first_step=2)
    assert not controller.is_evaluating
    assert kinds(commits(controller, 1)) == [ComputeStep, AttemptReduce]


def test_a_restart_repeats_the_evaluation_of_its_step_and_those_after_it() -> None:
    controller = evaluating(redundancy=1, saves=SavePolicy(interval_steps=2), steps=6)
    commits(controller, 1)
    fold(controller, Commit(step=1, attempt=1, save=True), Evaluated(step=2, attempt=2))
    for group in range(4):
        stop = fold(controller, fence(group))
    assert isinstance(stop[-1], StopWipeOut)
    again = tuple(Member(GroupId(group), 1) for group in range(4))
    assert kinds(fold(controller, Restart(step=2, members=again)))[-2:] == [ComputeStep, AttemptEvaluation]
    assert decided(controller) == Evaluated(step=2, attempt=4, sums=(SetSum("a", 4 * LARGE + 6, 40),))


def test_a_wipe_out_ends_an_evaluation_in_the_middle_of_the_run_and_is_none_at_its_end() -> None:
    for steps, ends in ((4, StopWipeOut), (2, FinishRun)):
        controller = evaluating(redundancy=1, steps=steps)
        commits(controller, 2)
        assert isinstance(fold(controller, fence(3), Retry(step=2, attempt=2))[-1], ends)


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_an_evaluation_that_a_wipe_out_leaves_out_is_not_due_in_the_journal(*, is_lost_first: bool) -> None:
    """It was, for ever: of a run that had ended the journal reported that entries might be missing."""
    controller = evaluating(redundancy=1, steps=2)
    entries: list[Entry] = [Commit(step=0, attempt=0), Commit(step=1, attempt=1)]
    if is_lost_first:  # its part of the last step is in the sum
        entries.insert(1, fence(3))
    else:
        entries += [fence(3), Retry(step=2, attempt=2)]
    actions = fold(controller, *entries)
    assert isinstance(actions[-1], FinishRun)
    run = replace(run_record(4, redundancy=1, num_steps=2, placement="golomb"), eval_every_steps=2)
    found = fold_log({index: json.loads(encode_entry(entry)) for index, entry in enumerate(entries)}, run)
    assert found.errors == []
    assert found.known.is_over


@pytest.mark.parametrize(("num_commits", "entry"), [(1, Evaluated(step=1, attempt=1)), (2, Commit(step=2, attempt=2))])
def test_an_entry_of_the_other_kind_is_refused(num_commits: int, entry: Entry) -> None:
    controller = evaluating()
    commits(controller, num_commits)
    with pytest.raises(ValueError, match=r"that was due|was not due"):
        fold(controller, entry)
