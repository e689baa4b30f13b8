"""A journal looked at in parts proves what it proves as a whole."""

import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from spare_megatron.journal.files import Line, encode_line, read_journal
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.journal_view import JournalView
from spare_megatron.journal.proofs.proof import check
from spare_megatron.journal.records import ParamsRecord
from spare_megatron.journal.state.summary import sum_up
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import JournalInMemory

SCENARIO = Scenario(
    name="in parts",
    num_groups=5,
    redundancy=3,
    microbatches_per_shard=2,
    num_steps=8,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, detect_s=2.0, save_s=5.0, restart_s=200.0, join_s=4.0),
    failures=FailureSpec(mean_s=120.0),
    save_interval_s=200.0,
)
SCENARIOS = {
    "restarts": SCENARIO,
    "rejoins": dataclasses.replace(SCENARIO, repair_s=100.0),
    "partitions": dataclasses.replace(SCENARIO, partition_redundancy=2, partition_copy_s=30.0, repair_s=100.0),
}
Lines = list[dict[str, Any]]


def journal_of(scenario: Scenario, seed: int, params_every_steps: int) -> Lines:
    """A simulated journal, with digests of the parameters after every so many updates."""
    lines: list[Line] = []
    simulate(scenario, seed, journal=lines.append)
    found_lines = [json.loads(encode_line(line)) for line in lines]
    found_lines[0]["params_check_every_steps"] = params_every_steps
    for line in [
        line for line in found_lines if line["record"] == "update" and (line["step"] + 1) % params_every_steps == 0
    ]:
        digest = hashlib.sha256(f"{scenario.name} after {line['step'] + 1} steps".encode()).hexdigest()
        restarts = {old["index"] for old in found_lines if is_restart(old) and old["at_s"] <= line["at_s"]}
        params = ParamsRecord(group=line["group"], step=line["step"] + 1, digest=digest, num_restarts=len(restarts))
        found_lines.append(json.loads(encode_line(Line(source="", at_s=line["at_s"], record=params))))
    return found_lines


def is_restart(line: dict[str, Any]) -> bool:
    return line["record"] == "entry" and line["entry"]["entry"] == "restart"


def doctor(lines: Lines, random: Random) -> None:
    """One change: a line dropped, doubled, moved to another time, damaged, or another number in it."""
    line = random.choice(lines[1:])
    match random.randrange(7):
        case 0:
            lines.remove(line)
        case 1:
            lines.append(dict(line))
        case 2:
            line["at_s"] = random.choice(lines)["at_s"]
        case 3:
            line["no such name"] = 1
        case 4 if "step" in line:
            line["step"] += random.choice((-3, -1, 1, 3))
        case 5 if "attempt" in line:
            line["attempt"] += random.choice((-3, -1, 1, 3))
        case _:
            which = random.choice([name for name, value in line.items() if isinstance(value, bool | int | str)][3:])
            line[which] = {bool: not line[which], int: 1, str: "b"}[type(line[which])]


def write(lines: Lines, run_dir: Path, random: Random) -> None:
    """As files in which lines are in any order."""
    (run_dir / "journal").mkdir(parents=True)
    random.shuffle(lines)
    for line in lines:
        with (run_dir / "journal" / f"{random.randrange(3)}.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=random.choice([(",", ":"), None])) + "\n")


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_parts_of_any_size_give_the_same_findings_in_the_same_order(scenario: Scenario, tmp_path: Path) -> None:
    num_invalid = 0
    for seed, stretch_bytes in enumerate((3000, 1, 700, 2000, 700, 300)):
        random, run_dir = Random(seed), tmp_path / str(seed)
        lines = journal_of(scenario, seed, params_every_steps=1 + seed % 3)
        for _ in range(2 * seed):
            doctor(lines, random)
        write(lines, run_dir, random)
        whole, evidence = (
            sum_up(JournalInMemory(read_journal(run_dir))),
            JournalIndex(run_dir, stretch_bytes, block_bytes=400),
        )
        assert sum_up(evidence) == whole
        assert evidence.num_stretches > 4, "it was looked at in parts"
        assert whole.verdict == "valid" or seed
        num_invalid += whole.verdict == "invalid"
    assert num_invalid >= 4


def test_the_memory_that_a_proof_takes_hardly_grows_with_the_run(tmp_path: Path) -> None:
    quiet = dataclasses.replace(SCENARIO, failures=FailureSpec(mean_s=1e4), repair_s=100.0)
    whole_bytes, parts_bytes = [], []
    for num_steps in (40, 120):
        lines = journal_of(dataclasses.replace(quiet, num_steps=num_steps), 1, params_every_steps=10)
        run_dir = tmp_path / str(num_steps)
        (run_dir / "journal").mkdir(parents=True)
        texts = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
        (run_dir / "journal" / "all.jsonl").write_text("".join(texts))
        whole_bytes.append(peak_bytes(lambda at=run_dir: JournalInMemory(read_journal(at))))
        parts_bytes.append(peak_bytes(lambda at=run_dir: JournalIndex(at, stretch_bytes=20_000, block_bytes=4000)))
    assert parts_bytes[1] - parts_bytes[0] < (whole_bytes[1] - whole_bytes[0]) / 3


def peak_bytes(make: Callable[[], JournalView]) -> int:
    """Memory that a proof takes at most, with what it looks at."""
    tracemalloc.start()
    try:
        assert sum_up(make()).verdict == "valid"
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", ["step", "attempt", "group", "index"])
def test_a_number_that_is_none_is_damage(tmp_path: Path, key: str) -> None:
    lines = journal_of(SCENARIO, 1, params_every_steps=1)
    line = next(line for line in lines if line["record"] == ("entry" if key == "index" else "vote"))
    line[key] = str(line[key])
    write(lines, tmp_path, Random(1))
    [reason, *_] = check(JournalIndex(tmp_path)).reasons
    assert reason.startswith("invalid: damaged line: ")
    assert f"`$.{key}`" in reason


def test_reading_ends_when_its_time_is_over(tmp_path: Path) -> None:
    write(journal_of(SCENARIO, 1, params_every_steps=1), tmp_path, Random(1))
    with pytest.raises(TimeoutError, match="the time for reading the journal is over"):
        JournalIndex(tmp_path, until_s=0.0)


def test_what_is_no_run_has_no_journal(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is it the directory of a run"):
        JournalIndex(tmp_path)
