"""Checkpoints of a group: what they hold, and that any layout goes on from them as if nothing had been."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, ParameterRule, RunConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration.checkpoint_group import load_and_train, train_and_save
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

BEFORE, AFTER = 3, 3


def config_of(corpus: Path, layout: LayoutConfig, num_microbatches: int = 2, **model: object) -> RunConfig:
    """A run whose learning rate changes with every step and whose gradients are clipped."""
    config = tiny_config(
        corpus, layout, steps=BEFORE + AFTER, num_microbatches=num_microbatches, mode="reproducible", **model
    )
    optimizer = OptimizerConfig(learning_rate=5e-3, warmup_steps=2, clip_grad=0.5)
    config = replace(config, optimizer=optimizer)
    prepare_index(config)
    return config


def whole(parts: list[Any]) -> dict[str, np.ndarray]:
    """The parameters of the whole model from those of its ranks."""
    found: dict[str, list] = {}
    for _, values, *_ in parts:
        for name, (value, dim) in values.items():
            found.setdefault(name, []).append((value, dim))
    return {
        name: values[0][0] if values[0][1] is None else np.concatenate([value for value, _ in values], values[0][1])
        for name, values in found.items()
    }


CASES = {
    "same": (LayoutConfig(num_groups=4, pipeline_parallel=2), LayoutConfig(num_groups=4, pipeline_parallel=2)),
    "pipeline_2_to_1_and_groups_4_to_2": (
        LayoutConfig(num_groups=4, pipeline_parallel=2),
        LayoutConfig(num_groups=2),
    ),
    "tensor_2_to_1": (LayoutConfig(num_groups=4, tensor_parallel=2), LayoutConfig(num_groups=4)),
    "lanes_to_none": (
        LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2),
        LayoutConfig(num_groups=4, pipeline_parallel=2),
    ),
    "lanes_2_to_3_and_pipeline_2_to_1": (
        LayoutConfig(num_groups=4, data_parallel=2, pipeline_parallel=2),
        LayoutConfig(num_groups=2, data_parallel=3),
    ),
    "interleaved_to_tensor": (
        LayoutConfig(num_groups=4, pipeline_parallel=2, virtual_pipeline=2),
        LayoutConfig(num_groups=4, tensor_parallel=2),
    ),
}


def stages_of(layout: LayoutConfig) -> tuple[int, int, int]:
    """How a layout divides the model."""
    return layout.tensor_parallel, layout.pipeline_parallel, layout.virtual_pipeline


def first_lane(layout: LayoutConfig, ranks: list[Any]) -> list[Any]:
    """What the ranks of the first lane have answered; all lanes have the same parameters."""
    return [
        answer
        for rank, answer in enumerate(ranks)
        if rank % (layout.data_parallel * layout.tensor_parallel) < layout.tensor_parallel
    ]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(
    text_corpus: Path, tmp_path: Path, case: str
) -> None:
    saved, loaded = CASES[case]
    microbatches = 2 * 4
    terms = {"num_layers": 4, "vocab_size": 256}
    here = config_of(text_corpus, saved, microbatches // saved.num_groups, **terms)
    there = config_of(text_corpus, loaded, microbatches // loaded.num_groups, **terms)
    if case == "interleaved_to_tensor":  # with a tensor that each layer of some models alone has
        here, there = (replace(one, megatron={"softmax_type": "learnable"}) for one in (here, there))
    went_on = run_group(train_and_save, here, tmp_path, BEFORE, AFTER)
    resumed = run_group(load_and_train, there, tmp_path, BEFORE, AFTER)
    curve, expected = resumed[0][0], went_on[0][0]
    if stages_of(saved) == stages_of(loaded):
        assert curve == expected
        mine_of, theirs_of = first_lane(loaded, resumed), first_lane(saved, went_on)
        assert [values.keys() for _, values, *_ in mine_of] == [values.keys() for _, values, *_ in theirs_of]
        for (_, mine, *_), (_, theirs, *_) in zip(mine_of, theirs_of, strict=True):
            assert all(np.array_equal(mine[name][0], theirs[name][0]) for name in mine)
    else:
        np.testing.assert_allclose(curve, expected, rtol=2e-6)
        mine, theirs = whole(first_lane(loaded, resumed)), whole(first_lane(saved, went_on))
        assert mine.keys() - theirs.keys() <= {"output_layer.weight"}  # the last stage's copy of tied embeddings
        for name in mine.keys() & theirs.keys():
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, atol=2e-6)


def test_stages_that_lack_what_a_rule_is_for_go_on_from_their_checkpoint(text_corpus: Path, tmp_path: Path) -> None:
    """Megatron leaves out empty lists of fp32 parameters: the others took their places, or the load failed. And it took
    rules that differ in the end of the decay alone for one: the parameters of the first were never updated again.
    """
    config = config_of(text_corpus, LayoutConfig(num_groups=2, pipeline_parallel=2), precision="bf16")
    patterns = {"embedding.position*": None, "decoder.layers.1.*": None, "*.linear_proj.*": 0.1}
    rules = tuple(
        ParameterRule(pattern=pattern, learning_rate_factor=0.5, min_learning_rate_factor=least)
        for pattern, least in patterns.items()
    )
    config = replace(config, optimizer=replace(config.optimizer, rules=rules, min_learning_rate=1e-4))
    went_on = run_group(train_and_save, config, tmp_path, BEFORE, AFTER)
    resumed = run_group(load_and_train, config, tmp_path, BEFORE, AFTER)
    for (curve, mine), (expected, theirs, _) in zip(resumed, went_on, strict=True):
        assert curve == expected
        assert all(np.array_equal(mine[name][0], theirs[name][0]) for name in theirs)
