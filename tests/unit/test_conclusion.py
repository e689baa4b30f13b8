"""What a run comes to when its journal is too long to be proven before its job has to end."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spare_megatron.journal.files import Line, decode_line, encode_line
from spare_megatron.journal.records import EndRecord, exit_code
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state import summary
from spare_megatron.journal.state.summary import conclude
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

NUM_STEPS = 40


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A simulated run with wipe-outs, in files as a real one has them."""
    costs = CostModel(compute_s=60.0, reduce_s=6.0, detect_s=2.0, join_s=4.0, restart_s=120.0, save_s=5.0)
    scenario = Scenario(
        name="scenario",
        num_groups=4,
        redundancy=2,
        microbatches_per_shard=2,
        num_steps=NUM_STEPS,
        costs=costs,
        failures=FailureSpec(kind="system", mean_s=200.0),
        repair_s=300.0,
    )
    lines: list[Line] = []
    simulate(scenario, 2, journal=lines.append)
    files: dict[str, list[Line]] = {}
    for line in lines:
        is_drivers = isinstance(line.record, RunRecord | EndRecord) or not hasattr(line.record, "group")
        files.setdefault("driver" if is_drivers else f"group-{line.record.group:02d}-rank-0", []).append(line)
    folder = tmp_path / "journal"
    folder.mkdir()
    for name, some in files.items():
        (folder / f"{name}.jsonl").write_text("".join(encode_line(line) + "\n" for line in some))
    return tmp_path


@pytest.mark.parametrize("num_wanted", [NUM_STEPS, 2 * NUM_STEPS])
def test_a_long_journal_shows_how_the_run_ended_and_how_many_steps_are_left(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, num_wanted: int
) -> None:
    driver = run_dir / "journal" / "driver.jsonl"
    driver.write_text(driver.read_text().replace(f'"num_steps":{NUM_STEPS}', f'"num_steps":{num_wanted}', 1))
    proven = conclude(run_dir)
    assert proven.restarts, "the run made steps again"
    monkeypatch.setattr(summary, "PROOF_S", -1.0)
    conclusion = conclude(run_dir)
    assert (conclusion.outcome, conclusion.steps_committed, conclusion.steps_left) == (
        "finished",
        NUM_STEPS,
        num_wanted - NUM_STEPS,
    )
    assert (conclusion.steps_committed, conclusion.steps_left) == (proven.steps_committed, proven.steps_left)
    assert conclusion.verdict == "not run"
    assert f"spare check {run_dir}" in conclusion.reasons[0]
    assert conclusion.groups_lost is None
    assert json.loads((run_dir / "summary.json").read_text())["steps_left"] == conclusion.steps_left
    assert exit_code(conclusion.outcome, conclusion.verdict) == 0


def test_a_torn_end_of_a_file_is_no_harm(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "PROOF_S", -1.0)
    monkeypatch.setattr(summary, "_TAIL_BYTES", 5000)
    for path in (run_dir / "journal").glob("group-*"):
        with path.open("a") as file:
            file.write('{"record":"entry","source":"gr')
    assert conclude(run_dir).steps_committed == NUM_STEPS


def test_a_disk_that_takes_no_summary_and_lacks_the_end_leaves_what_the_driver_knows(run_dir: Path) -> None:
    """The run ended with an exit code that says it could not begin."""
    driver = run_dir / "journal" / "driver.jsonl"
    driver.write_text("".join(line for line in driver.open() if '"record":"end"' not in line))
    (run_dir / "summary.json").mkdir()
    assert conclude(run_dir).outcome == "unknown"
    summary = conclude(run_dir, EndRecord(outcome="finished", reason=""))
    assert (summary.outcome, summary.verdict, summary.steps_committed) == ("finished", "unknown", NUM_STEPS)
    assert any("no end" in reason for reason in summary.reasons)
    assert any(reason.startswith("summary.json was not written: ") for reason in summary.reasons)
    assert exit_code(summary.outcome, summary.verdict) == 1
    assert list(run_dir.glob("summary.json.*")) == []


@pytest.mark.parametrize("damage", ["a folder", "no permission", "no journal"])
def test_a_journal_that_cannot_be_read_leaves_what_the_driver_knows(run_dir: Path, damage: str) -> None:
    """It turned exit code 1 of a run that had failed into 2, which says that nothing was started."""
    records = [decode_line(line).record for line in (run_dir / "journal/driver.jsonl").open()]
    run = next(record for record in records if isinstance(record, RunRecord))
    if damage == "a folder":
        (run_dir / "journal/supervisor-0.jsonl").mkdir()
    elif damage == "no permission":
        (run_dir / "journal/driver.jsonl").unlink()
        (run_dir / "journal/driver.jsonl").symlink_to("/proc/self/mem")
    else:
        (run_dir / "journal").rename(run_dir / "elsewhere")
    end = EndRecord(outcome="failed", reason="why", steps_committed=3)
    summary = conclude(run_dir, end, run=run)
    assert (summary.outcome, summary.outcome_reason, summary.verdict) == ("failed", "why", "unknown")
    assert (summary.steps_committed, summary.steps_left) == (3, NUM_STEPS - 3)
    assert summary.reasons[0].startswith("the journal cannot be read: ")
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


def test_an_interrupted_proof_leaves_a_summary(run_dir: Path) -> None:
    @contextmanager
    def interrupted() -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        conclude(run_dir, interruptible=interrupted)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["verdict"]) == ("finished", "not run")
