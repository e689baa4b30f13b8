"""Whole runs that begin with weights alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.config.training.corpus import note_of, read_corpus
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.state.checkpoint.start_checkpoint import weights_identity
from spare_megatron.state.checkpoint.verification import read_manifest
from tests.integration.hf_group import save_random
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import complete_run, kill, losses_of, params_of, tiny_config

pytestmark = pytest.mark.timeout(180)

STEPS = 4


def beginning_with(weights: Path, corpus: Path, **terms: object) -> RunConfig:
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    config = tiny_config(corpus, layout, steps=STEPS, redundancy=2, mode="reproducible", max_restarts=1, **terms)
    return replace(config, checkpoint=replace(config.checkpoint, load_weights=str(weights)))


def with_a_note(corpus: Path, prefix: Path) -> Path:
    """A copy of a corpus, whose documents end with line feeds by its note."""
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus}{ending}", f"{prefix}{ending}")
    facts = replace(read_corpus(prefix), tokenizer="byte", vocab_size=256, end_of_document=10)
    Path(f"{prefix}.json").write_text(note_of(facts))
    return prefix


def test_a_run_begins_with_weights_of_another_layout_and_begins_with_them_again_after_a_wipe_out(
    text_corpus: Path, tmp_path: Path
) -> None:
    source = tiny_config(text_corpus, LayoutConfig(num_groups=2, tensor_parallel=2))
    prepare_index(source)
    run_group(save_random, source, tmp_path / "source")
    corpus = with_a_note(text_corpus, tmp_path / "noted")
    whole = complete_run(beginning_with(tmp_path / "source", corpus), tmp_path / "whole")
    faults = [kill(FaultPoint.FORWARD, 2, 0), kill(FaultPoint.BACKWARD, 2, 1), kill(FaultPoint.BACKWARD, 2, 2)]
    run = complete_run(beginning_with(tmp_path / "source", corpus, faults=faults), tmp_path / "run")
    for found in (whole, run):
        assert (found.summary.outcome, found.summary.verdict) == ("finished", "valid"), found.summary.reasons
    assert (whole.summary.restarts, run.summary.restarts) == (0, 1)
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert params_of(run)[STEPS] == params_of(whole)[STEPS]

    path = tmp_path / "source" / "checkpoints" / "step-00000003"
    identity = weights_identity(read_manifest(path))
    [record] = run.journal.of(RunRecord)
    assert record.weights == identity
    saved = load_run_config(run.run_dir / "config.toml").config
    assert (saved.checkpoint.load_weights, saved.checkpoint.weights_identity) == (str(path), identity)
    assert saved.data.end_of_document == 10, (
        "the note of the corpus, which exports need where the corpus is not at hand"
    )
    first = min(loss for loss, _ in losses_of(run.journal)[0])
    assert first > 5.8, "random weights of this size, not those that the seed gives, which start near log(256)"
    assert json.loads((run.run_dir / "summary.json").read_text())["verdict"] == "valid"
