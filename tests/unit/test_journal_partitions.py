"""What the check says of state partitions: of simulated runs, and of what is wrong in their journals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.proofs.proof import Verdict
from spare_megatron.journal.records import EndRecord, EntryRecord, VoteRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import check_journal

SCENARIO = Scenario(
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


def journal_of(scenario: Scenario = SCENARIO) -> list[Line]:
    lines: list[Line] = []
    simulate(scenario, 0, journal=lines.append)
    return lines


def verdict_of(lines: list[Line]) -> Verdict:
    return check_journal(Journal(lines=tuple(lines)))


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
    lines = journal_of()
    assert verdict_of(lines) == Verdict(verdict="valid", reasons=(), steps_committed=8)
    entries = [line.record.entry for line in lines if isinstance(line.record, EntryRecord)]
    assert sum(len(entry.get("restored", ())) for entry in entries) == 2
    assert entries[-1]["entry"] == "finish"


def test_without_its_copies_the_next_loss_of_a_partition_makes_a_commit_impossible() -> None:
    placed = other_host_of(1)
    losses = (*SCENARIO.failures.trace, Loss(at_s=400.0, groups=(GroupId(placed),)))
    scenario = dataclasses.replace(SCENARIO, failures=FailureSpec(kind="trace", trace=losses))
    lines = journal_of(scenario)
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

    assert "takes no part" in finding_in(with_entries(journal_of(), rename))


def test_a_copy_of_what_the_group_has_is_found() -> None:
    def repeat(entry: dict[str, Any]) -> dict[str, Any]:
        if entry.get("restored"):
            entry["restored"] = [*entry["restored"], *entry["restored"]]
        return entry

    assert "which it hosts already" in finding_in(with_entries(journal_of(), repeat))


def with_return() -> list[Line]:
    """Of a run whose lost group comes back and takes its state partitions over."""
    return journal_of(dataclasses.replace(SCENARIO, num_steps=14, repair_s=300.0))


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
    lines = journal_of()
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
    lines = journal_of(dataclasses.replace(SCENARIO, failures=FailureSpec(kind="trace", trace=trace)))
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
