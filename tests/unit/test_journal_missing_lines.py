"""Missing lines make a verdict unknown and never invalid; what contradicts the lines that are left is still found."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.proofs.proof import Verdict
from spare_megatron.journal.records import ContributionRecord, EndRecord, EntryRecord, ParamsRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import check_journal

Lines = list[Line]

SCENARIO = Scenario(
    name="missing lines",
    num_groups=7,
    redundancy=3,
    microbatches_per_shard=3,
    num_steps=12,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.05, detect_s=2.0, save_s=5.0, restart_s=200.0, join_s=4.0),
    failures=FailureSpec(mean_s=150.0, shape=0.78),
    save_interval_s=300.0,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "restarts": {},
    "rejoin": {"repair_s": 300.0},
    "partitions": {"redundancy": 5, "partition_redundancy": 2, "partition_copy_s": 30.0, "repair_s": 300.0},
}


def journal_of(changes: Mapping[str, Any], seed: int) -> Lines:
    lines: Lines = []
    simulate(dataclasses.replace(SCENARIO, **changes), seed, journal=lines.append)
    return lines


def verdict_of(lines: Lines) -> Verdict:
    return check_journal(Journal(lines=tuple(lines)))


# -------------------------------------------------------------------------------------------------- what is left of it


def without_a_line(lines: Lines, random: Random) -> Lines:
    number = random.randrange(1, len(lines))
    return lines[:number] + lines[number + 1 :]


def without_many_lines(lines: Lines, random: Random) -> Lines:
    share = random.random()
    return [line for line in lines if isinstance(line.record, RunRecord) or random.random() < share]


def without_an_entry(lines: Lines, random: Random) -> Lines:
    index = random.choice(indices_of(lines))
    return [line for line in lines if not (isinstance(r := line.record, EntryRecord) and r.index == index)]


def without_the_end_of_the_log(lines: Lines, random: Random) -> Lines:
    index = random.choice(indices_of(lines))
    return [line for line in lines if not (isinstance(r := line.record, EntryRecord) and r.index >= index)]


def without_a_kind(lines: Lines, random: Random) -> Lines:
    kind = type(random.choice(lines).record)
    return [line for line in lines if isinstance(line.record, RunRecord) or not isinstance(line.record, kind)]


def without_the_end_of_each_file(lines: Lines, random: Random) -> Lines:
    """As a full disk leaves it; the driver's file has room for the end of the run."""
    files: dict[int, Lines] = defaultdict(list)
    for line in lines:
        files[getattr(line.record, "group", -1)].append(line)
    kept = {id(line) for line in files.pop(-1)}
    for file in files.values():
        kept |= {id(line) for line in file[: random.randrange(len(file) + 1)]}
    return [line for line in lines if id(line) in kept]


def without_all_that_was_late(lines: Lines, random: Random) -> Lines:
    return [*lines[: random.randrange(1, len(lines))], lines[-1]]


REMOVALS: list[Callable[[Lines, Random], Lines]] = [
    without_a_line,
    without_many_lines,
    without_an_entry,
    without_the_end_of_the_log,
    without_a_kind,
    without_the_end_of_each_file,
    without_all_that_was_late,
]


def indices_of(lines: Lines) -> list[int]:
    return sorted({record.index for line in lines if isinstance(record := line.record, EntryRecord)})


@pytest.mark.parametrize("remove", REMOVALS, ids=[remove.__name__ for remove in REMOVALS])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("seed", range(2))
def test_what_is_missing_contradicts_nothing(
    changes: Mapping[str, Any], remove: Callable[[Lines, Random], Lines], seed: int
) -> None:
    """The log ended with step 134 of 150: the verdict was `invalid`, of a run that had committed all of them."""
    lines, random = journal_of(changes, seed), Random(seed)
    assert verdict_of(lines).verdict == "valid"
    for _ in range(6):
        answer = verdict_of(remove(lines, random))
        assert answer.verdict != "invalid", [text for text in answer.reasons if text.startswith("invalid")]


