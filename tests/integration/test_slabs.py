"""Groups whose pipelines have fewer stages, of several slabs each, beside those in which each slab is a stage."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_data import DataConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.stacking.slabs import Slabs
from tests.integration import slab_groups
from tests.integration.mcore_group import reference_sums, run_group, work_of
from tests.integration.reference import relative_distance
from tests.integration.test_mcore_gradients import only_rank, whole_model

WORK = work_of((0, 0), (1, 2), (1, 0), (0, 2), (1, 1))
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS = {"num_experts": 4, "num_dense_layers": 1, "linear_bias": False}
BF16 = {"precision": "bf16"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fast", {}),
    "fp32, dropout": ("fast", DROPOUT),
    "bf16": ("fast", BF16),
    "bf16, dropout, reproducible": ("reproducible", {**BF16, **DROPOUT}),
    "experts": ("fast", EXPERTS),
    "experts, bf16, dropout": ("fast", {**EXPERTS, **BF16, **DROPOUT}),
}
LENGTHS = (3, 2, 1)
GradientDigests = dict[str, dict[str, str]]
"""Variant -> parameter -> digest."""


def config_of(corpus: Path, length: int, mode: str, **model: Any) -> RunConfig:
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    config = RunConfig(
        model=ModelConfig(hidden_size=32, seq_length=16, **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **model}),
        layout=LayoutConfig(num_groups=2, pipeline_parallel=length),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=3),
        data=DataConfig(corpus=str(corpus)),
        train=TrainConfig(steps=4),
        reduce=ReduceConfig(mode=mode),
        megatron=balancing if "num_experts" in model else {},
    )
    prepare_index(config)
    return config


@pytest.fixture(scope="module")
def gradients(random_corpus: Path) -> dict[int, GradientDigests]:
    """Of six layers, by the length of the pipeline."""
    found: dict[int, GradientDigests] = {}
    for length in LENGTHS:
        configs = {
            name: config_of(random_corpus, length, mode, num_layers=6, tie_embeddings=False, **model)
            for name, (mode, model) in VARIANTS.items()
        }
        config, slabs = configs["fp32"], Slabs(6, LENGTHS)
        ranks = run_group(slab_groups.digests_of_gradients, config, slabs, configs, WORK[:2], WORK[2:])
        found[length] = {
            name: {key: one for of_rank in ranks for key, one in of_rank[name].items()} for name in configs
        }
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_gradients_have_the_same_bits_in_pipelines_of_all_lengths(
    gradients: dict[int, GradientDigests], variant: str, length: int
) -> None:
    expected = gradients[LENGTHS[0]][variant]
    assert gradients[length][variant] == expected
    of_layers = {f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(6)}
    assert {"embedding.word_embeddings.weight", "output_layer.weight", *of_layers} <= expected.keys()
    others = gradients[length][next(other for other in VARIANTS if other != variant)]
    assert set(others.values()).isdisjoint(expected.values()), "digests see what differs"


def test_stages_of_unequal_length_compute_the_gradients_of_the_full_model(random_corpus: Path) -> None:
    """In three stages of four layers, the last of two slabs, as in four stages; with tied embeddings."""
    slabs, found = Slabs(4, (4, 3)), []
    for length, numbers in ((4, [[0], [1], [2], [3]]), (3, [[0], [1], [2, 3]])):
        config = config_of(random_corpus, length, "fast", num_layers=4)
        ranks = run_group(slab_groups.compute_in_slabs, config, slabs, WORK)
        assert [of_rank for of_rank, _ in ranks] == numbers
        values, gradients = whole_model([sums for _, sums in ranks], config)
        _, expected = run_group(reference_sums, only_rank(config), values, WORK)[0]
        assert relative_distance(gradients, expected) < 1e-6
        found.append((values, gradients))
    for of_four, of_three in zip(*found, strict=True):
        assert of_four.keys() == of_three.keys()
        for name, array in of_four.items():
            np.testing.assert_array_equal(array, of_three[name], err_msg=name)
