"""What follows when a group's own checks find its numbers wrong: by the rules alone, in a group, and in a journal."""

from collections.abc import Mapping
from dataclasses import replace
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.core.audits.audits import AuditPolicy, MicrobatchDigest
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import AppendEntry, ComputeStep, SaveDispute, StopHalted
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Retry, decode_entry, encode_entry, entry_fields
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.gradient_guard import GradientFinding
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.core.log.votes import WRONG_NUMBERS, Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.formats.codec import decode, encode, set_fields
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.proofs.audit_history import audit_history
from spare_megatron.journal.proofs.proof import Verdict, fold_view
from spare_megatron.journal.records import AuditRecord, EntryRecord, Record
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement, GroupOpinion, RankOutcome
from tests.memory_store import MemoryStore
from tests.unit.journal_in_memory import JournalInMemory, check_journal, run_record
from tests.unit.test_journal_steps import voted, whole

FOUND = "rank 1: the product of layer 3"
SETUP = ControllerSetup(
    placement=make_placement("golomb", 4, 4),
    microbatches_per_shard=2,
    num_steps=9,
    audits=AuditPolicy(every_steps=3, seed=1),
    saves=SavePolicy(interval_steps=1),
)


def begun(**changes: Any) -> Controller:
    controller = Controller(replace(SETUP, **changes))
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def votes_of(controller: Controller, *stated: int, **fields: Any) -> dict[GroupId, Vote]:
    """Of all groups that began the attempt; these have found own numbers wrong."""
    vote = Vote(is_complete=True, plan_digest=controller._plans[-1].digest, num_complete=(4,), **fields)
    wrong = replace(vote, wrong_positions=(1,), wrong_numbers=FOUND)
    return {voter.group: wrong if voter.group in stated else vote for voter in controller._attempted_by}


def decided(controller: Controller, votes: Mapping[GroupId, Vote]) -> Entry:
    [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
    assert isinstance(append, AppendEntry)
    return append.entry


def fold(controller: Controller, entry: Entry) -> tuple[Any, ...]:
    return controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)


# ----------------------------------------------------------------------------------------------------------- the rules


def test_a_group_that_has_found_its_numbers_wrong_is_fenced_and_the_others_compute_the_step_again() -> None:
    controller = begun()
    votes = votes_of(controller, 2)
    fence = decided(controller, votes)
    assert fence == Fence(
        group=GroupId(2),
        reason=f"its own checks found wrong numbers: {FOUND}",
        error=WRONG_NUMBERS,
        discard=True,
        is_outvoted=True,
        wrong_positions=(1,),
    )
    assert decode_entry(encode_entry(fence)) == fence
    assert not [one for one in fold(controller, fence) if isinstance(one, SaveDispute)], "no microbatch is in dispute"
    again = decided(controller, votes)
    assert again == Retry(step=0, attempt=0, recompute=True)
    [compute] = [one for one in fold(controller, again) if isinstance(one, ComputeStep)]
    assert not compute.plan.work.of(GroupId(2))
    assert isinstance(decided(controller, votes_of(controller)), Commit)


def test_what_a_group_has_computed_since_its_last_audit_is_not_clean_once_it_finds_itself_wrong() -> None:
    controller = begun()
    for step in range(5):
        fold(controller, Commit(step=step, attempt=step, save=True))
    assert controller.audited_steps == 3
    fold(controller, decided(controller, votes_of(controller, 2)))
    fold(controller, decided(controller, votes_of(controller, 2)))
    for attempt in (6, 7):
        fold(controller, Commit(step=attempt - 1, attempt=attempt))
    assert controller.audited_steps == 3


def test_two_groups_that_state_it_in_one_attempt_halt_the_run_with_what_both_have_found() -> None:
    halt = decided(begun(), votes_of(begun(), 1, 3))
    assert isinstance(halt, Halt)
    assert halt.reason == (
        f"own checks found wrong numbers in 2 groups in one attempt, which no redundancy masks: group 1: {FOUND}; "
        f"group 3: {FOUND}"
    )
    many = decided(begun(num_steps=8), votes_of(begun(num_steps=8), 0, 1, 2, 3))
    assert isinstance(many, Halt)
    assert many.reason.count(FOUND) == 2, "a reason stays short"


def test_groups_that_state_it_one_after_the_other_in_a_step_halt_the_run_too() -> None:
    """The next one computes what the first has computed: bounds that are too narrow would cost one group after the
    other.
    """
    controller = begun()
    fold(controller, decided(controller, votes_of(controller, 2)))
    fold(controller, decided(controller, votes_of(controller, 2)))
    [stop] = fold(controller, decided(controller, votes_of(controller, 0)))
    assert isinstance(stop, StopHalted)
    assert stop.reason == f"two groups raised the same in one step, which no redundancy masks: {WRONG_NUMBERS}"
    later = begun()
    fold(later, decided(later, votes_of(later, 2)))
    fold(later, decided(later, votes_of(later, 2)))
    fold(later, Commit(step=0, attempt=1))
    assert not [one for one in fold(later, decided(later, votes_of(later, 0))) if isinstance(one, StopHalted)]


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_group_that_is_lost_since_it_stated_it_is_not_fenced_again_and_nothing_of_its_attempt_stays(
    is_complete: bool,
) -> None:
    controller = begun()
    votes = {group: replace(vote, is_complete=is_complete) for group, vote in votes_of(controller, 2).items()}
    fold(controller, Fence(group=GroupId(2), reason="SIGKILL"))
    assert decided(controller, votes) == Retry(step=0, attempt=0, recompute=True)


