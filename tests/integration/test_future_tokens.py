"""Multi-token prediction: local sums against layers of `transformers`, and whole runs that lose a group."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.model.model_tensors import flops_per_token, model_shape, model_tensors, parameter_names
from spare_megatron.config.schema import LayoutConfig
from tests.integration import expert_group, future_group
from tests.integration.latent_group import LATENT, MIXTURE, MODEL, ROUTER
from tests.integration.mcore_group import run_group
from tests.integration.test_latent_attention import assert_sums_of, config_of
from tests.integration.test_model_shape import count_flops, parameters_of
from tests.integration.test_run_rejoin import AWAITED, STEPS, WATCH, rejoined
from tests.integration.whole_run import assert_masked, complete_run, kill, losses_of, tiny_config

FUTURE = {**LATENT, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}

CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}, FUTURE),
    "two stages": ({"pipeline_parallel": 2}, {}, FUTURE),
    "interleaved": ({"pipeline_parallel": 2, "virtual_pipeline": 2}, {}, FUTURE),
    "a mixture in two stages": ({"pipeline_parallel": 2}, MIXTURE, {**FUTURE, **ROUTER}),
    "a divided mixture": ({"data_parallel": 2}, MIXTURE, {**FUTURE, **ROUTER}),
}


@pytest.mark.parametrize(("layout", "model", "megatron"), CASES.values(), ids=CASES)
def test_local_sums_are_those_of_layers_of_transformers(
    text_corpus: Path, layout: dict[str, int], model: dict[str, Any], megatron: dict[str, Any]
) -> None:
    config = config_of(text_corpus, layout, model, megatron)
    ranks, totals, number = assert_sums_of(future_group.sums, config)
    [found] = {(one.loss, *one.terms) for one in ranks}
    assert [one.total for one in found] == pytest.approx(totals, rel=1e-6)
    assert [one.num_tokens for one in found] == [number * 2 * (16 - depth) for depth in range(3)]


@pytest.mark.parametrize("mixture", [{}, MIXTURE], ids=["dense", "mixture"])
def test_parameters_names_and_cost_are_those_that_the_settings_say(text_corpus: Path, mixture: dict[str, Any]) -> None:
    config = config_of(text_corpus, {}, {"vocab_size": 256, **mixture}, {**FUTURE, **(ROUTER if mixture else {})})
    alone = replace(config, layout=LayoutConfig(num_groups=1))
    ((number, names),) = run_group(parameters_of, alone)
    assert number == model_shape(alone).num_parameters
    assert set(names) == set(parameter_names(alone))
    tokens = config.train.micro_batch_size * config.model.seq_length
    (counted,) = run_group(count_flops, alone)
    assert flops_per_token(alone) * tokens == pytest.approx(counted, rel=0.01)
    if mixture:
        ([stored],) = run_group(expert_group.stored_shapes, config, [config])
        assert stored == {tensor.key: tensor.shape for tensor in model_tensors(config)}
        assert run_group(future_group.loads, alone) == [["layer_1", "layer_2", "layer_3", "mtp_0", "mtp_1"]]


@pytest.mark.timeout(120)
def test_it_goes_on_bit_by_bit_as_one_group_that_computes_everything(text_corpus: Path, tmp_path: Path) -> None:
    """One of two groups of two stages is lost and comes back, with its copy of the embedding table."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2)
    shape = {**MODEL, **MIXTURE, "num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    faults = [kill("backward", 2, 1, rank=1)]
    config = tiny_config(text_corpus, layout, steps=STEPS, mode="reproducible", rejoins=1, faults=faults, **shape)
    config = replace(config, megatron={**FUTURE, **ROUTER})
    run = complete_run(config, tmp_path, WATCH)
    assert_masked(run)
    assert rejoined(run) == [(1, 1, AWAITED + 1)]
    ranks = run_group(expert_group.curve, config)
    curve = [(loss, norm) for loss, norm, _ in ranks[0]]
    assert losses_of(run.journal) == {step: {values} for step, values in enumerate(curve)}


def test_a_checkpoint_goes_on_in_another_layout(text_corpus: Path, tmp_path: Path) -> None:
    """The copy of the embedding table is stored once."""
    layouts = [LayoutConfig(num_groups=2, data_parallel=2), LayoutConfig(num_groups=2, pipeline_parallel=2)]
    config = config_of(text_corpus, {"data_parallel": 2}, {**MIXTURE, "num_dense_layers": 0}, {**FUTURE, **ROUTER})
    for ways in zip(*run_group(expert_group.moved, config, layouts, tmp_path), strict=True):
        (going_on, loaded, _), *_ = ways
        np.testing.assert_allclose(loaded, going_on, rtol=1e-6)
