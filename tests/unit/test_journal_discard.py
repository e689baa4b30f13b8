"""What a journal proves of a run whose group had wrong parameters: a whole one by hand, then parts of it changed."""

from collections.abc import Sequence
from typing import Any

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.proofs.proof import Verdict
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    LossRecord,
    ParamsRecord,
    Record,
    UpdateRecord,
    VoteRecord,
    digest_of_work,
)
from spare_megatron.journal.run_record import RunRecord
from tests.unit.journal_in_memory import check_journal

DISCARD = {"entry": "fence", "group": 2, "reason": "", "error": "", "discard": True}
PLAIN = {**DISCARD, "discard": False}
RETRY = {"entry": "retry", "step": 1, "attempt": 1}
AGAIN = {**RETRY, "recompute": True}


def commit(step: int, attempt: int) -> dict[str, Any]:
    return {"entry": "commit", "step": step, "attempt": attempt}


def attempted(group: int, step: int, attempt: int, members: list[int], shards: Sequence[int]) -> list[Record]:
    """A contribution and its vote; every shard is one microbatch."""
    work = digest_of_work((shard, 0) for shard in shards)
    return [
        ContributionRecord(
            group=group,
            step=step,
            attempt=attempt,
            epoch=0,
            members=members,
            microbatches={str(shard): [0] for shard in shards},
        ),
        VoteRecord(group=group, step=step, attempt=attempt, is_complete=True, work_digest=work),
    ]


def updated(group: int, step: int, attempt: int) -> UpdateRecord:
    return UpdateRecord(
        group=group,
        step=step,
        attempt=attempt,
        num_microbatches=3,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        makespan=1,
        step_s=1.0,
    )


def checked(entries: Sequence[dict[str, Any]], wrong: Sequence[int] = (2,), took_part: bool = True) -> Verdict:
    """The verdict on two steps of three groups, of which some have wrong parameters after the first.

    The log decides which attempt of the second step is committed; groups 0 and 1 take over the shard of group 2, which
    may have been lost before it took part in the first.
    """
    records: list[Record] = [
        RunRecord(
            name="by hand",
            num_groups=3,
            ranks_per_group=1,
            redundancy=3,
            microbatches_per_shard=1,
            num_steps=2,
            placement="golomb",
            granularity="microbatch",
            reduce_mode="fast",
            faults=[],
            params_check_every_steps=1,
        )
    ]
    for group in range(3):
        digest = "wrong" if group in wrong else "right"
        records += attempted(group, 0, 0, [0, 1, 2], [group])
        records += [updated(group, 0, 0), ParamsRecord(group=group, step=1, sha256=digest)]
        if took_part or group != 2:
            records += attempted(group, 1, 1, [0, 1, 2], [group])
    last = entries[-1]["attempt"]
    if last == 2:
        records += [*attempted(0, 1, 2, [0, 1], [0, 2]), *attempted(1, 1, 2, [0, 1], [1])]
    for group in range(2):
        records += [EntryRecord(group=group, index=index, entry=entry) for index, entry in enumerate(entries)]
        records += [updated(group, 1, last), ParamsRecord(group=group, step=2, sha256="end")]
    records.append(LossRecord(group=2, rank=0, cause="exit code 4", entry_index=1))
    records.append(EndRecord(outcome="finished", reason=""))
    return check_journal(Journal(lines=tuple(Line(source="test", at_s=0.0, record=record) for record in records)))


def test_a_group_fenced_with_its_part_of_the_sum_discarded_leaves_a_valid_run() -> None:
    verdict = checked([commit(0, 0), DISCARD, AGAIN, commit(1, 2)])
    assert (verdict.verdict, verdict.reasons, verdict.steps_committed) == ("valid", (), 2)


def test_a_sum_that_was_discarded_must_not_be_committed() -> None:
    verdict = checked([commit(0, 0), DISCARD, commit(1, 1)])
    assert verdict.verdict == "invalid"
    assert verdict.reasons == ("invalid: step 1: attempt 1 was discarded, and is committed",)


def test_a_discarded_step_must_be_computed_again_from_zero() -> None:
    verdict = checked([commit(0, 0), DISCARD, RETRY, commit(1, 2)])
    assert verdict.verdict == "invalid"
    assert verdict.reasons == ("invalid: step 1: attempt 1 was discarded, and not all of it is computed again",)


def test_whose_part_was_not_discarded_must_have_had_the_parameters_of_the_others() -> None:
    for entries in ([commit(0, 0), PLAIN, RETRY, commit(1, 2)], [commit(0, 0), PLAIN, commit(1, 1)]):
        verdict = checked(entries)
        assert verdict.verdict == "invalid"
        assert verdict.reasons == ("invalid: after 1 steps the groups hold different parameters",)


def test_a_group_lost_before_it_entered_the_next_reduction_may_have_had_other_parameters() -> None:
    """As a donor whose memory is corrupted right before it gives its state, and which finds its gradient infinite."""
    verdict = checked([commit(0, 0), PLAIN, RETRY, commit(1, 2)], took_part=False)
    assert (verdict.verdict, verdict.reasons, verdict.steps_committed) == ("valid", (), 2)


def test_survivors_must_have_the_same_parameters() -> None:
    verdict = checked([commit(0, 0), DISCARD, AGAIN, commit(1, 2)], wrong=(0, 2))
    assert verdict.verdict == "invalid"
    assert verdict.reasons == ("invalid: after 1 steps the groups hold different parameters",)


def test_a_fence_excuses_the_parameters_of_its_own_step_alone() -> None:
    verdict = checked([DISCARD, commit(0, 0), commit(1, 1)])
    assert "invalid: after 1 steps the groups hold different parameters" in verdict.reasons
