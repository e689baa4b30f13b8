"""Latent attention: local sums of one group against DeepSeek-V3 as `transformers` computes it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.model.model_tensors import flops_per_token, model_shape, model_tensors, parameter_names
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, ModelConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.run_sizes import rank_memory
from spare_megatron.mcore.gradients.gradients import Totals
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import expert_group, latent_group
from tests.integration import mcore_group as group
from tests.integration.latent_group import LATENT, MIXTURE, MODEL, ROUTER
from tests.integration.mcore_group import run_group, work_of
from tests.integration.reference import relative_distance
from tests.integration.test_experts import with_all_experts
from tests.integration.test_mcore_gradients import only_rank, whole_model
from tests.integration.test_model_shape import count_flops, parameters_of
from tests.integration.test_run_rejoin import AWAITED, STEPS, WATCH, rejoined
from tests.integration.whole_run import assert_masked, complete_run, kill, losses_of, tiny_config

ROPE = {"rope_type": "rope", **{name: LATENT[name] for name in list(LATENT)[:6]}}

CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}, LATENT),
    "usual rotation": ({}, {}, ROPE),
    "context parallel": ({"context_parallel": 2}, {}, LATENT),
    "a mixture": ({}, MIXTURE, {**LATENT, **ROUTER}),
    "a mixture in two stages": ({"pipeline_parallel": 2}, MIXTURE, {**LATENT, **ROUTER}),
    "a divided mixture": ({"data_parallel": 2}, MIXTURE, {**LATENT, **ROUTER}),
}


def config_of(corpus: Path, layout: dict[str, int], model: dict[str, Any], megatron: dict[str, Any]) -> RunConfig:
    shape = {"num_layers": 4, "hidden_size": 32, "seq_length": 16, "ffn_hidden_size": 48}
    config = RunConfig(
        model=ModelConfig(**{**shape, **MODEL, **model}),
        layout=LayoutConfig(num_groups=2, **layout),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=4),
        data=DataConfig(corpus=str(corpus)),
        train=TrainConfig(micro_batch_size=2),
        cluster=ClusterConfig(device="cpu"),
        megatron=megatron,
    )
    prepare_index(config)
    return config


def assert_sums_of(task: Callable[..., Any], config: RunConfig) -> tuple[list[Totals], Any, int]:
    """Compares the gradients of three units in two calls with those of a task. Returns the totals of the ranks that
    have some, what the task computes beside gradients, and the number of microbatches.
    """
    units = [(0, 1), (1, 0), (1, 1)]
    ranks = run_group(group.compute_sums, config, work_of(*units[:1]), work_of(*units[1:]))
    if config.model.num_experts is not None:
        ranks = with_all_experts(ranks, config)
    values, gradients = whole_model(ranks, config)
    size = config.row_size
    numbers = [shard * 4 + index * size + lane for shard, index in units for lane in range(size)]
    [(beside, expected)] = run_group(task, only_rank(config), values, numbers)
    assert relative_distance(gradients, expected) < 1e-5
    assert all(np.any(gradient) for gradient in gradients.values())
    return [totals for totals, _ in ranks if totals.loss.total], beside, len(numbers)


@pytest.mark.parametrize(("layout", "model", "megatron"), CASES.values(), ids=CASES)
def test_local_sums_are_those_of_transformers(
    text_corpus: Path, layout: dict[str, int], model: dict[str, Any], megatron: dict[str, Any]
) -> None:
    config = config_of(text_corpus, layout, model, megatron)
    found, loss_sum, _ = assert_sums_of(latent_group.deepseek_sums, config)
    losses = [totals.loss.total for totals in found]
    assert losses == pytest.approx([loss_sum] * len(losses), rel=1e-6)


def test_bf16_comes_close_to_transformers_in_fp32(text_corpus: Path) -> None:
    config = config_of(text_corpus, {"pipeline_parallel": 2}, {"precision": "bf16"}, LATENT)
    values, gradients = whole_model(run_group(group.compute_sums, config, work_of((0, 1), (1, 0))), config)
    [(_, expected)] = run_group(latent_group.deepseek_sums, only_rank(config), values, [1, 4])
    assert relative_distance(gradients, expected) < 0.02


@pytest.mark.parametrize("has_norms", [False, True])
def test_parameters_names_and_cost_are_those_that_the_settings_say(text_corpus: Path, has_norms: bool) -> None:
    model = {"vocab_size": 200, "linear_bias": True, "qk_norm": has_norms}
    config = replace(config_of(text_corpus, {}, model, LATENT), layout=LayoutConfig(num_groups=1))
    ((number, names),) = run_group(parameters_of, config)
    assert number == model_shape(config).num_parameters
    assert sorted(names) == sorted(parameter_names(config))
    tokens = config.train.micro_batch_size * config.model.seq_length
    (counted,) = run_group(count_flops, config)
    assert flops_per_token(config) * tokens == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("wider", [{"q_lora_rank": 28}, {"kv_lora_rank": 26}, {"qk_head_dim": 20, "v_head_dim": 24}])
def test_activations_grow_by_what_the_forward_pass_keeps(text_corpus: Path, wider: dict[str, int]) -> None:
    """Heads of equal widths, for which torch has a kernel on CPUs that keeps no scores, and norms that are fused."""
    even = {**LATENT, "qk_head_dim": 4, "v_head_dim": 8}
    fused = {"normalization": "layernorm"}
    narrow, wide = (config_of(text_corpus, {}, fused, {**even, **more}) for more in ({}, wider))
    [less], [more] = (run_group(latent_group.bytes_kept, config) for config in (narrow, wide))
    assert more - less == rank_memory(wide).activations_bytes - rank_memory(narrow).activations_bytes


def test_checkpoints_name_its_tensors_as_layers_of_transformer_engine_do(text_corpus: Path) -> None:
    config = config_of(text_corpus, {}, {**MIXTURE, "vocab_size": 256}, {**LATENT, **ROUTER})
    ([stored],) = run_group(expert_group.stored_shapes, config, [config])
    assert stored == {tensor.key: tensor.shape for tensor in model_tensors(config)}
    norms = {name for name in stored if "layers.1." in name and "norm" in name}
    in_linear = [f"self_attention.linear_{one}_up_proj.layer_norm_weight" for one in ("q", "kv")]
    alone = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
    assert norms == {f"decoder.layers.1.{name}" for name in (*alone, *in_linear)}


@pytest.mark.timeout(120)
def test_it_goes_on_bit_by_bit_as_one_group_that_computes_everything(text_corpus: Path, tmp_path: Path) -> None:
    """The biases of experts move, and one of two groups of two stages is lost and comes back."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2)
    shape = {**MODEL, **MIXTURE, "num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    faults = [kill("backward", 2, 1, rank=1)]
    config = tiny_config(text_corpus, layout, steps=STEPS, mode="reproducible", rejoins=1, faults=faults, **shape)
    config = replace(config, megatron={**LATENT, **ROUTER})
    run = complete_run(config, tmp_path, WATCH)
    assert_masked(run)
    assert rejoined(run) == [(1, 1, AWAITED + 1)]
    ranks = run_group(expert_group.curve, config)
    curve = [(loss, norm) for loss, norm, _ in ranks[0]]
    assert losses_of(run.journal) == {step: {values} for step, values in enumerate(curve)}
