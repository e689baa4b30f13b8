"""A journal read in parts, as it grows, and in other formats."""

import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import FORMAT, JournalWriter, Line, encode_line, read_journal
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.journal_view import JournalView
from spare_megatron.journal.proofs.proof import check
from spare_megatron.journal.records import CadenceRecord, EndRecord, LossRecord, ParamsRecord, VoteRecord
from spare_megatron.journal.run_record import FirstTerms, RunRecord, digest_of_terms
from spare_megatron.journal.state.follow import JournalTail
from spare_megatron.journal.state.summary import sum_up
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import JournalInMemory, run_record

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


RUN = run_record(2, format=FORMAT, name="kept", num_steps=0)
CADENCE = {
    "group": 0,
    "step": 3,
    "interval_s": 60.0,
    "save_s": 1.0,
    "group_interval_s": 1e6,
    "absence_s": None,
    "time_to_wipe_out_s": 1e6,
    "num_losses": 0,
    "exposure_s": 9.0,
    "num_members": 2,
}
OF_CADENCE = {"record": "cadence", "source": "group-0000-rank-0", "at_s": 2.0, **CADENCE}


def journal_at(run_dir: Path, journal_format: int | None, *lines: dict[str, Any], **of_run: Any) -> Path:
    """A run that had nothing to commit; its records as a version that writes this format would have them."""
    last = (ParamsRecord(group=group, step=0, sha256="f" * 64) for group in range(RUN.num_groups))
    for record in (RUN, *last, EndRecord(outcome="finished", reason="")):
        writer = JournalWriter(run_dir, "driver", now_s=lambda: 1.0)
        writer.write(record)
        writer.close()
    file = run_dir / "journal" / "driver.jsonl"
    first, *others = [json.loads(text) for text in file.read_text().splitlines()]
    del first["format"]
    first |= of_run if journal_format is None else {"format": journal_format, **of_run}
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))
    (run_dir / "journal" / "group-0000-rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_what_this_version_writes_says_its_format(tmp_path: Path) -> None:
    journal = read_journal(journal_at(tmp_path, FORMAT))
    assert [run.format for run in journal.of(RunRecord)] == [FORMAT]
    assert check(JournalIndex(tmp_path)).verdict == "valid"


def test_a_cadence_as_the_first_format_had_it_is_read(tmp_path: Path) -> None:
    """It had the mean time of a restart, too; `spare check` took that for damage."""
    run_dir = journal_at(tmp_path, None, {**OF_CADENCE, "restart_s": 30.0})
    verdict = check(JournalIndex(run_dir))
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    journal = read_journal(run_dir)
    assert [run.format for run in journal.of(RunRecord)] == [1]
    assert journal.of(CadenceRecord) == [CadenceRecord(**CADENCE)]  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [{"record": "omen"}, {**OF_CADENCE, "moon": "full"}], ids=["kind", "field"])
@pytest.mark.parametrize(
    ("journal_format", "verdict", "reason"),
    [
        (
            None,
            "unknown",
            f"unknown: a line is not as format {FORMAT} has it, and the journal is of format 1: group-0000",
        ),
        (FORMAT, "invalid", "invalid: damaged line: group-0000"),
    ],
    ids=["first", "this"],
)
def test_a_line_that_fits_no_record_is_damage_in_a_journal_of_this_format_alone(
    tmp_path: Path, line: dict[str, Any], journal_format: int | None, verdict: str, reason: str
) -> None:
    found = check(JournalIndex(journal_at(tmp_path, journal_format, line)))
    assert found.verdict == verdict
    assert found.reasons[0].startswith(reason)


@pytest.mark.parametrize("command", ["check", "status", "report"])
@pytest.mark.parametrize("has_origin", [True, False])
def test_a_journal_of_a_later_format_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, command: str, *, has_origin: bool
) -> None:
    run_dir = journal_at(tmp_path, FORMAT + 1, {"record": "omen"}, moon="full")
    if has_origin:
        (run_dir / "origin.json").write_text('{"version": "9.1", "commit": "abc123"}')
    result = CliRunner().invoke(app, [command, str(run_dir)])
    assert result.exit_code == 2
    assert f"is of format {FORMAT + 1}" in result.stderr
    assert f"formats 1 to {FORMAT}" in result.stderr
    assert ("written by spare_megatron 9.1, commit abc123" in result.stderr) == has_origin
    assert "damaged" not in result.output


def test_a_journal_whose_run_has_not_begun_is_read(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "group-0000-rank-0")
    writer.write(VoteRecord(group=0, step=0, attempt=0, is_complete=True, work_digest=""))
    writer.close()
    (tmp_path / "journal" / "driver.jsonl").write_text("")
    assert check(JournalIndex(tmp_path)).reasons == ("unknown: 0 run records, expected 1",)


def test_earlier_journals_keep_the_digest_of_their_terms() -> None:
    """They have no order of samples, which was the first one, no weights and no evaluations."""
    terms = {name: place for place, name in enumerate(one.name for one in fields(FirstTerms))}
    earlier = hashlib.sha256(json.dumps([*range(len(terms))], separators=(",", ":")).encode()).hexdigest()
    later = {
        "order": 1,
        "weights": "",
        "validation": "",
        "masks": "",
        "program": "",
        "offset": 0,
        "audit_every_steps": 0,
        "eval_every_steps": 0,
        "eval_microbatches_per_shard": 0,
        "ramp": [],
        "max_groups": 0,
        "lanes": 1,
        "row_size": 1,
        "deal_by_pace": False,
        "skip": "",
        "phases": "",
        "least_stages": 0,
        "num_layers": 0,
    }
    assert digest_of_terms({**terms, **later}) == earlier
    assert digest_of_terms({**terms, **later, "order": 2}) != earlier
    assert digest_of_terms({**terms, **later, "eval_every_steps": 5}) != earlier
    assert digest_of_terms({**terms, **later, "ramp": [1, 1, 2]}) != earlier
    assert digest_of_terms({**terms, **later, "max_groups": 6}) != earlier
    assert digest_of_terms({**terms, **later, "lanes": 2}) != earlier
    assert digest_of_terms({**terms, **later, "phases": "64:8"}) != earlier


END = Line(source="driver", at_s=2.0, record=EndRecord(outcome="finished", reason=""))
LOSS = Line(source="group-0001-rank-0", at_s=1.0, record=LossRecord(group=1, rank=0, cause="", entry_index=0))


def test_a_reader_that_sees_the_end_of_the_run_has_all_that_was_written_before(tmp_path: Path) -> None:
    """A rank writes its last line while the files are looked at, and then the driver writes that all have ended."""
    files = {line.source: tmp_path / "journal" / f"{line.source}.jsonl" for line in (LOSS, END)}
    tail = JournalTail(tmp_path)
    assert list(tail.poll()) == []
    files["driver"].parent.mkdir()
    files[LOSS.source].touch()
    files["driver"].write_text(encode_line(END) + "\n")
    lines = tail.poll()
    assert next(lines) == END
    files[LOSS.source].write_text(encode_line(LOSS) + "\n")
    assert list(lines) == [LOSS]
    assert tail.sources == files.keys()
    assert list(tail.poll()) == []