def test_it_comes_before_audits_suspects_wrong_sums_and_state() -> None:
    """Nor are suspects asked about, whose question would keep the sum, if the group is lost since it voted."""
    suspect = MicrobatchDigest(*Microbatch(0, 0), 7)  # type: ignore[arg-type]
    for fields in (
        {"audits": (suspect,)},
        {"losses": (suspect,)},
        {"has_wrong_sum": True},
        {"params_digest": "other"},
    ):
        for lost in (False, True):
            controller = begun(audits=AuditPolicy(every_steps=1, seed=1))
            votes = votes_of(controller, 2, params_digest="right")
            votes[GroupId(1)] = replace(votes[GroupId(1)], **fields)  # type: ignore[arg-type]
            if "audits" in fields:
                votes[GroupId(2)] = replace(votes[GroupId(2)], audits=(suspect._replace(digest=8),))
            if lost:
                fold(controller, Fence(group=GroupId(2), reason="SIGKILL"))
                entry = decided(controller, votes)
                if "params_digest" in fields:
                    assert isinstance(entry, Fence)
                    assert (entry.group, entry.error, entry.discard) == (1, "", True)
                    continue
                assert isinstance(entry, Retry)
                assert (entry.recompute, entry.kept, entry.disputes) == (True, (), ())
            else:
                entry = decided(controller, votes)
                assert isinstance(entry, Fence)
                assert (entry.group, entry.error) == (2, WRONG_NUMBERS)


def test_a_vote_without_a_finding_has_the_text_that_it_had_before() -> None:
    vote = Vote(is_complete=True, plan_digest="p")
    assert encode(set_fields(vote)) == '{"is_complete":true,"plan_digest":"p"}'
    stated = replace(vote, wrong_positions=(1,), wrong_numbers=FOUND)
    assert decode(encode(set_fields(stated)), Vote) == stated


def test_all_groups_that_compute_are_audited_in_the_last_step() -> None:
    for num_steps, every_steps in ((9, 99), (9, 9), (5, 2), (1, 7)):
        controller = begun(num_steps=num_steps, audits=AuditPolicy(every_steps=every_steps, seed=1))
        audited = []
        for step in range(num_steps):
            audits = controller._plans[0].audits
            if {one.auditor for one in audits} == {0, 1, 2, 3}:
                audited.append(step)
            fold(controller, Commit(step=step, attempt=step))
        assert audited == sorted({*range(every_steps - 1, num_steps, every_steps), num_steps - 1})


# ------------------------------------------------------------------------------------------------------------ the group


class _Ranks(GroupAgreement):
    """The rank of a group whose ranks are threads of this process."""

    def __init__(self, rank: int, barrier: Barrier, slots: list[Any], num_positions: int) -> None:
        ranks = SimpleNamespace(rank=lambda: rank, size=lambda: len(slots))
        log = DecisionLog(MemoryStore({}))  # type: ignore[arg-type]
        super().__init__(Member(GroupId(0)), ranks, log, 1.0, num_positions=num_positions)  # type: ignore[arg-type]
        self._rank, self._barrier, self._slots = rank, barrier, slots

    def gathered(self, value: Any) -> list[Any]:
        self._slots[self._rank] = value
        self._barrier.wait(10.0)
        found = list(self._slots)
        self._barrier.wait(10.0)
        return found

    def _reduce(self, values: torch.Tensor, _op: Any) -> None:
        values.copy_(torch.stack(self.gathered(values.clone())).amax(0))


