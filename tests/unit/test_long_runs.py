"""A run that takes no checkpoint says so once its measured steps show that it has long to go."""

import io
from pathlib import Path

import pytest

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.journal.files import Line, encode_line
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

NUM_STEPS = 100


def shown(run_dir: Path, checkpoint: CheckpointConfig, *, step_s: float, num_seen: int) -> list[str]:
    """The warnings of a run of which so many steps are journaled."""
    costs = CostModel(compute_s=step_s, reduce_s=1.0, jitter=0.0)
    calm = FailureSpec(kind="system", mean_s=1e12)
    scenario = Scenario(
        name="long",
        num_groups=2,
        redundancy=1,
        microbatches_per_shard=1,
        num_steps=NUM_STEPS,
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
