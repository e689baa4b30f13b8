"""Whole runs whose groups divide the optimizer state over their lanes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.weights import StoredWeights
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from spare_megatron.state.checkpoint.verification import verify
from spare_megatron.tools.weights.hf_folder import export_hf
from spare_megatron.tools.weights.weights_folder import ExportOptions
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import assert_masked, complete_run, kill, losses_of, tiny_config

pytestmark = pytest.mark.timeout(180)

STEPS, SAVED, BACK = 6, 4, 2
ONE_LANE, LANES = LayoutConfig(num_groups=2), LayoutConfig(num_groups=2, data_parallel=2)


def config_of(corpus: Path, layout: LayoutConfig, faults: Sequence[FaultConfig] = (), load: str = "") -> RunConfig:
    config = tiny_config(
        corpus, layout, steps=STEPS, faults=faults, rejoins=1, mode="reproducible", precision="bf16", hidden_dropout=0.1
    )
    saves = replace(config.checkpoint, interval_steps=SAVED, asynchronous=False, load=load)
    return replace(config, checkpoint=saves, optimizer=replace(config.optimizer, clip_grad=0.1))


def test_a_run_with_lanes_goes_on_through_a_loss_a_rejoin_and_without_lanes_and_changes_no_bit(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The bf16 model's fp32 parameters and both moments too, and what is exported from them."""
    whole = complete_run(config_of(text_corpus, ONE_LANE), tmp_path / "whole")
    assert_masked(whole)
    faults = [kill(FaultPoint.BACKWARD, 1, 1, rank=1)]
    watch = Watch(awaited=frozenset({(BACK, Member(GroupId(1), 1))}))
    lanes = complete_run(config_of(text_corpus, LANES, faults), tmp_path / "lanes", watch)
    assert_masked(lanes)
    assert [event.member for event in lanes.events if isinstance(event, GroupRejoined)] == [Member(GroupId(1), 1)]
    assert losses_of(lanes.journal) == losses_of(whole.journal)

    path = checkpoint_path(tmp_path / "lanes" / "checkpoints", SAVED)
    resumed = complete_run(config_of(text_corpus, ONE_LANE, load=str(path)), tmp_path / "resumed")
    assert (resumed.summary.verdict, resumed.summary.steps_committed) == ("valid", STEPS - SAVED)
    assert resumed.summary.params_sha256 == whole.summary.params_sha256

    ours, theirs = (checkpoint_path(tmp_path / name / "checkpoints", STEPS) for name in ("lanes", "whole"))
    assert_same_tensors(ours, theirs)
    exported = [tmp_path / f"exported-{name}" for name in ("lanes", "whole")]
    for path, out in zip((ours, theirs), exported, strict=True):
        export_hf(verify(path), whole.config, out, ExportOptions())
    assert len({(out / "model.safetensors").read_bytes() for out in exported}) == 1


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = StoredWeights(one), StoredWeights(other)
    assert ours.names() == theirs.names()
    for key in ours.names():
        shape = theirs.shape(key)
        values = [torch.empty(shape, dtype=stored.dtype(key)) for stored in (ours, theirs)]
        for stored, into in zip((ours, theirs), values, strict=True):
            stored.read(key, [0] * len(shape), into)
        assert torch.equal(*values), key