def settled(texts: list[str], held: list[list[int]]) -> list[GroupOpinion]:
    """The opinions of ranks that hold these positions and have found this."""
    barrier, slots, found = Barrier(len(texts)), [None] * len(texts), dict[int, GroupOpinion]()

    def settle(rank: int) -> None:
        outcome = RankOutcome(
            is_complete=True,
            num_complete=dict.fromkeys(held[rank], 4),
            work_digest="0" * 12,
            loss=LossSum(1.0, 1),
            finding=GradientFinding.SOUND,
            wrong_numbers=texts[rank],
        )
        found[rank] = _Ranks(rank, barrier, slots, 1 + max(map(max, held))).settle(outcome)

    threads = [Thread(target=settle, args=(rank,)) for rank in range(len(texts))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return [found[rank] for rank in range(len(texts))]


def test_all_ranks_of_a_group_know_what_any_has_found_and_the_positions_that_it_holds() -> None:
    for opinion in settled(["", "a product", "", "a sum"], [[0, 2], [1, 3], [4, 6], [5, 7]]):
        assert opinion.wrong_numbers == ("rank 1: a product", "rank 3: a sum")
        assert opinion.wrong_positions == (1, 3, 5, 7)
        assert opinion.is_complete
    for opinion in settled(["", ""], [[0], [1]]):
        assert (opinion.wrong_numbers, opinion.wrong_positions) == ((), ())


# ---------------------------------------------------------------------------------------------------------- the journal


def checked(records: dict[str, Record]) -> tuple[Verdict, JournalInMemory]:
    lines = tuple(Line(source="t", at_s=0.0, record=record) for record in records.values())
    journal = Journal(lines=lines, damage=[])
    return check_journal(journal), JournalInMemory(journal)


STATED = f"{WRONG_NUMBERS}: {FOUND}"


def fenced(*, kept: bool, evidence: str = STATED) -> dict[str, Record]:
    """As `test_journal_steps.whole`, but group 2 votes what `evidence` says and is fenced for own wrong numbers."""
    records = whole()
    records["voted 2 0"] = replace(voted(2, 0, [2], [4, 4]), evidence=evidence)
    fence = Fence(group=GroupId(2), reason=f"its {STATED}", error=WRONG_NUMBERS, discard=True, is_outvoted=True)
    for group in range(2):
        records[f"entry {group} 0"] = EntryRecord(group=group, index=0, entry=entry_fields(fence))
        if not kept:
            retry = Retry(step=0, attempt=0, recompute=True)
            records[f"entry {group} 1"] = EntryRecord(group=group, index=1, entry=entry_fields(retry))
            records[f"brought {group} 1"] = replace(records[f"brought {group} 1"], kept=[])  # type: ignore[call-arg]
    return records


def test_a_journal_with_such_a_fence_is_valid_and_its_audits_name_the_group() -> None:
    verdict, view = checked(fenced(kept=False))
    assert verdict == Verdict(verdict="valid", reasons=(), steps_committed=1)
    run = run_record(3, ranks_per_group=2, num_steps=1)
    [culprit] = audit_history(view, run, fold_view(view, run)).culprits
    assert (culprit.group, culprit.step, culprit.reason) == (2, 0, f"its {STATED}")


def test_no_sum_may_stay_that_a_group_has_found_wrong_itself() -> None:
    verdict, _ = checked(fenced(kept=True))
    assert verdict.verdict == "invalid"
    what = "step 0: a sum is committed that group 2 has found wrong itself"
    assert f"unknown: {what}" in verdict.reasons, "it was lost by then, and may not have cast its vote"
    records = whole()
    records["voted 1 0"] = replace(voted(1, 0, [1], [3, 1]), evidence=STATED)
    verdict, _ = checked(records)
    assert verdict.reasons == (f"invalid: {what.replace('group 2', 'group 1')}",)


def test_a_fence_for_own_wrong_numbers_needs_a_vote_that_states_them() -> None:
    verdict, _ = checked(fenced(kept=False, evidence=""))
    assert verdict.reasons == (
        "invalid: attempt 0: group 2 is fenced for wrong numbers, which its vote does not state",
    )
    records = fenced(kept=False)
    del records["voted 2 0"]
    assert checked(records)[0].verdict == "valid", "the journal lacks what would show it"


def test_a_halt_for_what_several_groups_have_found_is_in_the_list_of_audits() -> None:
    reason = f"{WRONG_NUMBERS} in 2 groups"
    records = {
        "run": run_record(3),
        "entry": EntryRecord(group=0, index=0, entry=entry_fields(Halt(step=0, reason=reason))),
    }
    _, view = checked(records)
    assert audit_history(view, run_record(3), fold_view(view, run_record(3))).halted == reason


@pytest.mark.parametrize(("num_groups_audited", "is_last_known"), [(3, True), (2, True), (0, True), (0, False)])
def test_a_check_remarks_that_the_last_step_has_no_audit(num_groups_audited: int, is_last_known: bool) -> None:
    """A run that goes on says nothing of its last committed step."""
    records: dict[str, Record] = whole()
    records["run"] = replace(records["run"], audit_every_steps=7, num_steps=1 if is_last_known else 2)  # type: ignore[call-arg]
    for group in range(3):
        digests = [[0, 0, "1" * 16]] if group < num_groups_audited else []
        counted = {0: 2, 1: 1, 2: 1}[group]
        records[f"audit {group}"] = AuditRecord(group=group, step=0, attempt=1, digests=digests, num_added=counted)
    remarks = checked(records)[0].remarks
    missing = [group for group in range(2) if num_groups_audited < 2]
    expected = f"the last step, 0, has no audit of groups {', '.join(map(str, missing))}: what began since is not found"
    assert remarks == ((expected,) if missing and is_last_known else ())
    assert not [reason for reason in checked(records)[0].reasons if "no audit" in reason]
