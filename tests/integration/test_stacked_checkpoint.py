"""Checkpoints and snapshots of optimizer state in partitions."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, ParameterRule, RunConfig
from spare_megatron.mcore.group_checkpoint import boxes
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import snapshot_groups as snapshots
from tests.integration import stacked_checkpoint_groups as checkpoints
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

BEFORE, AFTER = 2, 3


def config_of(corpus: Path, layout: LayoutConfig, **model: object) -> RunConfig:
    """A run of some microbatches a step, whose learning rate changes and whose gradients are clipped."""
    num_microbatches = 8 // layout.num_groups
    common = {"steps": BEFORE + AFTER, "num_microbatches": num_microbatches, "mode": "reproducible"}
    optimizer = OptimizerConfig(sharding="stacked", learning_rate=5e-3, warmup_steps=2, clip_grad=0.5)
    config = replace(tiny_config(corpus, layout, **common, **model), optimizer=optimizer)
    prepare_index(config)
    return config


CASES = {
    "groups_4_to_2_and_tensor_1_to_2": (LayoutConfig(num_groups=4), LayoutConfig(num_groups=2, tensor_parallel=2), {}),
    "bf16_tensor_2_to_pipeline_2": (
        LayoutConfig(num_groups=2, tensor_parallel=2),
        LayoutConfig(num_groups=3, pipeline_parallel=2),
        {"precision": "bf16"},
    ),
    "mixture_pipeline_1_to_2": (
        LayoutConfig(num_groups=2),
        LayoutConfig(num_groups=2, pipeline_parallel=2),
        {"num_experts": 3, "linear_bias": False, "activation": "swiglu", "num_dense_layers": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_state_partitions_load_as_replicated_state_and_the_other_way_round(
    text_corpus: Path, tmp_path: Path, case: str
) -> None:
    saved, loaded, model = CASES[case]
    curve = run_group(checkpoints.save_both_ways, config_of(text_corpus, saved, **model), tmp_path, BEFORE, AFTER)[0]
    (partitioned, common), (whole, expected) = (
        checkpoints.contents(tmp_path / name) for name in (checkpoints.PARTITIONED, checkpoints.WHOLE)
    )
    assert partitioned.keys() == whole.keys()
    assert all(torch.equal(partitioned[key], whole[key]) for key in whole)
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in whole)
    assert common == expected
    there = config_of(text_corpus, loaded, **model)
    if model:  # other rates than those it was saved with count for both
        rules = (ParameterRule(pattern="embedding.*", learning_rate_factor=0.3), ParameterRule(pattern="*.mlp.*.bias"))
        there = replace(there, optimizer=replace(there.optimizer, learning_rate=2e-3, rules=rules))
    answers = run_group(checkpoints.load_and_train_both_ways, there, tmp_path, BEFORE, AFTER)
    for of_rank in answers:
        assert all(answer == of_rank[0] for answer in of_rank)
        *_, rate = of_rank[0][0][0]
        assert rate == there.optimizer.learning_rate  # the warm-up ends where the loaded state does
    if case.startswith("groups"):
        np.testing.assert_allclose(answers[0][0][0], curve, rtol=2e-6)


@pytest.mark.parametrize("layout", [LayoutConfig(num_groups=2), LayoutConfig(num_groups=2, tensor_parallel=2)])
def test_another_precision_keeps_every_bit_of_the_optimizer_state(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    """fp32 to bf16, each form of the state in each, and back: by what torch alone reads of the checkpoints."""
    model = {"activation": "swiglu", "position_embedding": "rope"}
    fp32 = config_of(text_corpus, layout, **model)
    bf16 = replace(fp32, model=replace(fp32.model, precision="bf16"))
    run_group(checkpoints.save_both_ways, fp32, tmp_path, BEFORE, 1)
    before, _ = checkpoints.contents(tmp_path / checkpoints.WHOLE)
    for of_rank in run_group(checkpoints.load_and_save_both_ways, bf16, tmp_path, tmp_path / "bf16"):
        assert len({*of_rank}) == 1
    main = "optimizer.state.fp32_param."
    for folder in sorted((tmp_path / "bf16").iterdir()):
        found, _ = checkpoints.contents(folder)
        parameters = {key for key in before if f"{main}{key}" in found}
        assert {key for key in found if not key.startswith(main)} == before.keys()
        assert any("mlp.linear_fc1" in key for key in parameters)
        for key, value in before.items():
            if key in parameters:
                assert torch.equal(found[f"{main}{key}"], value)
                assert torch.equal(found[key], value.bfloat16())
            else:
                assert torch.equal(found[key], value)
        assert any(not torch.equal(found[key].float(), before[key]) for key in parameters)
    back = tmp_path / "bf16"
    (back / f"{checkpoints.WHOLE}-{checkpoints.PARTITIONED}").rename(back / checkpoints.PARTITIONED)
    (back / f"{checkpoints.PARTITIONED}-{checkpoints.WHOLE}").rename(back / checkpoints.WHOLE)
    run_group(checkpoints.load_and_save_both_ways, fp32, back, tmp_path / "fp32")
    for folder in sorted((tmp_path / "fp32").iterdir()):
        found, _ = checkpoints.contents(folder)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[key], before[key]) for key in before)


def test_boxes_are_the_range_in_its_order_and_few() -> None:
    for shape in ((7,), (3, 5), (2, 3, 4), (1, 4, 1)):
        flat = np.arange(math.prod(shape))
        for start, stop in itertools.combinations(range(flat.size + 1), 2):
            found = list(boxes(shape, start, stop))
            places = [tuple(map(slice, offsets, np.add(offsets, sizes))) for offsets, sizes in found]
            taken = [flat.reshape(shape)[place].ravel() for place in places]
            assert np.array_equal(np.concatenate(taken), flat[start:stop])
            assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_snapshot_requested_before_the_parameters_are_there_has_them(text_corpus: Path, precision: str) -> None:
    config = config_of(text_corpus, LayoutConfig(num_groups=3), precision=precision)
    ((answers, records),) = run_group(snapshots.go_on_from_memory, config, 2, 3)
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == 1
    assert [(record.group, record.is_kept, record.has_params) for record in records] == [
        (0, True, True),
        (1, True, False),
        (2, True, False),
    ]
    assert sorted(number for record in records for number in record.slices) == [0, 1, 2]
