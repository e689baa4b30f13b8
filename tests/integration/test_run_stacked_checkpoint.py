"""Checkpoints of runs whose optimizer state is partitioned: written by several groups, whole or not at all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import CheckpointRecord, FaultRecord, RestartRecord
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.whole_run import Run, complete_run, kill, losses_of, tiny_config

pytestmark = pytest.mark.timeout(180)

EVERY = 2
FOUR = LayoutConfig(num_groups=4)


def config_of(
    corpus: Path,
    layout: LayoutConfig = FOUR,
    *,
    steps: int,
    redundancy: int = 2,
    faults: Sequence[FaultConfig] = (),
    max_restarts: int = 0,
    **checkpoint: Any,
) -> RunConfig:
    """Eight microbatches a step, and a checkpoint every two steps."""
    config = tiny_config(
        corpus,
        layout,
        steps=steps,
        num_microbatches=8 // layout.num_groups,
        mode="reproducible",
        optimizer=OptimizerConfig(sharding="stacked", redundancy=redundancy),
        max_restarts=max_restarts,
    )
    settings = {"interval_steps": EVERY, "asynchronous": False, "keep_last": 9, **checkpoint}
    config = replace(config, checkpoint=replace(config.checkpoint, **settings))
    return replace(config, faults=replace(config.faults, trace=tuple(faults)))


def assert_proven(run: Run, num_faults: int) -> None:
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert len(run.journal.of(FaultRecord)) == num_faults


def saved(run: Run) -> list[tuple[int, int]]:
    """Steps and group of every save that its group survived to report as visible."""
    return sorted((r.step, r.group) for r in run.journal.of(CheckpointRecord) if r.outcome == "saved")


def test_a_state_wipe_out_goes_back_to_a_checkpoint_which_half_the_groups_load_too(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Partition 0 is on groups 0 and 3, which both die before the update after which the second checkpoint is due."""
    whole = complete_run(config_of(text_corpus, steps=4, asynchronous=True), tmp_path / "whole")
    assert_proven(whole, 0)
    assert saved(whole) == [(2, 0), (4, 1)]
    faults = [kill(FaultPoint.AFTER_COMMIT, 3, group) for group in (0, 3)]
    run = complete_run(config_of(text_corpus, steps=4, faults=faults, max_restarts=1), tmp_path / "run")
    assert_proven(run, 2)
    assert {(r.step, r.rework_steps) for r in run.journal.of(RestartRecord)} == {(2, 2)}
    assert run.summary.params_sha256 == whole.summary.params_sha256

    folder = tmp_path / "whole" / "checkpoints"
    assert [name.name for name in folder.glob("*.tmp")] == []
    manifest = verify(checkpoint_path(folder, 4)).manifest
    assert manifest.optimizer == {"sharding": "stacked", "num_slices": 4, "redundancy": 2, "writers": [0, 1, 2, 3]}
    assert manifest.num_bytes == next(r.num_bytes for r in whole.journal.of(CheckpointRecord) if r.step == 4)
    load = str(checkpoint_path(folder, 2))
    there = config_of(text_corpus, LayoutConfig(num_groups=2), steps=4, load=load, interval_steps=None)
    resumed = complete_run(there, tmp_path / "resumed")
    assert_proven(resumed, 0)
    assert losses_of(resumed.journal).keys() == {2, 3}
    assert resumed.summary.params_sha256 == whole.summary.params_sha256


def test_losing_writers_leaves_nothing_torn(text_corpus: Path, tmp_path: Path) -> None:
    """Another host writes the partition of group 2. What group 1 was about to publish is removed."""
    faults = [kill(FaultPoint.SAVE_WRITE, EVERY - 1, 2), kill(FaultPoint.SAVE_MANIFEST, 2 * EVERY - 1, 1)]
    run = complete_run(config_of(text_corpus, steps=6, redundancy=3, faults=faults), tmp_path / "run")
    assert_proven(run, 2)
    folder = tmp_path / "run" / "checkpoints"
    assert saved(run) == [(2, 0), (6, 0)]
    assert visible_steps(folder) == [6, 2]
    assert [name.name for name in folder.glob("*.tmp")] == []
    writers = [verify(checkpoint_path(folder, step)).manifest.optimizer["writers"] for step in (2, 6)]
    assert writers == [[0, 1, 3], [0, 3]]
