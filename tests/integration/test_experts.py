"""Mixtures of experts: local sums of one group against one process that holds the full model."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.model.model_shape import flops_per_token, model_shape
from spare_megatron.config.model.model_tensors import model_tensors, parameter_names
from spare_megatron.config.schema import LayoutConfig, MetricsConfig, ModelConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.journal.step_values import model_figures
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import expert_group
from tests.integration import mcore_group as group
from tests.integration.mcore_group import run_group, work_of
from tests.integration.reference import relative_distance
from tests.integration.test_mcore_gradients import only_rank, whole_model
from tests.integration.test_model_shape import count_flops, parameters_of
from tests.integration.whole_run import assert_masked, complete_run, kill, losses_of, tiny_config

COEFFICIENTS = 0.1, 0.03
RATE = 0.05
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
}

CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "one rank": ("seq_aux_loss", {}, {}),
    "two stages": ("aux_loss", {"pipeline_parallel": 2}, {"tie_embeddings": False, "num_dense_layers": 1}),
    # An odd number of units is padded.
    "interleaved": (
        "aux_loss",
        {"pipeline_parallel": 2, "virtual_pipeline": 2},
        {"shared_expert_ffn_hidden_size": 24},
    ),
    "divided": ("aux_loss", {"data_parallel": 2}, {"num_dense_layers": 1}),
    "divided, two stages": ("seq_aux_loss", {"data_parallel": 2, "pipeline_parallel": 2}, {"tie_embeddings": False}),
    "twice, divided": ("aux_loss", {"data_parallel": 4, "expert_parallel": 2}, {}),
}


def config_of(corpus: Path, layout: dict[str, int], **model: Any) -> RunConfig:
    shape = {"num_layers": 4, "hidden_size": 32, "seq_length": 16, "ffn_hidden_size": 48, "activation": "swiglu"}
    mixture = {"linear_bias": False, "num_experts": 4, "expert_ffn_hidden_size": 40}
    config = RunConfig(
        model=ModelConfig(**{**shape, **mixture, **model}),
        layout=LayoutConfig(num_groups=2, **layout),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=4),
        data=DataConfig(corpus=str(corpus)),
        train=TrainConfig(micro_batch_size=2),
    )
    prepare_index(config)
    return config


@pytest.mark.parametrize(("balancing", "layout", "model"), CASES.values(), ids=CASES)
def test_local_sums_are_those_of_the_full_mixture(
    text_corpus: Path, balancing: str, layout: dict[str, int], model: dict[str, Any]
) -> None:
    """In two calls, as with a patch."""
    plain = config_of(text_corpus, layout, **model)
    fields = {"moe_router_load_balancing_type": balancing, "moe_aux_loss_coeff": COEFFICIENTS[0]}
    config = replace(plain, megatron={**fields, "moe_z_loss_coeff": COEFFICIENTS[1]})
    size = config.row_size
    units = [(0, 1), (1, 0), (1, 1)]
    ranks = run_group(group.compute_sums, config, work_of(*units[:1]), work_of(*units[1:]))
    values, gradients = whole_model(with_all_experts(ranks, config), config)
    rows = [shard * 4 + index * size for shard, index in units]
    numbers = [row + lane for row in rows for lane in range(size)]
    reference = only_rank(plain)
    [(loss_sum, expected)] = run_group(expert_group.reference_sums, reference, balancing, values, numbers, COEFFICIENTS)
    assert relative_distance(gradients, expected) < 1e-6
    losses = [totals.loss.total for totals, _ in ranks if totals.loss.total]
    assert losses == pytest.approx([loss_sum] * config.layout.data_parallel, rel=1e-6)


@pytest.mark.parametrize(("case", "mode"), [("interleaved", "fast"), ("divided, two stages", "reproducible")])
def test_biases_move_by_the_experts_that_all_tokens_of_the_batch_chose(text_corpus: Path, case: str, mode: str) -> None:
    """A step in two calls, of work that the interleaved schedule pads, against the choices of the full model."""
    _, layout, model = CASES[case]
    plain = replace(config_of(text_corpus, layout, **model), megatron={"moe_router_score_function": "sigmoid"})
    config = replace(plain, megatron=BIASED, reduce=replace(plain.reduce, mode=mode))
    ranks = run_group(expert_group.biases_after_a_step, config)
    values, _ = whole_model(with_all_experts([rank[:2] for rank in ranks], config), config)
    start = {layer: before for rank in ranks for layer, (before, _, _) in rank[2].items()}
    assert len(start) == config.model.num_layers
    [chosen] = run_group(expert_group.chosen_experts, only_rank(plain), values, range(2 * 4), start)
    for _, _, of_rank in ranks:
        for layer, (before, counted, after) in of_rank.items():
            np.testing.assert_array_equal(counted, chosen[layer])
            moved = np.sign(chosen[layer].mean() - chosen[layer]).astype(np.float32) * np.float32(RATE)
            np.testing.assert_array_equal(after, before + moved)
    assert all(0 < min(of_layer) < max(of_layer) for of_layer in chosen.values())


def with_all_experts(ranks: Sequence[tuple[Any, dict[str, Any]]], config: RunConfig) -> list[Any]:
    """Each rank's answer with the experts of all lanes that divide them, numbered over these lanes."""
    assert config.model.num_experts is not None
    size, per_lane = config.row_size, config.parallel.tensor_parallel
    num_local = config.model.num_experts // size
    answers = []
    for rank, (totals, parameters) in enumerate(ranks):
        own = config.parallel.lane_of(rank) % size
        whole = dict(parameters)
        for lane in range(size):
            for name, value in ranks[rank + (lane - own) * per_lane][1].items():
                if found := re.fullmatch(r"(.*local_experts\.)(\d+)(\..*)", name):
                    whole[f"{found[1]}{lane * num_local + int(found[2])}{found[3]}"] = value
        answers.append((totals, whole))
    return answers