def test_a_run_whose_log_ends_early_is_unknown_and_the_reason_says_so() -> None:
    lines = journal_of({}, 0)
    cut = next(n for n, line in enumerate(lines) if isinstance(r := line.record, EntryRecord) and "step" in r.entry)
    answer = verdict_of([*lines[: cut + 1], lines[-1]])
    assert isinstance(lines[-1].record, EndRecord)
    assert answer.verdict == "unknown"
    assert any("the journal lacks the log after 1 of 12 steps" in reason for reason in answer.reasons)


def test_consecutive_missing_entries_are_one_reason() -> None:
    lines = journal_of({}, 0)
    left = [line for line in lines if not (isinstance(r := line.record, EntryRecord) and 3 <= r.index < 7)]
    assert "unknown: log entries 3 to 6 are not in the journal" in verdict_of(left).reasons


def count_twice(lines: Lines) -> Lines:
    """One microbatch of the first step."""
    number, record = next((n, r) for n, line in enumerate(lines) if isinstance(r := line.record, ContributionRecord))
    microbatches = {shard: [*indices, *indices] for shard, indices in record.microbatches.items()}
    return with_record(lines, number, dataclasses.replace(record, microbatches=microbatches))


def change_a_digest(lines: Lines) -> Lines:
    number, record = next((n, r) for n, line in enumerate(lines) if isinstance(r := line.record, ParamsRecord))
    return with_record(lines, number, dataclasses.replace(record, digest="0"))


def finish_too_early(lines: Lines) -> Lines:
    """The log says that the run is over where most of its steps are still to come."""
    number, record = next(
        (n, r) for n, line in enumerate(lines) if isinstance(r := line.record, EntryRecord) and "step" in r.entry
    )
    finish = dataclasses.replace(record, index=record.index + 1, entry={"entry": "finish", "step": 1, "attempt": 1})
    return [*lines[: number + 1], dataclasses.replace(lines[number], record=finish), lines[-1]]


def with_record(lines: Lines, number: int, record: Any) -> Lines:
    return [*lines[:number], dataclasses.replace(lines[number], record=record), *lines[number + 1 :]]


@pytest.mark.parametrize("doctor", [count_twice, change_a_digest, finish_too_early])
def test_a_contradiction_before_what_is_missing_is_still_one(doctor: Callable[[Lines], Lines]) -> None:
    lines = doctor(journal_of({"failures": FailureSpec(mean_s=1e12)}, 0))
    last = max(indices_of(lines))
    left = [line for line in lines if not (isinstance(r := line.record, EntryRecord) and r.index == last)]
    for some in (lines, left if doctor is count_twice else lines):
        assert verdict_of(some).verdict == "invalid"


# ------------------------------------------------------------------------------------------------ ended at once


@pytest.mark.parametrize("outcome", ["interrupted", "stopped", None])
def test_a_run_that_was_ended_between_a_commit_and_its_updates_lacks_none(outcome: Any) -> None:
    """Wherever its processes were ended; one that was not ended so lacks them."""
    calm = {"failures": FailureSpec(kind="system", mean_s=1e9)}
    lines, reasons, verdicts = journal_of(calm, 1), set(), set()
    updates = [number for number, line in enumerate(lines) if isinstance(line.record, UpdateRecord)]
    for cut in updates:
        end = [dataclasses.replace(lines[-1], record=EndRecord(outcome=outcome, reason=""))] if outcome else []
        verdict = verdict_of([*lines[:cut], *end])
        verdicts.add(verdict.verdict)
        reasons |= {reason for reason in verdict.reasons if "no update of group" in reason}
    assert "invalid" not in verdicts
    assert bool(reasons) == (outcome is None)
    assert ("valid" in verdicts) == (outcome == "interrupted"), "a step before the last was compared"
