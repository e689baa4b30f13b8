"""Models like gpt-oss: local sums of one group against the model of `transformers`, and runs that lose a group."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.model.model_tensors import flops_per_token, model_shape, model_tensors, parameter_names
from spare_megatron.config.schema import AuditConfig, LayoutConfig
from tests.integration import expert_group, gpt_oss_group
from tests.integration.gpt_oss_group import MEGATRON, MODEL, YARN
from tests.integration.mcore_group import run_group
from tests.integration.test_latent_attention import assert_sums_of, config_of
from tests.integration.test_model_shape import count_flops, parameters_of
from tests.integration.whole_run import assert_masked, complete_run, kill, losses_of, tiny_config

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, YARN),
    "two stages": ({"pipeline_parallel": 2}, {**YARN, "correction_range_round_to_int": True}),
    "divided": ({"data_parallel": 2}, YARN),
    "context parallel": ({"context_parallel": 2}, {}),
}


@pytest.mark.parametrize(("layout", "rotation"), CASES.values(), ids=CASES)
def test_local_sums_are_those_of_transformers(
    text_corpus: Path, layout: dict[str, int], rotation: dict[str, Any]
) -> None:
    config = config_of(text_corpus, layout, {**MODEL, "qk_norm": False, "norm_eps": 1e-5}, {**MEGATRON, **rotation})
    found, loss_sum, _ = assert_sums_of(gpt_oss_group.gpt_oss_sums, config)
    losses = [totals.loss.total for totals in found]
    assert losses == pytest.approx([loss_sum] * len(losses), rel=1e-6)


def test_parameters_names_and_cost_are_those_that_the_settings_say(text_corpus: Path) -> None:
    config = config_of(text_corpus, {}, {**MODEL, "vocab_size": 256, "qk_norm": False}, {**MEGATRON, **YARN})
    config = replace(config, layout=LayoutConfig(num_groups=1))
    ((number, names),) = run_group(parameters_of, config)
    shape = model_shape(config)
    assert number == shape.num_parameters
    assert set(names) == set(parameter_names(config))
    of_expert = 2 * 24 * 32 + 2 * 24 + 24 * 32 + 32
    assert shape.num_active_parameters == shape.num_parameters - 4 * 2 * of_expert  # layers, idle experts
    tokens = config.train.micro_batch_size * config.model.seq_length
    # Without sinks, which are an element more of queries and keys: at these sizes a per cent of everything.
    alike = replace(config, megatron={**config.megatron, "softmax_type": "vanilla"})
    (counted,) = run_group(count_flops, alike)
    assert flops_per_token(config) * tokens == pytest.approx(counted, rel=0.01)
    ([stored],) = run_group(expert_group.stored_shapes, config, [config])
    num_layers = config.model.num_layers
    assert stored == {
        tensor.key: (num_layers, *tensor.shape)[tensor.layer is None :] for tensor in model_tensors(config)
    }


def test_it_goes_on_bit_by_bit_as_one_group_that_computes_everything(text_corpus: Path, tmp_path: Path) -> None:
    """Two lanes of two stages divide the experts, all products are checked, and one of the two groups is lost."""
    layout = LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2)
    faults = [kill("backward", 1, 1, 3)]
    config = tiny_config(text_corpus, layout, mode="reproducible", faults=faults, **{**MODEL, "hidden_dropout": 0.1})
    config = replace(config, megatron={**MEGATRON, **YARN}, audit=AuditConfig(products=1.0))
    run = complete_run(config, tmp_path)
    assert_masked(run)
    ranks = run_group(expert_group.curve, config)
    curve = [(loss, norm) for loss, norm, _ in ranks[0]]
    assert losses_of(run.journal) == {step: {values} for step, values in enumerate(curve)}
