"""Runs whose documents are to be filled in: losses and a further start change no bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model.training_samples import Corpus, prepare_index
from tests.integration.whole_run import assert_masked, complete_run, kill, tiny_config

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


@pytest.fixture
def config(text_corpus: Path) -> RunConfig:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), steps=6, mode="reproducible", vocab_size=260)
    data = replace(config.data, fim_rate=0.8, fim_tokens="256,257,258", end_of_document=ord("\n"), eod_mask_loss=True)
    return replace(config, data=data)


def test_a_loss_and_a_further_start_change_no_bit(config: RunConfig, tmp_path: Path) -> None:
    plain = complete_run(config, tmp_path / "plain")
    lossy = replace(config, faults=replace(config.faults, trace=(kill("backward", 1, 0), kill("in_reduce", 2, 1))))
    first = replace(lossy, train=replace(lossy.train, steps=3), optimizer=replace(lossy.optimizer, decay_steps=6))
    first = replace(first, checkpoint=replace(first.checkpoint, interval_steps=3))
    begun = complete_run(first, tmp_path / "first")
    assert_masked(begun)
    loaded = str(next((tmp_path / "first" / "checkpoints").glob("step-*")))
    ended = complete_run(replace(config, checkpoint=replace(config.checkpoint, load=loaded)), tmp_path / "second")
    assert ended.summary.params_sha256 == plain.summary.params_sha256
    other = complete_run(replace(config, data=replace(config.data, fim_rate=0.0, fim_tokens="")), tmp_path / "other")
    assert other.summary.params_sha256 != plain.summary.params_sha256


def test_samples_have_their_masks_behind_the_tokens_that_they_are_made_of(config: RunConfig) -> None:
    prepare_index(config)
    corpus = Corpus(config)
    batches = [corpus.microbatch(step, number) for step in range(2) for number in range(4)]
    assert any((batch["tokens"] == 257).any() for batch in batches)
    for batch in batches:
        assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all()
        assert (batch["loss_mask"] == (batch["tokens"] != ord("\n"))).all()
