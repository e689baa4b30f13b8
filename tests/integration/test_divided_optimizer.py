"""Optimizer state divided over the lanes of a group: against the whole state on one rank."""

from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, ParameterRule, RunConfig
from tests.integration import lane_group
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS, CLIP = 4, 0.5
RULES = (ParameterRule(pattern="*.linear_fc1.weight", weight_decay_factor=0.5, learning_rate_factor=2.0),)


def config_of(corpus: Path, layout: LayoutConfig, mode: str, precision: str, clip: float = CLIP) -> RunConfig:
    settings = OptimizerConfig(learning_rate=5e-3, warmup_steps=2, weight_decay=0.1, clip_grad=clip, rules=RULES)
    return tiny_config(corpus, layout, mode=mode, precision=precision, optimizer=settings)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (LayoutConfig(num_groups=2, data_parallel=3), "bf16"),
        (LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2), "fp32"),
    ],
    ids=["three lanes", "two lanes of two stages"],
)
def test_parameters_are_those_of_whole_state_bit_for_bit(
    text_corpus: Path, layout: LayoutConfig, precision: str
) -> None:
    """With gradients of own strips alone, uneven strips, tied embeddings, rules, weight decay and clipping."""
    config = config_of(text_corpus, layout, "reproducible", precision)
    for rank in run_group(lane_group.update_both_ways, config, STEPS):
        assert [ours for ours, _, _ in rank] == [theirs for _, theirs, _ in rank]
        assert max(norm for (norm, _), _, _ in rank) > CLIP
        assert all(apart == 0.0 for _, _, apart in rank)


@pytest.mark.parametrize("parts", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}], ids=["stages", "tensor"])
def test_sums_of_floats_give_the_same_norm_but_for_its_rounding(text_corpus: Path, parts: dict[str, int]) -> None:
    """Of tied embeddings in two places, or of parameters that both tensor-parallel ranks have."""
    layout = LayoutConfig(num_groups=2, data_parallel=2, **parts)
    config = config_of(text_corpus, layout, "fast", "fp32")
    ranks = run_group(lane_group.update_both_ways, config, STEPS)
    for rank in ranks:
        for (norm, rate), (expected, expected_rate), apart in rank:
            assert norm == pytest.approx(expected, rel=1e-6)
            assert rate == expected_rate
            assert apart < 1e-6
    assert len({tuple(ours for ours, _, _ in rank) for rank in ranks}) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_ranks_and_runs_go_on_from_the_state_bit_for_bit(
    text_corpus: Path, tmp_path: Path, precision: str
) -> None:
    layout = LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2)
    config = config_of(text_corpus, layout, "reproducible", precision)
    for rank in run_group(lane_group.carry_over, config, tmp_path, STEPS):
        assert all(rank.values()), rank
