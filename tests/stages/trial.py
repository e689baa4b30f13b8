"""One cell as a real run, held against the run without faults."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import CheckpointRecord, FaultRecord
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, complete_run, losses_of, tiny_config
from tests.stages.cells import (
    AWAITED,
    NUM_GROUPS,
    NUM_STAGES,
    NUM_STEPS,
    RETURNING,
    SAVE_EVERY,
    STEP,
    Cell,
    draw_faults,
)

LAYOUT = LayoutConfig(num_groups=NUM_GROUPS, pipeline_parallel=NUM_STAGES)


def run_without_faults(corpus: Path, run_dir: Path) -> Run:
    """What every cell has to end like; its checkpoints are what loads at the start begin with."""
    run = complete_run(_config(corpus), run_dir)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    return run


def run_cell(cell: Cell, seed: int, corpus: Path, run_dir: Path, expected: Run) -> Run:
    """Runs the cell and asserts everything that is promised.

    Args:
        cell: The cell.
        seed: Decides whose the faults are, where the cell does not.
        corpus: The corpus of the expected run.
        run_dir: Where it runs.
        expected: The run without faults.
    """
    faults = draw_faults(cell, seed)
    settings: dict[str, Any] = {}
    if cell.place == "asynchronous_save":
        settings["asynchronous"] = True
    if cell.place == "load":
        settings["load"] = str(checkpoint_path(expected.run_dir / "checkpoints", SAVE_EVERY))
    config = _config(corpus, faults, redundancy=2 if cell.place == "restart" else None, **settings)
    run = complete_run(config, run_dir, _watch(cell))
    struck = sorted((r.step, r.group, r.rank, r.phase) for r in run.journal.of(FaultRecord))
    assert struck == sorted((f.step, f.group, f.rank, str(f.phase)) for f in faults)
    assert_same_end(run, expected)
    assert run.summary.restarts == (1 if cell.place == "restart" else 0)
    folder = run_dir / "checkpoints"
    steps = visible_steps(folder)
    assert steps[:1] == [NUM_STEPS]
    for step in steps:
        verify(checkpoint_path(folder, step))
    if cell.place == "save":
        assert list(folder.glob("*.tmp")) == []
        # A group that is killed when its checkpoint is visible does not report it.
        reported = {record.step for record in run.journal.of(CheckpointRecord) if record.outcome == "saved"}
        assert set(steps) == reported | ({STEP + 1} if cell.phase is FaultPoint.SAVE_DROP else set())
    if "save" in cell.place:
        _assert_can_go_on(corpus, run_dir, steps[1], expected)
    return run


def assert_same_end(run: Run, expected: Run) -> None:
    """The run finished, proven by `spare check`, in the bits of the run without faults."""
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    checked = CliRunner().invoke(app, ["check", str(run.run_dir)])
    assert checked.exit_code == 0, checked.output
    losses, all_losses = losses_of(run.journal), losses_of(expected.journal)
    assert losses == {step: all_losses[step] for step in losses}
    assert max(losses) == NUM_STEPS - 1
    assert run.summary.params_sha256 == expected.summary.params_sha256


def _assert_can_go_on(corpus: Path, run_dir: Path, step: int, expected: Run) -> None:
    path = checkpoint_path(run_dir / "checkpoints", step)
    assert_same_end(complete_run(_config(corpus, load=str(path)), run_dir.with_name(f"{run_dir.name}-on")), expected)


def _watch(cell: Cell) -> Watch:
    """The group that was lost first is admitted at a certain step, or its next incarnation if it is killed before."""
    if cell.place != "join":
        return Watch()
    incarnation = 2 if cell.phase is FaultPoint.JOIN_WAIT else 1
    return Watch(awaited=frozenset({(AWAITED, Member(GroupId(RETURNING), incarnation))}))


def _config(
    corpus: Path, faults: Sequence[FaultConfig] = (), *, redundancy: int | None = None, **checkpoint: Any
) -> RunConfig:
    config = tiny_config(
        corpus,
        LAYOUT,
        steps=NUM_STEPS,
        mode="reproducible",
        hidden_dropout=0.1,
        redundancy=redundancy,
        rejoins=2,
        max_restarts=1,
    )
    settings = {"interval_steps": SAVE_EVERY, "asynchronous": False, "keep_last": 9, **checkpoint}
    return replace(
        config,
        # No process falls silent here, whatever the machine is busy with.
        control=replace(config.control, heartbeat_interval_s=3.0),
        checkpoint=replace(config.checkpoint, **settings),
        faults=replace(config.faults, trace=tuple(faults)),
    )
