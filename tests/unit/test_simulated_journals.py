"""Simulated runs journal what real ones do: the check proves them, and finds what is changed in them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from spare_megatron.journal.files import Journal, Line, encode_line
from spare_megatron.journal.proofs.proof import Verdict
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    LossRecord,
    ParamsRecord,
    VoteRecord,
)
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.plan.slow_group_costs import SlowRate
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import check_journal, summarize

SCENARIO = Scenario(
    name="journaled",
    num_groups=7,
    redundancy=3,
    microbatches_per_shard=3,
    num_steps=40,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.05, detect_s=2.0, save_s=5.0, restart_s=200.0, join_s=4.0),
    failures=FailureSpec(mean_s=150.0, shape=0.78),
    save_interval_s=300.0,
)


def journal_of(scenario: Scenario, seed: int = 1) -> list[Line]:
    lines: list[Line] = []
    simulate(scenario, seed, journal=lines.append)
    return lines


def verdict_of(lines: list[Line]) -> Verdict:
    return check_journal(Journal(lines=tuple(lines)))


def entries(lines: list[Line], kind: str) -> list[dict[str, Any]]:
    return [r.entry for line in lines if isinstance(r := line.record, EntryRecord) and r.entry["entry"] == kind]


VARIANTS: dict[str, dict[str, Any]] = {
    "restarts": {},
    "stack": {"granularity": "stack"},
    "rejoin": {"repair_s": 300.0},
    "checkpoint_only": {"policy": "checkpoint_only"},
    "partitions": {"redundancy": 5, "partition_redundancy": 2, "partition_copy_s": 30.0, "repair_s": 300.0},
    "partitions without copies": {"redundancy": 5, "partition_redundancy": 3},
    "last_resort": {"redundancy": 1, "last_resort": True, "repair_s": 300.0},
    "slow machines": {
        "repair_s": 300.0,
        "num_spares": 1,
        "replace_slow": True,
        "slow": SlowRate(group_interval_s=2000.0, duration_s=5000.0, factor=8.0),
    },
    "evaluations": {
        "repair_s": 300.0,
        "evaluate_every": 7,
        "costs": dataclasses.replace(SCENARIO.costs, evaluate_s=50.0),
    },
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_every_simulated_journal_is_valid(seed: int, changes: dict[str, Any]) -> None:
    lines = journal_of(dataclasses.replace(SCENARIO, **changes), seed)
    assert verdict_of(lines) == Verdict(verdict="valid", reasons=(), steps_committed=40)
    assert any(isinstance(line.record, LossRecord) for line in lines)


def test_the_journals_contain_restarts_and_joins() -> None:
    lines = journal_of(SCENARIO)
    assert entries(lines, "restart")
    summary = summarize(Journal(lines=tuple(lines)))
    assert summary.steps_lost == len(entries(lines, "commit")) - 40
    rejoined = journal_of(dataclasses.replace(SCENARIO, repair_s=300.0))
    assert any(entry["admit"] for entry in entries(rejoined, "commit"))


def test_the_same_seed_gives_the_same_journal_byte_for_byte_and_journaling_changes_nothing() -> None:
    first, again = ("\n".join(map(encode_line, journal_of(SCENARIO))) for _ in range(2))
    assert first == again
    assert first != "\n".join(map(encode_line, journal_of(SCENARIO, seed=2)))
    lines: list[Line] = []
    assert simulate(SCENARIO, 1, journal=lines.append) == simulate(SCENARIO, 1)


# --------------------------------------------------------------- what the check says of joins and restarts gone wrong


def replaced(lines: list[Line], old: object, new: object) -> list[Line]:
    return [dataclasses.replace(line, record=new) if line.record is old else line for line in lines]  # type: ignore[arg-type]


def test_a_group_that_contributes_between_its_fence_and_its_return_is_found() -> None:
    one_loss = FailureSpec(kind="trace", trace=(Loss(at_s=10.0, groups=(GroupId(1),)),))
    lines = journal_of(dataclasses.replace(SCENARIO, repair_s=50.0, failures=one_loss))
    records = [line.record for line in lines if isinstance(line.record, EntryRecord)]
    entry = next(record for record in records if record.entry.get("admit"))
    no_group = dataclasses.replace(entry, entry={**entry.entry, "admit": ()})
    answer = verdict_of(replaced(lines, entry, no_group))
    assert answer.verdict == "invalid"
    assert any("contributed after it was fenced" in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    ("kind", "what"), [(ContributionRecord, "contributed"), (VoteRecord, "voted")], ids=["contribution", "vote"]
)
def test_an_earlier_incarnation_that_acts_in_the_place_of_the_later_is_found(kind: type, what: str) -> None:
    one_loss = FailureSpec(kind="trace", trace=(Loss(at_s=10.0, groups=(GroupId(1),)),))
    lines = journal_of(dataclasses.replace(SCENARIO, repair_s=50.0, failures=one_loss))
    later = next(r for line in lines if isinstance(r := line.record, kind) and r.incarnation == 1)
    answer = verdict_of(replaced(lines, later, dataclasses.replace(later, incarnation=0)))
    assert answer.verdict == "invalid"
    assert any(f"group 1 {what} after it was fenced" in reason for reason in answer.reasons)


def test_a_fence_of_another_incarnation_than_the_one_that_left_is_found() -> None:
    one_loss = FailureSpec(kind="trace", trace=(Loss(at_s=10.0, groups=(GroupId(1),)),))
    lines = journal_of(dataclasses.replace(SCENARIO, repair_s=50.0, failures=one_loss))
    records = [line.record for line in lines if isinstance(line.record, EntryRecord)]
    fence = next(record for record in records if record.entry["entry"] == "fence")
    later = dataclasses.replace(fence, entry={**fence.entry, "incarnation": 1})
    assert verdict_of(replaced(lines, fence, later)).verdict == "invalid"  # the admission of (1, 1) is void


def test_a_restart_to_a_step_that_was_never_saved_is_found() -> None:
    lines = journal_of(SCENARIO)
    unsaved = [
        dataclasses.replace(line, record=dataclasses.replace(r, entry={**r.entry, "save": False}))
        if isinstance(r := line.record, EntryRecord) and r.entry.get("save")
        else line
        for line in lines
    ]
    assert unsaved != lines
    answer = verdict_of(unsaved)
    assert answer.verdict == "invalid"
    assert any("which was never saved" in reason for reason in answer.reasons)


def test_a_step_that_was_done_again_may_end_in_other_parameters_but_the_groups_have_to_agree() -> None:
    lines = journal_of(SCENARIO)
    last = [line.record for line in lines if isinstance(line.record, ParamsRecord)][-1]
    answer = verdict_of(replaced(lines, last, dataclasses.replace(last, digest="0")))
    assert answer.verdict == "invalid"
    assert "hold different parameters" in answer.reasons[0]
    early = [line.record for line in lines if isinstance(r := line.record, ParamsRecord) and r.num_restarts == 0]
    other = [
        dataclasses.replace(line, record=dataclasses.replace(line.record, digest="0"))  # type: ignore[type-var]
        if line.record in early
        else line
        for line in lines
    ]
    assert other != lines
    assert verdict_of(other).verdict == "valid"


def test_a_missing_contribution_of_a_step_that_was_undone_is_missed_too() -> None:
    lines = journal_of(SCENARIO)
    entry_at = {i: line.record.entry for i, line in enumerate(lines) if isinstance(line.record, EntryRecord)}
    restart_at = next(i for i, entry in entry_at.items() if entry["entry"] == "restart")
    gone = next(
        line.record
        for line in reversed(lines[:restart_at])
        if isinstance(r := line.record, ContributionRecord) and r.group != GroupId(0) and is_committed(lines, r.attempt)
    )
    answer = verdict_of([line for line in lines if line.record is not gone])
    assert answer.verdict == "unknown"
    assert "contribution of group" in answer.reasons[0]


def is_committed(lines: list[Line], attempt: int) -> bool:
    return any(entry["attempt"] == attempt for entry in entries(lines, "commit"))


def test_replication_has_no_log_to_journal() -> None:
    with pytest.raises(ValueError, match="nothing to journal"):
        simulate(dataclasses.replace(SCENARIO, policy="replication"), 0, journal=lambda _: None)


PARTITIONED = Scenario(
    name="partitions",
    num_groups=7,
    redundancy=5,
    microbatches_per_shard=3,
    num_steps=8,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, restart_s=200.0),
    failures=FailureSpec(kind="trace", trace=(Loss(at_s=70.0, groups=(GroupId(1),)),)),
    save_interval_s=300.0,
    partition_redundancy=2,
    partition_copy_s=30.0,
)


def partitioned_journal(scenario: Scenario = PARTITIONED) -> list[Line]:
    lines: list[Line] = []
    simulate(scenario, 0, journal=lines.append)
    return lines


def with_entries(lines: list[Line], change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> list[Line]:
    """The same with every entry changed, or left out where there is none in its place."""
    changed = []
    for line in lines:
        if isinstance(record := line.record, EntryRecord):
            entry = change(dict(record.entry))
            if entry is not None:
                changed.append(dataclasses.replace(line, record=dataclasses.replace(record, entry=entry)))
        else:
            changed.append(line)
    return changed


def finding_in(lines: list[Line]) -> str:
    answer = verdict_of(lines)
    assert answer.verdict == "invalid"
    return "; ".join(answer.reasons)


def test_a_loss_its_copies_and_the_end_are_in_a_valid_journal() -> None:
    lines = partitioned_journal()
    assert verdict_of(lines) == Verdict(verdict="valid", reasons=(), steps_committed=8)
    entries = [line.record.entry for line in lines if isinstance(line.record, EntryRecord)]
    assert sum(len(entry.get("restored", ())) for entry in entries) == 2
    assert entries[-1]["entry"] == "finish"


def test_without_its_copies_the_next_loss_of_a_partition_makes_a_commit_impossible() -> None:
    placed = other_host_of(1)
    losses = (*PARTITIONED.failures.trace, Loss(at_s=400.0, groups=(GroupId(placed),)))
    scenario = dataclasses.replace(PARTITIONED, failures=FailureSpec(kind="trace", trace=losses))
    lines = partitioned_journal(scenario)
    assert verdict_of(lines).verdict == "valid"
    forgotten = with_entries(lines, lambda entry: {**entry, "restored": []} if "restored" in entry else entry)
    assert "had no host" in finding_in(forgotten)


def other_host_of(index: int) -> int:
    """The host of a state partition besides group 1."""
    [other] = set(make_placement("golomb", 7, 2).hosts[index]) - {1}
    return int(other)


def test_a_copy_of_a_group_that_takes_no_part_is_found() -> None:
    def rename(entry: dict[str, Any]) -> dict[str, Any]:
        if entry.get("restored"):
            entry["restored"] = [[index, [1, 0]] for index, _ in entry["restored"]]
        return entry

    assert "takes no part" in finding_in(with_entries(partitioned_journal(), rename))


def test_a_copy_of_what_the_group_has_is_found() -> None:
    def repeat(entry: dict[str, Any]) -> dict[str, Any]:
        if entry.get("restored"):
            entry["restored"] = [*entry["restored"], *entry["restored"]]
        return entry

    assert "which it hosts already" in finding_in(with_entries(partitioned_journal(), repeat))


def with_return() -> list[Line]:
    """Of a run whose lost group comes back and takes its state partitions over."""
    return partitioned_journal(dataclasses.replace(PARTITIONED, num_steps=14, repair_s=300.0))


def test_partitions_that_move_to_a_readmitted_group_are_in_a_valid_journal() -> None:
    lines = with_return()
    assert verdict_of(lines) == Verdict(verdict="valid", reasons=(), steps_committed=14)
    commits = [line.record.entry for line in lines if isinstance(line.record, EntryRecord)]
    back = [
        (index, group) for entry in commits for index, (group, incarnation) in entry.get("restored", ()) if incarnation
    ]
    assert {group for _, group in back} == {1}
    released = [index for entry in commits for index, _ in entry.get("released", ())]
    assert sorted(released) == sorted(index for index, _ in back) != []


def test_a_host_that_releases_a_partition_before_its_copy_is_replaced_is_found() -> None:
    def release_early(entry: dict[str, Any]) -> dict[str, Any]:
        return (
            {**entry, "restored": []}
            if any(incarnation for _, (_, incarnation) in entry.get("restored", ()))
            else entry
        )

    assert "which has 2 hosts" in finding_in(with_entries(with_return(), release_early))


def test_a_group_that_releases_a_partition_it_does_not_host_is_found() -> None:
    def release_again(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "released": [*entry["released"], *entry["released"]]} if entry.get("released") else entry

    assert "which it does not host" in finding_in(with_entries(with_return(), release_again))


def test_an_end_without_whole_parameters_is_found() -> None:
    lines = partitioned_journal()
    answer = verdict_of(with_entries(lines, lambda e: None if e["entry"] == "finish" else e))
    assert answer.verdict == "unknown", "the entry is missing, nothing contradicts it"
    assert "no log entry states" in answer.reasons[0]
    halted = {"entry": "halt", "step": 8, "reason": ""}
    assert "no log entry states" in finding_in(with_entries(lines, lambda e: halted if e["entry"] == "finish" else e))
    [run] = [line.record for line in lines if isinstance(line.record, RunRecord)]
    attempt = max(
        line.record.entry["attempt"]
        for line in lines
        if isinstance(line.record, EntryRecord) and "attempt" in line.record.entry
    )
    vote = VoteRecord(group=2, step=run.num_steps, attempt=attempt, is_complete=False, work_digest="")
    assert "lacked parameters" in finding_in([*lines, dataclasses.replace(lines[-1], record=vote)])


@pytest.mark.parametrize(("slice_redundancy", "verdict"), [(2, "valid"), (0, "invalid")])
def test_a_state_wipe_out_is_a_wipe_out_though_every_shard_has_hosts(slice_redundancy: int, verdict: str) -> None:
    one, other = sorted({1, other_host_of(1)})
    trace = tuple(Loss(at_s=70.0, groups=(GroupId(group),)) for group in (one, other))
    lines = partitioned_journal(dataclasses.replace(PARTITIONED, failures=FailureSpec(kind="trace", trace=trace)))
    assert verdict_of(lines).verdict == "valid"
    # The run as it is without a restart: the log ends with the fences, and the run with the wipe-out.
    restart_at = next(
        index
        for index, line in enumerate(lines)
        if isinstance(line.record, EntryRecord) and line.record.entry["entry"] == "restart"
    )
    lines = [line for line in lines[:restart_at] if not isinstance(line.record, EndRecord)]
    lines.append(dataclasses.replace(lines[-1], record=EndRecord(outcome="wipe_out", reason="partitions")))
    lines = [
        dataclasses.replace(line, record=dataclasses.replace(record, slice_redundancy=slice_redundancy))
        if isinstance(record := line.record, RunRecord)
        else line
        for line in lines
    ]
    reasons = [reason for reason in verdict_of(lines).reasons if "wipe-out" in reason]
    assert bool(reasons) == (verdict == "invalid")
