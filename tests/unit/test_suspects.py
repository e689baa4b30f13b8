"""Which microbatches are suspect by their losses; who is asked before the commit, what follows, and how often."""

import math
from dataclasses import replace
from random import Random

import pytest

from spare_megatron.core.audits.audits import AuditPolicy, Boundary, Dispute, MicrobatchDigest, Statement
from spare_megatron.core.audits.suspects import (
    LEAST_STEPS,
    MOST_AT_ONCE,
    MOST_QUESTIONS,
    STEPS_PER_QUESTION,
    WINDOW_STEPS,
    LossWatch,
    QuestionBudget,
)
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import AppendEntry, AttemptReduce, ComputeAudits, ComputeStep
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Retry
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch, Numbered


def losses(*values: float) -> dict[Numbered, float]:
    return {Numbered(Microbatch(ShardId(0), index), index): value for index, value in enumerate(values)}


def watched(num_steps: int, seed: int = 1) -> LossWatch:
    random, watch = Random(seed), LossWatch()
    for step in range(num_steps):
        assert watch.on_losses(step, losses(*(random.gauss(3.0, 0.1) for _ in range(4)))) == []
    return watch


def found(watch: LossWatch, step: int, *values: float) -> list[int]:
    return [suspect.microbatch.number for suspect in watch.on_losses(step, losses(*values))]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_suspect_from_the_first_step_on(value: float) -> None:
    assert found(LossWatch(), 0, 3.0, value) == [1]


@pytest.mark.parametrize("value", [5.0, 1.0, -3.0])
def test_a_loss_far_from_those_before_is_suspect_once_there_are_some(value: float) -> None:
    assert found(watched(LEAST_STEPS), LEAST_STEPS, 3.0, value, 3.1) == [1]
    assert found(watched(LEAST_STEPS - 1), LEAST_STEPS - 1, 3.0, value, 3.1) == []


def test_what_is_suspect_is_not_what_others_are_compared_with() -> None:
    watch = watched(LEAST_STEPS)
    for step in range(LEAST_STEPS, LEAST_STEPS + 3 * WINDOW_STEPS):
        assert found(watch, step, 3.0, 9.0, 3.1) == [1]


def test_the_losses_of_an_earlier_attempt_of_a_step_are_replaced() -> None:
    watch = watched(LEAST_STEPS)
    assert [found(watch, LEAST_STEPS, 3.0, 9.0) for _ in range(4)] == [[1]] * 4


def test_losses_that_are_all_alike_make_a_small_change_no_suspect() -> None:
    watch = LossWatch()
    for step in range(LEAST_STEPS):
        assert found(watch, step, 3.0, 3.0) == []
    assert found(watch, LEAST_STEPS, 3.3, 3.4) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_a_training_that_goes_on_as_usual_has_no_suspects(seed: int) -> None:
    """It falls from 11 to 3 in the first 300 steps and scatters by 5%; then it scatters alone."""
    random, watch = Random(seed), LossWatch()
    for step in range(1500):
        middle = 3.0 + 8.0 * math.exp(-step / 80.0)
        assert found(watch, step, *(random.gauss(middle, 0.05 * middle) for _ in range(8))) == []


OWNER = GroupId(2)
SUSPECT = Microbatch(ShardId(2), 0)


def started(redundancy: int = 4, *, num_groups: int = 4, has_audits: bool = True) -> Controller:
    setup = ControllerSetup(
        placement=make_placement("golomb", num_groups, redundancy),
        microbatches_per_shard=2,
        num_steps=999,
        audits=AuditPolicy(every_steps=500, seed=1) if has_audits else None,
    )
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def decided(
    controller: Controller,
    losses: dict[int, list[int]],
    suspect: Microbatch = SUSPECT,
    *,
    of_vote: Vote | None = None,
    lost: tuple[int, ...] = (),
) -> Entry:
    """What follows if these groups vote with these digests of the suspect's loss."""
    usual = of_vote or Vote(is_complete=True, plan_digest="", num_complete=(3, 1))
    votes = {
        group: replace(
            usual,
            plan_digest=controller._plans[-1].digest,
            losses=tuple(MicrobatchDigest(*suspect, digest) for digest in losses.get(group, [])),
        )
        for group in [*controller.members, *map(GroupId, lost)]
    }
    actions = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
    [entry] = [action.entry for action in actions if isinstance(action, AppendEntry)]
    return entry


def fold(controller: Controller, entry: Entry) -> tuple[object, ...]:
    return controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)


def asked(controller: Controller, losses: dict[int, list[int]], **more: object) -> Retry:
    retry = decided(controller, losses, **more)  # type: ignore[arg-type]
    assert isinstance(retry, Retry)
    return retry


