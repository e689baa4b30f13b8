"""Ranks that split each sequence, against one that has it whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spare_megatron.config.schema import LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.model.attention import chunks_of, whole_sequence
from spare_megatron.mcore.model.compatibility import part_of_context_rank
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import mcore_group as group
from tests.integration.mcore_group import run_group, run_ranks, work_of
from tests.integration.reference import relative_distance
from tests.integration.test_document_masks import packed_sums
from tests.integration.test_mcore_gradients import only_rank, whole_model

WORK = work_of((0, 0), (1, 1))
ROPE = {"position_embedding": "rope", "num_query_groups": 2, "normalization": "rmsnorm", "activation": "swiglu"}
UNGATED = {**ROPE, "activation": "gelu"}
"""A gate and what it opens are not next to each other on tensor-parallel ranks."""
LAYOUTS: dict[str, dict[str, int]] = {
    "two": {"context_parallel": 2},
    "four": {"context_parallel": 4},
    "two with two tensor-parallel ranks each": {"context_parallel": 2, "tensor_parallel": 2},
    "two in two lanes": {"context_parallel": 2, "data_parallel": 2},
    "two of each of two stages": {"context_parallel": 2, "pipeline_parallel": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "learned positions": ("two", {}, False),
    "grouped keys": ("four", ROPE, False),
    "heads apart": ("two with two tensor-parallel ranks each", UNGATED, False),
    "lanes": ("two in two lanes", {}, False),
    "a window": ("four", {**ROPE, "sliding_window": 6}, False),
    "heads that attend to nothing": ("two with two tensor-parallel ranks each", {**UNGATED, "is_sinking": True}, False),
    "documents": ("two of each of two stages", {}, True),
    "documents in a window": ("four", {**ROPE, "sliding_window": 6}, True),
}
"""Layout, model, and whether documents are kept apart."""


def make_config(corpus: Path, layout: str, model: dict[str, Any], has_documents: bool, mode: str = "fast") -> RunConfig:
    settings = {name: value for name, value in model.items() if name != "is_sinking"}
    config = RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=64, seq_length=32, **settings),
        megatron={"softmax_type": "learnable"} if "is_sinking" in model else {},
        layout=LayoutConfig(num_groups=2, **LAYOUTS[layout]),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=2),
        data=DataConfig(corpus=str(corpus), reset_attention_mask=has_documents, end_of_document=7),
        train=TrainConfig(micro_batch_size=3),
        reduce=ReduceConfig(mode=mode),
    )
    prepare_index(config)
    return config


def assert_that_of_one_rank(config: RunConfig, task: Callable[..., Any] = group.compute_sums) -> None:
    ranks = run_group(task, config, WORK)
    values, gradients = whole_model(ranks, config)
    [(loss_sum, expected)] = run_group(group.reference_sums, only_rank(config), values, WORK)
    assert relative_distance(gradients, expected) < 1e-6
    found = [totals.loss.total for totals, _ in ranks if totals.loss.total]
    assert found == pytest.approx([loss_sum] * config.parallel.ranks_per_stage, rel=1e-6)
    if config.data.reset_attention_mask:
        unmasked = replace(config, data=replace(config.data, reset_attention_mask=False))
        [(_, others)] = run_group(group.reference_sums, only_rank(unmasked), values, WORK)
        assert relative_distance(gradients, others) > 1e-3


@pytest.mark.parametrize(("layout", "model", "has_documents"), MODELS.values(), ids=MODELS)
def test_losses_and_gradients_are_those_of_one_rank(
    random_corpus: Path, layout: str, model: dict[str, Any], has_documents: bool
) -> None:
    assert_that_of_one_rank(make_config(random_corpus, layout, model, has_documents))


@pytest.mark.parametrize("layout", ["four", "two with two tensor-parallel ranks each"])
def test_packed_documents_have_the_losses_and_gradients_of_one_rank(random_corpus: Path, layout: str) -> None:
    """As with transformer-engine, whose attention a stand-in computes by the definition, from the offsets alone."""
    assert_that_of_one_rank(make_config(random_corpus, layout, UNGATED, has_documents=True), packed_sums)


def test_bf16_comes_close_to_one_rank_in_fp32(random_corpus: Path) -> None:
    config = make_config(random_corpus, "two", {**ROPE, "precision": "bf16"}, has_documents=True)
    values, gradients = whole_model(run_group(group.compute_sums, config, WORK), config)
    in_fp32 = only_rank(replace(config, model=replace(config.model, precision="fp32")))
    [(_, expected)] = run_group(group.reference_sums, in_fp32, values, WORK)
    assert relative_distance(gradients, expected) < 0.02


def test_reproducible_sums_do_not_depend_on_who_computes_what(random_corpus: Path) -> None:
    config = make_config(random_corpus, "two", {"attention_dropout": 0.1}, has_documents=True, mode="reproducible")
    for whole, first, rest in run_group(group.packed_sums, config, 0, [WORK], [WORK[1:]], [WORK[:1]]):
        np.testing.assert_array_equal(whole, first + rest)


def test_the_places_of_a_rank_are_those_of_megatron_and_gradients_of_gathered_keys_are_added() -> None:
    for places, ours, whole, gradients in run_ranks(3, gathered, RunConfig()):
        assert ours == places
        assert whole == [[*range(24)], [*range(100, 124)], [*range(100, 124)]]
        assert gradients == [place * 6 for place in places]


def gathered(_: RunConfig) -> tuple[list[int], list[int], list[list[int]], list[float]]:
    """Places of a rank by Megatron and by us, whole keys and twice as wide values, and gradients of its keys: each rank
    weighs each key by its place and by the rank's number and one."""
    cp, whole = dist.group.WORLD, torch.arange(24)
    places = part_of_context_rank({"tokens": whole[None]}, cp)["tokens"][0]
    key, value = places[:, None].float().requires_grad_(), (places[:, None] + 100.0).expand(-1, 2)
    keys, values = whole_sequence(key, value, cp)
    ((cp.rank() + 1) * keys[:, 0] * whole).sum().backward()
    ours = [place for chunk in chunks_of(24, cp) for place in chunk]
    return places.tolist(), ours, torch.cat((keys, values), 1).int().T.tolist(), key.grad.flatten().tolist()


def test_experts_get_the_tokens_of_parts_as_those_of_whole_sequences(random_corpus: Path) -> None:
    model = {"num_experts": 4, "experts_per_token": 2, "linear_bias": False}
    config = make_config(random_corpus, "two", model, has_documents=True)
    config = replace(config, megatron={"moe_router_load_balancing_type": "none"})
    found = [whole_model(run_group(group.compute_sums, one, WORK), one) for one in (config, only_rank(config))]
    (values, gradients), (expected_values, expected) = found
    assert relative_distance(values, expected_values) == 0.0
    assert relative_distance(gradients, expected) < 1e-6
