"""How runs end, what is known of it where the journal is long or torn, and what is lost without a checkpoint."""

import errno
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress
from spare_megatron.cli.train import unsaved_end
from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig, TrainConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.journal.files import Line, decode_line, encode_line, read_journal
from spare_megatron.journal.records import EXIT_CODES, MEANINGS, EndRecord, Outcome, UpdateRecord, exit_code
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state import summary
from spare_megatron.journal.state.summary import Summary, conclude
from spare_megatron.machine.interrupts import INTERRUPTED
from spare_megatron.machine.lock import LOCK, hold_shared
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.checkpoint.verification import REFUSAL
from spare_megatron.state.rank_context import RankProgress
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.rank_context import rank_context
from tests.unit.test_dispute_saver import State

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


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_node_without_driver_and_store_ends_the_run_unless_others_go_on_or_it_has_ended(
    run_dir: Path, *, is_ended: bool
) -> None:
    """A driver that this node alone cannot reach may have ended the run meanwhile."""
    driver = run_dir / "journal" / "driver.jsonl"
    if not is_ended:
        driver.write_text("".join(line for line in driver.open() if '"record":"end"' not in line))
    (run_dir / LOCK).touch()
    locks: Queue[int] = Queue()
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    spec = NodeSpec(node=1, config=RunConfig(), run_dir=run_dir, store=store, faults=(), rank_main=lambda *_: None)
    other = hold_shared(run_dir)
    for _ in range(2):
        locks.put(hold_shared(run_dir))
    assert node_process._end_without_store(spec, "the store is gone", locks) is None
    os.close(other)
    summary = node_process._end_without_store(spec, "the store is gone", locks)
    assert summary is not None
    ends = read_journal(run_dir).of(EndRecord)
    assert [(end.outcome, end.reason) for end in ends] == [(summary.outcome, summary.outcome_reason)]
    expected = ("failed", "the store is gone, and the driver is lost")
    assert is_ended == (summary.outcome == "finished")
    assert is_ended or (summary.outcome, summary.outcome_reason) == expected


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


ROOT = Path(__file__).parents[2]


def test_every_outcome_has_an_exit_code_and_every_code_a_meaning() -> None:
    assert set(EXIT_CODES) == set(get_args(Outcome))
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert set(MEANINGS) == {*EXIT_CODES.values(), 2}
    assert EXIT_CODES["interrupted"] == INTERRUPTED


def test_the_runbook_has_every_outcome_with_its_code() -> None:
    table = (ROOT / "docs/runbook.md").read_text().partition("## Ending a run")[0]
    rows = {(name, int(code)) for name, code in re.findall(r"^\| `(\w+)`, (\d+) \|", table, re.MULTILINE)}
    assert rows == {*EXIT_CODES.items(), ("finished", 1), ("stopped", 1)}
    assert set(map(int, re.findall(r"^\| [^|]*, (\d+) \|", table, re.MULTILINE))) == set(MEANINGS)


def test_the_help_has_every_code_with_its_meaning() -> None:
    text = CliRunner().invoke(app, ["train", "--help"], terminal_width=1000, env={"COLUMNS": "1000"}).output
    shown = dict(re.findall(r"[•-] (\d+): (.*?)\s*\n", text))
    assert shown == {str(code): meaning for code, meaning in MEANINGS.items()}


def test_jobs_go_back_into_the_queue_after_what_a_new_run_goes_on_from() -> None:
    script = (ROOT / "spare_megatron/driver/slurm/job.sh.j2").read_text()
    (codes,) = re.findall(r"\$status == \[(\d+)\]", script)
    assert set(map(int, codes)) == {EXIT_CODES["wipe_out"], EXIT_CODES["stopped"]}


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [
        ("finished", "valid", 0),
        ("finished", "not run", 0),
        ("finished", "unknown", 1),
        ("finished", "invalid", 1),
        ("stopped", "valid", 5),
        ("stopped", "unknown", 5),
        ("stopped", "invalid", 1),
        ("wipe_out", "valid", 3),
        ("wipe_out", "invalid", 3),
        ("unknown", "unknown", 1),
    ],
)
def test_a_proof_counts_where_it_says_that_what_was_reached_is_wrong(outcome: str, verdict: str, code: int) -> None:
    assert exit_code(outcome, verdict) == code


CONFIG = RunConfig(train=TrainConfig(steps=20), checkpoint=CheckpointConfig(interval_steps=10))
FINISHED = Summary(verdict="valid", reasons=(), outcome="finished", outcome_reason="", steps_committed=20, steps_left=0)


