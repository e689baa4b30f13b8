"""A run whose last state is not saved says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.cli.train import unsaved_end
from spare_megatron.config.schema import RunConfig, TrainConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.journal.state.summary import Summary
from spare_megatron.state.checkpoint.verification import REFUSAL

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