def test_a_suspect_is_computed_by_another_host_and_if_both_agree_the_sum_is_committed() -> None:
    controller = started()
    retry = asked(controller, {OWNER: [7]})
    [dispute] = retry.disputes
    assert (dispute.microbatch, dispute.asked, dispute.is_suspicion) == (SUSPECT, (0, OWNER), True)
    assert (retry.kept, retry.recompute) == ((2, 0), False), "the last bucket is summed again"
    actions = fold(controller, retry)
    assert not [action for action in actions if isinstance(action, ComputeStep)]
    [compute] = [action for action in actions if isinstance(action, ComputeAudits)]
    assert compute.asked_of(OWNER) == compute.asked_of(GroupId(0)) == (SUSPECT,)
    [attempt] = [action for action in actions if isinstance(action, AttemptReduce)]
    assert (attempt.kept, attempt.disputed) == ((2, 0), (SUSPECT,))
    commit = decided(controller, {OWNER: [7, 7], 0: [7]})
    assert isinstance(commit, Commit)
    fold(controller, commit)
    assert controller._audits.disputes == ()


def test_without_audits_a_suspect_is_committed() -> None:
    assert isinstance(decided(started(has_audits=False), {OWNER: [7]}), Commit)


def test_a_group_that_contradicts_itself_is_out_and_the_step_is_computed_again() -> None:
    controller = started(num_groups=2, redundancy=2)
    suspect = Microbatch(ShardId(1), 0)
    fold(controller, asked(controller, {1: [7]}, suspect=suspect))
    fence = decided(controller, {1: [7, 8], 0: [8]}, suspect)
    assert isinstance(fence, Fence)
    assert (fence.group, fence.discard, fence.is_outvoted) == (1, True, True)
    assert fence.reason == "audit of the loss of microbatch 0 of shard 1: it contradicts itself"
    fold(controller, fence)
    again = asked(controller, {0: [8]}, suspect=suspect)
    assert (again.recompute, again.disputes) == (True, ())


def test_one_loss_against_one_asks_a_third_and_the_sum_is_void() -> None:
    controller = started()
    fold(controller, asked(controller, {OWNER: [7]}))
    retry = asked(controller, {OWNER: [7, 7], 0: [8]})
    assert (retry.disputes[0].asked, retry.kept) == ((1,), (3, 1))
    fold(controller, retry)
    with pytest.raises(ValueError, match="discarded"):
        fold(controller, Commit(step=0, attempt=controller.attempt))
    controller = started()
    fold(controller, asked(controller, {OWNER: [7]}))
    fold(controller, asked(controller, {OWNER: [7, 7], 0: [8]}))
    fence = decided(controller, {OWNER: [7, 7], 0: [8], 1: [8]})
    assert isinstance(fence, Fence)
    assert (fence.group, "groups 0, 1 agree on other values" in fence.reason) == (OWNER, True)


def test_two_hosts_that_stand_by_their_losses_halt_the_run() -> None:
    controller = started(num_groups=2, redundancy=2)
    suspect = Microbatch(ShardId(1), 0)
    fold(controller, asked(controller, {1: [7]}, suspect=suspect))
    fold(controller, asked(controller, {1: [7, 7], 0: [8]}, suspect=suspect))
    halt = decided(controller, {1: [7, 7], 0: [8]}, suspect)
    assert isinstance(halt, Halt)
    assert "groups 1 and 0 compute different losses, each the same again" in halt.reason


def test_the_next_host_is_asked_if_one_is_lost_and_the_step_goes_on_if_none_is_left() -> None:
    controller = started()
    retry = asked(controller, {OWNER: [7]})
    for expected in (1, 3):
        fold(controller, retry)
        fold(controller, Fence(group=retry.disputes[0].asked[0], reason="SIGKILL"))
        retry = asked(controller, {OWNER: [7, 7]})
        assert retry.disputes[0].asked == (expected, OWNER)
    fold(controller, retry)
    fold(controller, Fence(group=GroupId(3), reason="SIGKILL"))
    assert isinstance(decided(controller, {OWNER: [7, 7]}), Commit)


def test_a_suspect_without_another_host_is_committed() -> None:
    assert isinstance(decided(started(redundancy=1), {OWNER: [7]}), Commit)


def test_a_wrong_loss_of_a_group_lost_since_it_voted_has_the_step_computed_again() -> None:
    controller = started()
    fold(controller, asked(controller, {OWNER: [7]}))
    fold(controller, Fence(group=OWNER, reason="SIGKILL"))
    void = asked(controller, {OWNER: [7, 7], 0: [8]}, lost=(OWNER,))
    assert void.disputes[0].asked == ()
    fold(controller, void)
    again = asked(controller, {0: [8]})
    assert (again.recompute, again.disputes) == (True, ())


def test_a_statement_about_a_suspect_whose_owner_was_lost_counts() -> None:
    controller = started()
    fold(controller, asked(controller, {OWNER: [7]}))
    fold(controller, Fence(group=OWNER, reason="SIGKILL"))
    fence = decided(controller, {0: [7], 3: [9]})
    assert isinstance(fence, Fence)
    assert (fence.group, "groups 0, 2 agree on other values" in fence.reason) == (3, True)


