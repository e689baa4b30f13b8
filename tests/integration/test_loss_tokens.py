"""Tokens that do not count for the loss: gradients, loss and norm are divided by the number of those that do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from spare_megatron.config.schema import (
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ReduceConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.loss_terms import LossTerms
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.pipeline import summed_loss
from spare_megatron.mcore.model.program import LOSS
from spare_megatron.mcore.model.training_samples import Corpus, prepare_index
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration import mcore_group as group
from tests.integration import stacked_groups
from tests.integration.mcore_group import Arrays, run_group, run_ranks
from tests.integration.reference import relative_distance
from tests.integration.test_stacked_optimizer import same_position

MakeConfig = Callable[..., RunConfig]
END = 3
NUM_STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every eighth token ends a document."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus([np.random.default_rng(3).integers(0, 8, 8000)], prefix)
    return prefix


@pytest.fixture
def make_config(corpus: Path) -> MakeConfig:
    def make(mode: str = "fast", *, end: int = END, is_masked: bool = True, **layout: int) -> RunConfig:
        config = RunConfig(
            model=ModelConfig(num_layers=2, hidden_size=32, seq_length=32, vocab_size=257),
            layout=LayoutConfig(num_groups=2, **layout),
            spare=SpareConfig(redundancy=2, microbatches_per_shard=2),
            optimizer=OptimizerConfig(sharding="stacked", redundancy=2, clip_grad=0.5),
            data=DataConfig(corpus=str(corpus), eod_mask_loss=is_masked, end_of_document=end),
            train=TrainConfig(steps=NUM_STEPS, micro_batch_size=2),
            reduce=ReduceConfig(mode=mode),
        )
        prepare_index(config)
        return config

    return make


@pytest.mark.parametrize(
    ("mode", "layout"),
    [("fast", {"pipeline_parallel": 2}), ("reproducible", {"tensor_parallel": 2}), ("reproducible", {})],
    ids=["two stages", "fixed point, two tensor-parallel ranks", "fixed point"],
)
def test_parameters_are_those_of_plain_megatron_with_stacked_and_with_whole_state(
    make_config: MakeConfig, mode: str, layout: dict[str, int]
) -> None:
    """Megatron counts the tokens of its mask on each data-parallel rank, and divides by their sum."""
    config = make_config(mode, **layout)
    ours = run_group(stacked_groups.train_both_ways, config, NUM_STEPS)
    theirs = run_ranks(config.parallel.num_ranks, stacked_groups.train_zero, config, NUM_STEPS)
    for rank, answers in enumerate(ours):
        assert all(result.grad_norm > config.optimizer.clip_grad for _, result, _ in answers)
        assert relative_distance(answers[-1][0], theirs[same_position(config, rank)]) < 1e-6


def test_the_loss_is_the_mean_over_the_tokens_that_count(make_config: MakeConfig) -> None:
    config = replace(make_config(), optimizer=OptimizerConfig())
    [(result, before, gradients, _)] = run_group(group.update_once, config)
    [(batches, losses)] = run_group(group.token_losses, config, before)
    counts = batches["tokens"] != END
    assert np.array_equal(batches["loss_mask"] != 0, counts)
    assert 0 < np.count_nonzero(~counts) < counts.size
    assert result.loss == pytest.approx(losses[counts].mean(), rel=1e-6)
    # `update_once` divides by all tokens.
    norm = np.sqrt(sum(float(np.sum(gradient.astype(np.float64) ** 2)) for gradient in gradients.values()))
    assert result.grad_norm == pytest.approx(norm * counts.size / np.count_nonzero(counts), rel=1e-5)


def test_context_parallel_ranks_sum_the_parts_of_a_sequence(make_config: MakeConfig) -> None:
    """Each has the loss and the count of the whole; only the model of such ranks needs a GPU."""
    config = make_config()
    parts = run_ranks(2, context_sums, config)
    batch = Corpus(config).microbatch(0, 0)
    counts = batch["tokens"] != END
    total = float(batch["labels"][counts].sum())
    assert parts == [(total, int(counts.sum()), part) for _, _, part in parts]
    assert sum(part for *_, part in parts) == int(counts.sum())
    assert 0 < parts[0][2] != parts[1][2] > 0


def context_sums(config: RunConfig) -> tuple[float, int, int]:
    """Loss and tokens of a sequence as a context-parallel rank adds them up, and the tokens of its own part; the loss
    of a token is its label."""
    cp = dist.group.WORLD
    batch = on_device(Corpus(config).microbatch(0, 0), config, group.CPU, cp)
    total, num_tokens = summed_loss(batch["labels"], batch["loss_mask"])
    terms = LossTerms(config, {}, SimpleNamespace(cp=cp), group.CPU)
    found = {LOSS: (total, num_tokens)}
    return float(terms.whole_sum(found)), int(terms.whole_count(found)), int(num_tokens)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_a_mask_that_masks_nothing_leaves_every_bit(make_config: MakeConfig, mode: str) -> None:
    absent = 256
    work = group.work_of((0, 0), (1, 1))
    [[masked]] = run_group(group.packed_sums, make_config(mode, end=absent), 0, [work])
    [[plain]] = run_group(group.packed_sums, make_config(mode, is_masked=False), 0, [work])
    num_gradients = len(plain) - 3
    assert np.array_equal(masked[:num_gradients], plain[:num_gradients])
    assert np.array_equal(masked[-3:], plain[-3:]), "unsound, count and loss"
    assert masked[num_gradients:-3].tolist() == [0, 2 * 2 * 32]


def test_counts_and_sums_do_not_depend_on_who_computes_what(make_config: MakeConfig) -> None:
    work = group.work_of((0, 0), (1, 1), (0, 1))
    [[whole, first, rest]] = run_group(
        group.packed_sums, make_config("reproducible"), 0, [work], [work[2:]], [work[:1], work[1:2]]
    )
    np.testing.assert_array_equal(whole, first + rest)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_a_batch_in_which_nothing_counts_has_gradients_and_loss_of_zero(
    make_config: MakeConfig, tmp_path: Path, mode: str
) -> None:
    write_corpus([[END] * 2000], tmp_path / "ends")
    config = replace(make_config(mode), optimizer=OptimizerConfig(weight_decay=0.1))
    config = replace(config, data=replace(config.data, corpus=str(tmp_path / "ends")))
    prepare_index(config)
    [(result, before, after)] = run_group(group.whole_update, config)
    assert (result.loss, result.grad_norm, result.num_microbatches) == (0.0, 0.0, 4)
    for name, values in expected_decay(config, before).items():
        np.testing.assert_allclose(after[name], values, rtol=1e-6, err_msg=name)


def expected_decay(config: RunConfig, before: Arrays) -> dict[str, Any]:
    """What is left of matrices after weight decay alone; vectors do not decay."""
    factor = 1.0 - config.optimizer.learning_rate * config.optimizer.weight_decay
    return {name: value * (factor if value.ndim > 1 else 1.0) for name, value in before.items()}