@pytest.mark.parametrize(
    ("summary", "saved", "is_missing"),
    [
        (FINISHED, (10, 20), False),
        (FINISHED, (10,), True),
        (FINISHED, (), True),
        (replace(FINISHED, steps_left=5, steps_committed=15), (10, 15), False),
        (replace(FINISHED, steps_left=5, steps_committed=15), (10,), True),
        (replace(FINISHED, outcome="wipe_out"), (10,), False),
        (replace(FINISHED, steps_committed=0), (), False),
        (replace(FINISHED, outcome="stopped", steps_left=5, steps_committed=15), (10,), True),
    ],
)
def test_the_last_checkpoint_is_missed(
    tmp_path: Path, summary: Summary, saved: tuple[int, ...], *, is_missing: bool
) -> None:
    for step in saved:
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    message = unsaved_end(CONFIG, tmp_path, summary)
    assert bool(message) == is_missing
    if is_missing:
        assert f"of {max(saved)} steps" in message if saved else "there is none" in message
    always = is_missing and summary.outcome == "stopped"  # as it was asked to end
    assert bool(unsaved_end(replace(CONFIG, checkpoint=CheckpointConfig()), tmp_path, summary)) == always


def test_one_that_is_refused_is_missed_as_well(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000020" / REFUSAL).write_text('{"reason": "its state was wrong"}')
    assert "of 10 steps" in unsaved_end(CONFIG, tmp_path, FINISHED)


LONG_STEPS = 100


def shown(run_dir: Path, checkpoint: CheckpointConfig, *, step_s: float, num_seen: int) -> list[str]:
    """The warnings of a run of which so many steps are journaled."""
    costs = CostModel(compute_s=step_s, reduce_s=1.0, jitter=0.0)
    calm = FailureSpec(kind="system", mean_s=1e12)
    scenario = Scenario(
        name="long",
        num_groups=2,
        redundancy=1,
        microbatches_per_shard=1,
        num_steps=LONG_STEPS,
        costs=costs,
        failures=calm,
    )
    lines: list[Line] = []
    simulate(scenario, 1, journal=lines.append)
    end = next(
        number
        for number, line in enumerate(lines)
        if isinstance(line.record, UpdateRecord) and line.record.step == num_seen
    )
    (run_dir / "journal").mkdir(parents=True)
    (run_dir / "journal/all.jsonl").write_text("".join(encode_line(line) + "\n" for line in lines[:end]))
    console = RunConsole(file=io.StringIO())
    progress = RunProgress(RunConfig(checkpoint=checkpoint), console, run_dir)
    with progress:
        for _ in range(3):
            progress._next_poll_s = 0.0
            progress.refresh()
    assert isinstance(console.file, io.StringIO)
    return [line for line in console.file.getvalue().splitlines() if "no checkpoint is taken" in line]


@pytest.mark.parametrize(
    ("checkpoint", "step_s", "num_seen", "is_warned"),
    [
        (CheckpointConfig(), 60.0, 20, True),
        (CheckpointConfig(), 60.0, 3, False),
        (CheckpointConfig(), 60.0, 60, False),
        (CheckpointConfig(), 10.0, 20, False),
        (CheckpointConfig(cadence="optimal"), 60.0, 20, False),
    ],
    ids=["hours are left", "too few steps", "half an hour is left", "quick steps", "it takes checkpoints"],
)
def test_the_time_that_is_left_without_a_checkpoint_is_named_once(
    tmp_path: Path, checkpoint: CheckpointConfig, step_s: float, num_seen: int, *, is_warned: bool
) -> None:
    found = shown(tmp_path, checkpoint, step_s=step_s, num_seen=num_seen)
    assert len(found) == is_warned
    assert all(" h" in line and "are left" in line for line in found)


SAVE = SaveCheckpoint(step=4, member=Member(GroupId(0)), voters=(Member(GroupId(0)),), epoch=0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("num_steps", "is_store_lost", "has_ended", "is_found"),
    [(4, True, False, True), (4, True, True, True), (4, False, True, False), (5, True, True, False)],
)
def test_only_a_save_of_the_present_state_that_lacks_the_store_is_found(
    tmp_path: Path, num_steps: int, *, is_store_lost: bool, has_ended: bool, is_found: bool
) -> None:
    def get(_keys: list[str]) -> list[None]:
        if is_store_lost:
            raise StoreLost("gone")
        return [None]

    gate = threading.Event()
    state = State(bytearray(b"state"), gate, OSError(errno.EIO, "the save fails"))
    trainer: Any = SimpleNamespace(checkpoint_state=lambda _hosted, has_rest: state)
    agreement = SimpleNamespace(highest=lambda value: value)
    progress = RankProgress(num_steps=num_steps)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = SimpleNamespace(get=get)
        saver = Saver(
            rank_context(run_dir=tmp_path, trainer=trainer, agreement=agreement, progress=progress, store=store)
        )
        saver.save(SAVE)
        if has_ended:
            gate.set()
        assert saver.finish() == (SAVE if is_found else None)
        gate.set()
        saver._thread.shutdown()
    finally:
        dist.destroy_process_group()