def test_nothing_is_asked_of_a_sum_that_is_void_already() -> None:
    wrong = Vote(is_complete=False, plan_digest="", num_complete=(3, 1), has_wrong_sum=True)
    assert asked(started(), {OWNER: [7]}, of_vote=wrong).disputes == ()
    controller = started()
    fold(controller, Fence(group=GroupId(3), discard=True))
    assert asked(controller, {OWNER: [7]}).disputes == ()


def test_a_broken_attempt_asks_along_with_its_retry_and_keeps_what_all_hold() -> None:
    incomplete = Vote(is_complete=False, plan_digest="", num_complete=(3, 1))
    retry = asked(started(), {OWNER: [7]}, of_vote=incomplete)
    assert (retry.kept, len(retry.disputes)) == ((3, 1), 1)


def test_a_step_asks_about_few_suspects_at_once_and_about_each_only_once() -> None:
    controller = started(num_groups=7, redundancy=3)
    found: list[Microbatch] = []
    while True:
        votes = {
            group: Vote(
                is_complete=True,
                plan_digest=controller._plans[-1].digest,
                num_complete=(1,),
                losses=tuple(MicrobatchDigest(group, index, 7) for index in range(2)),
            )
            for group in controller.members
        }
        [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
        assert isinstance(append, AppendEntry)
        entry = append.entry
        if isinstance(entry, Commit):
            break
        assert isinstance(entry, Retry)
        new = [dispute.microbatch for dispute in entry.disputes if dispute.num_rounds == 1]
        assert len(new) <= MOST_AT_ONCE
        found += new
        fold(controller, replace(entry, disputes=tuple(d for d in entry.disputes if d.num_rounds == 1)))
    assert len(found) == len(set(found)) == 14
    assert [one.index for one in found[:7]] == [0] * 7, "groups take turns"


def test_noisy_losses_hold_up_no_more_than_their_share_of_steps() -> None:
    controller = started(num_groups=3, redundancy=3)
    num_questions = num_steps = 0
    while num_steps < 4 * STEPS_PER_QUESTION:
        entry = decided(controller, {2: [controller.step]} if not controller._audits.disputes else {2: [1, 1], 0: [1]})
        num_questions += isinstance(entry, Retry)
        num_steps += isinstance(entry, Commit)
        if isinstance(entry, Retry):
            assert num_questions <= MOST_QUESTIONS + num_steps // STEPS_PER_QUESTION
            entry = replace(
                entry, disputes=tuple(replace(d, statements=(Statement(OWNER, 1),)) for d in entry.disputes)
            )
        fold(controller, entry)
    assert num_questions == MOST_QUESTIONS + 3


def test_the_budget_is_full_after_enough_steps_and_holds_no_more() -> None:
    budget = QuestionBudget()
    for _ in range(MOST_QUESTIONS):
        assert budget.is_left
        budget.on_question()
    assert not budget.is_left
    for _ in range(1000):
        budget.on_commit()
    for _ in range(MOST_QUESTIONS):
        assert budget.is_left
        budget.on_question()
    assert not budget.is_left


def test_a_microbatch_with_two_disputes_is_computed_once() -> None:
    """Digests of one microbatch would add up otherwise."""
    dispute = Dispute(microbatch=SUSPECT, statements=(), asked=(OWNER,))
    action = ComputeAudits(step=0, attempt=1, disputes=(dispute, replace(dispute, is_suspicion=True)))
    assert action.asked_of(OWNER) == (SUSPECT,)


def test_gradients_of_a_suspect_that_differ_are_a_dispute_of_their_own() -> None:
    controller = started()
    fold(controller, asked(controller, {OWNER: [7]}))
    boundaries = (Boundary("gradients", 0, 0, 1),)
    votes = {
        group: Vote(is_complete=True, plan_digest=controller._plans[-1].digest, num_complete=(1,))
        for group in controller.members
    }
    for group, digest in ((OWNER, 5), (GroupId(0), 6)):
        digests = (MicrobatchDigest(*SUSPECT, digest, boundaries),)
        votes[group] = replace(votes[group], audits=digests, losses=(MicrobatchDigest(*SUSPECT, 7),))
    [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
    assert isinstance(append, AppendEntry)
    assert isinstance(append.entry, Retry)
    assert [(one.is_suspicion, one.asked) for one in append.entry.disputes] == [(False, (1,))]


def test_what_was_asked_in_a_step_is_forgotten_with_it() -> None:
    controller = started()
    fold(controller, asked(controller, {OWNER: [7]}))
    fold(controller, decided(controller, {OWNER: [7, 7], 0: [7]}))
    assert isinstance(decided(controller, {OWNER: [9]}), Retry)
    fold(controller, Commit(step=1, attempt=controller.attempt, admit=(Member(GroupId(9), 1),)))