def test_a_mixture_has_the_parameters_names_and_cost_that_its_settings_say(text_corpus: Path) -> None:
    config = config_of(text_corpus, {}, num_dense_layers=1, shared_expert_ffn_hidden_size=24, qk_norm=True)
    config = replace(config, layout=LayoutConfig(num_groups=1), megatron={"moe_shared_expert_gate": True})
    ((number, names),) = run_group(parameters_of, config)
    shape = model_shape(config)
    assert number == shape.num_parameters
    assert set(names) == set(parameter_names(config))
    assert shape.num_active_parameters == shape.num_parameters - 3 * 2 * 3 * 32 * 40  # layers, experts, matrices
    tokens = config.train.micro_batch_size * config.model.seq_length
    (counted,) = run_group(count_flops, config)
    assert flops_per_token(config) * tokens == pytest.approx(counted, rel=0.01)


def test_checkpoints_name_the_tensors_of_a_mixture_as_exports_do(text_corpus: Path) -> None:
    alike = config_of(text_corpus, {}, vocab_size=256)
    apart = config_of(text_corpus, {}, vocab_size=256, num_dense_layers=1, shared_expert_ffn_hidden_size=24)
    apart = replace(apart, megatron={"moe_shared_expert_gate": True})
    (found,) = run_group(expert_group.stored_shapes, alike, [alike, apart])
    for config, stored in zip((alike, apart), found, strict=True):
        num_layers = config.model.num_layers
        tensors = list(model_tensors(config))
        assert stored == {
            tensor.key: tensor.shape if tensor.layer is None else (num_layers, *tensor.shape) for tensor in tensors
        }
        assert sum(math.prod(tensor.shape) for tensor in tensors) == model_shape(config).num_parameters


def test_a_mixture_goes_on_bit_by_bit_as_one_group_that_computes_everything(text_corpus: Path, tmp_path: Path) -> None:
    """Two lanes of two stages divide the experts, whose biases move, and one of the two groups is lost."""
    layout = LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2)
    mixture = {"linear_bias": False, "num_experts": 4, "shared_expert_ffn_hidden_size": 24, "hidden_dropout": 0.1}
    config = tiny_config(text_corpus, layout, mode="reproducible", faults=[kill("backward", 1, 1, 3)], **mixture)
    config = replace(config, megatron={"moe_aux_loss_coeff": 0.1, **BIASED}, metrics=MetricsConfig(model_every_steps=1))
    run = complete_run(config, tmp_path)
    assert_masked(run)
    ranks = run_group(expert_group.curve, config)
    curve = [(loss, norm) for loss, norm, _ in ranks[0]]
    assert losses_of(run.journal) == {step: {values} for step, values in enumerate(curve)}
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        figures = model_figures(of_rank for _, _, of_rank in of_ranks)
        assert sum(key.startswith("train/expert_load/") for key in figures) == config.model.num_layers
        for record in run.journal.of(UpdateRecord):
            assert record.step != step or figures.items() <= record.values.items()


def test_a_checkpoint_of_divided_experts_loads_in_stages_and_the_other_way_round(
    text_corpus: Path, tmp_path: Path
) -> None:
    """And experts begin alike in both. The biases decide many choices."""
    layouts = [
        LayoutConfig(num_groups=2, data_parallel=4, expert_parallel=2),
        LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2),
    ]
    config = config_of(text_corpus, {"data_parallel": 4})
    config = replace(config, megatron={"moe_aux_loss_coeff": 0.1, **BIASED})
    of_ranks = run_group(expert_group.moved, config, layouts, tmp_path)
    began = []
    for ways in zip(*of_ranks, strict=True):
        (going_on, loaded, _), *_ = ways
        np.testing.assert_allclose(loaded, going_on, rtol=1e-6)
        began.append({key: value for _, _, experts in ways for key, value in experts.items()})
    assert len(began[0]) == 4 * 4 * 2  # layers, experts, matrices
    assert len(set(began[0].values())) == len(began[0])
    assert began[0] == began[1]
