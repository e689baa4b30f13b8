"""What a journal proves of steps: buckets of several attempts, and sums that were discarded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

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
from tests.unit.journal_in_memory import check_journal, run_record

RUN = run_record(3, name="by hand", ranks_per_group=2, num_steps=1)
FENCE = {"entry": "fence", "group": 2, "reason": "", "error": "", "discard": False}
RETRY = {"entry": "retry", "step": 0, "attempt": 0, "kept": [2, 1], "recompute": False}
COMMIT = {"entry": "commit", "step": 0, "attempt": 1}


def brought(group: int, attempt: int, members: list[int], shards: list[int], kept: list[int]) -> ContributionRecord:
    """Every shard is one microbatch."""
    return ContributionRecord(
        group=group,
        step=0,
        attempt=attempt,
        epoch=attempt,
        members=members,
        microbatches={str(shard): [0] for shard in shards},
        kept=kept,
    )


def voted(group: int, attempt: int, shards: list[int], num_complete: list[int]) -> VoteRecord:
    return VoteRecord(
        group=group,
        step=0,
        attempt=attempt,
        is_complete=num_complete == [4, 4],
        work_digest=digest_of_work((shard, 0) for shard in shards),
        num_complete=num_complete,
    )


def whole() -> dict[str, Record]:
    """Group 2 dies in the first attempt; of the four buckets of the two ranks, two and one are kept of it."""
    all_groups, left = [0, 1, 2], [0, 1]
    records: dict[str, Record] = {"run": RUN}
    for group in all_groups:
        records[f"brought {group} 0"] = brought(group, 0, all_groups, [group], [])
    records["voted 0 0"] = voted(0, 0, [0], [2, 2])
    records["voted 1 0"] = voted(1, 0, [1], [3, 1])
    records["loss"] = LossRecord(group=2, rank=0, cause="SIGKILL", entry_index=0)
    for group, shards in ((0, [0, 2]), (1, [1])):
        records[f"brought {group} 1"] = brought(group, 1, left, shards, [2, 1])
        records[f"voted {group} 1"] = voted(group, 1, shards, [4, 4])
        for index, entry in enumerate((FENCE, RETRY, COMMIT)):
            records[f"entry {group} {index}"] = EntryRecord(group=group, index=index, entry=entry)
        records[f"updated {group}"] = UpdateRecord(
            group=group,
            step=0,
            attempt=1,
            num_microbatches=3,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            makespan=1,
            step_s=1.0,
        )
        records[f"params {group}"] = ParamsRecord(group=group, step=1, sha256="end")
    records["end"] = EndRecord(outcome="finished", reason="")
    return records


def checked(records: dict[str, Record]) -> Verdict:
    return check_journal(Journal(lines=tuple(Line(source="t", at_s=0.0, record=r) for r in records.values())))


def with_retry(**changes: Any) -> dict[str, Record]:
    records = whole()
    for group in range(2):
        records[f"entry {group} 1"] = EntryRecord(group=group, index=1, entry={**RETRY, **changes})
    return records


def test_buckets_kept_of_a_failed_attempt_leave_a_valid_run() -> None:
    assert checked(whole()) == Verdict(verdict="valid", reasons=(), steps_committed=1)


def test_what_is_kept_of_a_lost_group_must_be_in_the_journal() -> None:
    records = whole()
    del records["brought 2 0"]
    assert checked(records).reasons == ("unknown: step 0: the contribution of group 2 is not in the journal",)


def test_an_attempt_of_which_nothing_is_kept_need_not_be_whole() -> None:
    records = with_retry(kept=[0, 0])
    del records["brought 2 0"]
    for group in range(2):
        contribution = records[f"brought {group} 1"]
        assert isinstance(contribution, ContributionRecord)
        records[f"brought {group} 1"] = replace(contribution, kept=[0, 0])
    assert checked(records).verdict == "valid"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("brought 1 0", {"microbatches": {"1": [0], "2": [0]}}, "counted more than once: [(2, 0)]"),
        ("brought 0 1", {"microbatches": {"0": [0]}}, "missing: [(2, 0)]"),
        ("brought 0 1", {"kept": [1, 1]}, "reduced other buckets in attempt 1 than the log says"),
        ("voted 1 0", {"num_complete": [1, 1]}, "buckets are kept whose sums group 1 did not hold"),
        ("voted 1 0", {"num_complete": []}, "buckets are kept whose sums group 1 did not hold"),
    ],
)
def test_every_range_of_buckets_counts_every_microbatch_once(name: str, changes: dict[str, Any], reason: str) -> None:
    records = whole()
    records[name] = replace(records[name], **changes)
    verdict = checked(records)
    assert verdict.verdict == "invalid"
    assert any(reason in text for text in verdict.reasons), verdict.reasons


def test_without_a_vote_it_is_unknown_what_could_be_kept() -> None:
    records = whole()
    del records["voted 1 0"]
    assert checked(records).reasons == ("unknown: step 0: no vote of group 1 says what it kept",)


def test_what_is_kept_only_grows_within_a_step() -> None:
    records = whole()
    for group in range(2):
        again = {"entry": "retry", "step": 0, "attempt": 1, "kept": [2, 0], "recompute": False}
        records[f"entry {group} 2"] = EntryRecord(group=group, index=2, entry=again)
        records[f"entry {group} 3"] = EntryRecord(group=group, index=3, entry={**COMMIT, "attempt": 2})
    reasons = checked(records).reasons
    assert "invalid: step 0: after attempt 1 fewer buckets are kept than before" in reasons


DISCARD = {"entry": "fence", "group": 2, "reason": "", "error": "", "discard": True}
PLAIN = {**DISCARD, "discard": False}
DISCARDING = {"entry": "retry", "step": 1, "attempt": 1}
AGAIN = {**DISCARDING, "recompute": True}


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


def checked_steps(entries: Sequence[dict[str, Any]], wrong: Sequence[int] = (2,), took_part: bool = True) -> Verdict:
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
    verdict = checked_steps([commit(0, 0), DISCARD, AGAIN, commit(1, 2)])
    assert (verdict.verdict, verdict.reasons, verdict.steps_committed) == ("valid", (), 2)


def test_a_sum_that_was_discarded_must_not_be_committed() -> None:
    verdict = checked_steps([commit(0, 0), DISCARD, commit(1, 1)])
    assert verdict.verdict == "invalid"
    assert verdict.reasons == ("invalid: step 1: attempt 1 was discarded, and is committed",)


def test_a_discarded_step_must_be_computed_again_from_zero() -> None:
    verdict = checked_steps([commit(0, 0), DISCARD, DISCARDING, commit(1, 2)])
    assert verdict.verdict == "invalid"
    assert verdict.reasons == ("invalid: step 1: attempt 1 was discarded, and not all of it is computed again",)


def test_whose_part_was_not_discarded_must_have_had_the_parameters_of_the_others() -> None:
    for entries in ([commit(0, 0), PLAIN, DISCARDING, commit(1, 2)], [commit(0, 0), PLAIN, commit(1, 1)]):
        verdict = checked_steps(entries)
        assert verdict.verdict == "invalid"
        assert verdict.reasons == ("invalid: after 1 steps the groups hold different parameters",)


def test_a_group_lost_before_it_entered_the_next_reduction_may_have_had_other_parameters() -> None:
    """As a donor whose memory is corrupted right before it gives its state, and which finds its gradient infinite."""
    verdict = checked_steps([commit(0, 0), PLAIN, DISCARDING, commit(1, 2)], took_part=False)
    assert (verdict.verdict, verdict.reasons, verdict.steps_committed) == ("valid", (), 2)


def test_survivors_must_have_the_same_parameters() -> None:
    verdict = checked_steps([commit(0, 0), DISCARD, AGAIN, commit(1, 2)], wrong=(0, 2))
    assert verdict.verdict == "invalid"
    assert verdict.reasons == ("invalid: after 1 steps the groups hold different parameters",)


def test_a_fence_excuses_the_parameters_of_its_own_step_alone() -> None:
    verdict = checked_steps([DISCARD, commit(0, 0), commit(1, 1)])
    assert "invalid: after 1 steps the groups hold different parameters" in verdict.reasons
