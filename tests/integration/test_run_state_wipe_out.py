"""Runs that lose the state of an optimizer partition with all its hosts, and start again by themselves."""

from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import FaultRecord, UpdateRecord
from tests.integration.whole_run import Run, complete_run, entries_of, kill, tiny_config

pytestmark = pytest.mark.timeout(180)


def losses_by_step(run: Run) -> dict[int, float]:
    return {record.step: record.loss for record in run.journal.of(UpdateRecord)}


def test_a_state_wipe_out_ends_bitwise_like_the_run_without_faults(text_corpus: Path, tmp_path: Path) -> None:
    """Partition 0 of four is on groups 0 and 3, both of which die in an update; every shard still has two hosts."""
    layout, common = LayoutConfig(num_groups=4), {"steps": 4, "mode": "reproducible", "hidden_dropout": 0.1}
    whole = complete_run(tiny_config(text_corpus, layout, **common), tmp_path / "whole")
    faults = [kill(FaultPoint.AFTER_COMMIT, 1, 0), kill(FaultPoint.AFTER_COMMIT, 1, 3)]
    stacked = OptimizerConfig(sharding="stacked", redundancy=2)
    config = tiny_config(text_corpus, layout, **common, faults=faults, max_restarts=1, optimizer=stacked)
    run = complete_run(config, tmp_path / "run")
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert (run.summary.steps_committed, run.summary.restarts, run.summary.steps_lost) == (4, 1, 2)
    assert len(run.journal.of(FaultRecord)) == 2
    kinds = [entry["entry"] for entry in entries_of(run.journal)]
    assert (kinds.count("restart"), kinds[-1]) == (1, "finish")
    assert losses_by_step(run) == losses_by_step(whole)
    assert run.summary.params_sha256 == whole.summary.params_sha256
