"""Optimizer state in partitions on a few groups each, or divided over lanes: against the whole state everywhere."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import (
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterRule,
    ReduceConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.gradients.partitions import StatePartitions, whole_parameters
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import UpdateResult
from spare_megatron.stacking.layout import PartitionId
from tests.integration import lane_group, plain_parity
from tests.integration import stacked_groups as groups
from tests.integration.mcore_group import Arrays, run_group, run_ranks
from tests.integration.reference import relative_distance
from tests.integration.whole_run import tiny_config

MakeConfig = Callable[..., RunConfig]
STEPS, FEW_STEPS = 20, 10
CLIP = 0.5


@pytest.fixture
def make_config(random_corpus: Path) -> MakeConfig:
    def make(mode: str = "fast", model: dict[str, Any] | None = None, **layout: int) -> RunConfig:
        config = RunConfig(
            model=ModelConfig(**{"num_layers": 4, "hidden_size": 64, "seq_length": 32, **(model or {})}),
            layout=LayoutConfig(**layout),
            spare=SpareConfig(redundancy=2, microbatches_per_shard=2),
            optimizer=OptimizerConfig(sharding="stacked", redundancy=2, warmup_steps=5, clip_grad=CLIP),
            data=DataConfig(corpus=str(random_corpus)),
            train=TrainConfig(steps=STEPS, micro_batch_size=1),
            reduce=ReduceConfig(mode=mode),
        )
        prepare_index(config)
        return config

    return make


LAYOUTS = {"one rank": {}, "two stages": {"pipeline_parallel": 2}, "two tensor-parallel ranks": {"tensor_parallel": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_are_those_of_whole_state_bit_for_bit_and_of_zero_1(make_config: MakeConfig, layout: str) -> None:
    """Two microbatches, weight decay for matrices only, warm-up and decay, tied embeddings, and every step clipped."""
    config = make_config(num_groups=2 if LAYOUTS[layout] else 4, **LAYOUTS[layout])
    ours = run_group(groups.train_both_ways, config, FEW_STEPS)
    theirs = run_ranks(config.parallel.num_ranks, groups.train_zero, config, FEW_STEPS)
    for rank, answers in enumerate(ours):
        assert_alike(answers)
        assert all(result.grad_norm > CLIP for _, result, _ in answers)
        rates = [result.learning_rate for _, result, _ in answers]
        assert 0.0 == rates[0] < rates[1] < rates[5] > rates[6] > rates[-1]
        assert relative_distance(answers[-1][0], theirs[same_position(config, rank)]) < 1e-6


@pytest.mark.parametrize(
    ("mode", "model", "layout"),
    [
        ("reproducible", {"hidden_dropout": 0.1}, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("fast", {"precision": "bf16"}, {}),
        ("fast", {"tie_embeddings": False}, {}),
    ],
    ids=["interleaved, fixed point", "bf16", "untied"],
)
def test_parameters_are_those_of_whole_state_bit_for_bit(
    make_config: MakeConfig, mode: str, model: dict[str, Any], layout: dict[str, int]
) -> None:
    for answers in run_group(groups.train_both_ways, make_config(mode, model, num_groups=3, **layout), 4):
        assert len(answers) == 4
        assert_alike(answers)


def test_bf16_parameters_are_within_a_rounding_of_those_of_zero_1(make_config: MakeConfig) -> None:
    """From the same gradients: those of a bf16 model change with the rounding of its parameters."""
    config = make_config(model={"precision": "bf16"}, num_groups=2)
    (ours,) = run_group(groups.apply_to_stacked, config, STEPS)
    theirs = run_ranks(2, groups.apply_to_zero, config, STEPS)[0]
    apart = np.concatenate([roundings_apart(ours[name], theirs[name]) for name in theirs])
    assert apart.max() <= 1
    assert np.count_nonzero(apart) < 1e-3 * apart.size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_parameters_after_20_steps_are_those_of_zero_1_bit_for_bit_if_both_clip_by_one_norm(
    make_config: MakeConfig, layout: str
) -> None:
    """The norm is all that differs: the same squares, added in another order.

    With its last bits one bf16 parameter out of many rounds the other way sooner or later, and then everything that is
    computed from it.
    """
    config = make_config(model={"precision": "bf16", "num_layers": 2}, num_groups=2, **LAYOUTS[layout])
    theirs = run_ranks(config.parallel.num_ranks, plain_parity.train_plain_with_norms, config, STEPS, True)
    norms = theirs[0][1]
    ours = run_group(plain_parity.train_stacked_with_norms, config, STEPS, norms)
    for rank, (values, own_norms) in enumerate(ours):
        expected = theirs[same_position(config, rank)][0]
        assert values.keys() == expected.keys()
        assert all(np.array_equal(values[name], expected[name]) for name in expected)
        assert own_norms == pytest.approx(norms, rel=1e-6)
        assert min(own_norms) > CLIP


def test_bf16_parameters_after_20_steps_are_those_of_plain_data_parallelism_bit_for_bit(
    make_config: MakeConfig,
) -> None:
    """Megatron adds the squares in our order where its optimizer is not sharded."""
    config = make_config(model={"precision": "bf16", "num_layers": 2}, num_groups=2)
    (expected, norms), _ = run_ranks(2, plain_parity.train_plain_with_norms, config, STEPS, False)
    [(values, own_norms)] = run_group(plain_parity.train_stacked_with_norms, config, STEPS, None)
    assert own_norms == norms
    assert min(own_norms) > CLIP
    assert values.keys() == expected.keys()
    assert all(np.array_equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("mode", "is_sharded"), [("fast", False), ("fast", True), ("fast_bf16", True)])
def test_plain_megatron_trains_the_same_where_its_transfers_overlap(
    make_config: MakeConfig, mode: str, is_sharded: bool
) -> None:
    """Gradients leave during the backward pass, and updated parameters during the next forward pass."""
    config = make_config(mode, model={"precision": "bf16", "num_layers": 2}, num_groups=2)
    overlapping = replace(config, reduce=replace(config.reduce, overlap=True))
    (expected, norms), _ = run_ranks(2, plain_parity.train_plain_with_norms, config, 3, is_sharded)
    for values, own_norms in run_ranks(2, plain_parity.train_plain_with_norms, overlapping, 3, is_sharded):
        assert own_norms == norms
        assert all(np.array_equal(values[name], expected[name]) for name in expected)


def test_a_group_without_state_takes_a_partition_over_piece_by_piece(make_config: MakeConfig) -> None:
    for precision in ("fp32", "bf16"):
        config = make_config(model={"precision": precision, "num_layers": 2}, num_groups=3)
        assert run_group(groups.repair_a_group, config, 10_000)[0] > 3


@pytest.mark.parametrize(("precision", "kinds"), [("fp32", 3), ("bf16", 4)])
def test_a_flipped_bit_of_any_kind_of_state_changes_the_digest_of_its_partition(
    make_config: MakeConfig, precision: str, kinds: int
) -> None:
    """Of parameters, both moments, and main parameters where there are any."""
    config = make_config(model={"precision": precision, "num_layers": 2}, num_groups=3)
    (digests,) = run_group(groups.digests_of_changed_state, config)
    assert len(digests) == len(set(digests)) == kinds + 1


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", 8), ("bf16", 12)])
def test_a_rank_holds_its_state_partitions_and_no_more(
    make_config: MakeConfig, precision: str, bytes_each: int
) -> None:
    """Moments, and main parameters where the model computes in bf16."""
    config = make_config(model={"precision": precision}, num_groups=4)
    num_elements, whole, parts = run_group(groups.state_bytes, config)[0]
    assert whole == bytes_each * num_elements
    assert sum(parts) == 2 * whole
    assert max(parts) <= 2 * whole / 4 + 2 * bytes_each
    zero = run_ranks(4, groups.zero_bytes, config)
    assert sum(zero) == whole


# ---------------------------------------------------------------------------------------------------------- cutting


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 7, 40])
def test_fragments_cover_every_parameter_once_in_the_order_of_the_partitions(num_partitions: int) -> None:
    shapes = [(3, 5), (1,), (4, 2), (7,)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    chunks: Any = [
        SimpleNamespace(module=torch.nn.ParameterList(parameters[:2])),
        SimpleNamespace(module=torch.nn.ParameterList(parameters[2:])),
    ]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    expected = flat.split(-(-flat.numel() // num_partitions))
    cut = StatePartitions(whole_parameters(chunks), num_partitions, piece_elements=4)
    for index in range(num_partitions):
        number = PartitionId(index)
        values = expected[index] if index < len(expected) else flat[:0]
        assert cut.length(number) == values.numel()
        assert cut.num_pieces(number) == len(values.split(4)) if values.numel() else cut.num_pieces(number) == 0
        for piece in range(cut.num_pieces(number)):
            fragments = list(cut.fragments(number, cut.place(number, piece)))
            assert torch.equal(torch.cat([item.values for item in fragments]), values.split(4)[piece])
            assert fragments[0].offset == 4 * piece
            for item in fragments:
                assert torch.equal(values[item.place], item.values)


# ---------------------------------------------------------------------------------------------------------- helpers


def assert_alike(answers: Sequence[tuple[Arrays, UpdateResult, Arrays]]) -> None:
    """After each step the parameters with stacked state are those with whole state."""
    for stacked, _, whole in answers:
        assert stacked.keys() == whole.keys()
        assert all(np.array_equal(stacked[name], whole[name]) for name in whole)


def same_position(config: RunConfig, rank: int) -> int:
    """The rank of the first data-parallel replica in plain Megatron that has the same part of the model.

    Megatron numbers ranks with the tensor-parallel index fastest, then data, then pipeline.
    """
    tensor = config.layout.tensor_parallel
    return rank // tensor * tensor * config.layout.num_groups + rank % tensor


def roundings_apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How many bf16 numbers lie between the elements, plus one where they differ: the distance of their patterns."""
    patterns = [np.ascontiguousarray(values).view(np.int32) >> 16 for values in (one, other)]
    ordered = [np.where(pattern < 0, np.int32(-(2**15)) - pattern, pattern) for pattern in patterns]
    return np.abs(ordered[0] - ordered[1]).ravel()


DIVIDED_STEPS, DIVIDED_CLIP = 4, 0.5
RULES = (ParameterRule(pattern="*.linear_fc1.weight", weight_decay_factor=0.5, learning_rate_factor=2.0),)


def config_of(corpus: Path, layout: LayoutConfig, mode: str, precision: str, clip: float = DIVIDED_CLIP) -> RunConfig:
    settings = OptimizerConfig(learning_rate=5e-3, warmup_steps=2, weight_decay=0.1, clip_grad=clip, rules=RULES)
    return tiny_config(corpus, layout, num_microbatches=3, mode=mode, precision=precision, optimizer=settings)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (LayoutConfig(num_groups=2, data_parallel=3), "bf16"),
        (LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2), "fp32"),
    ],
    ids=["three lanes", "two lanes of two stages"],
)
def test_parameters_of_divided_state_are_those_of_whole_state_bit_for_bit(
    text_corpus: Path, layout: LayoutConfig, precision: str
) -> None:
    """With gradients of own strips alone, uneven strips, tied embeddings, rules, weight decay and clipping."""
    config = config_of(text_corpus, layout, "reproducible", precision)
    for rank in run_group(lane_group.update_both_ways, config, DIVIDED_STEPS):
        assert [ours for ours, _, _ in rank] == [theirs for _, theirs, _ in rank]
        assert max(norm for (norm, _), _, _ in rank) > DIVIDED_CLIP
        assert all(apart == 0.0 for _, _, apart in rank)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("parts", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}], ids=["stages", "tensor"])
def test_sums_of_floats_give_the_same_norm_but_for_its_rounding(text_corpus: Path, parts: dict[str, int]) -> None:
    """Of tied embeddings in two places, or of parameters that both tensor-parallel ranks have."""
    layout = LayoutConfig(num_groups=2, data_parallel=2, **parts)
    config = config_of(text_corpus, layout, "fast", "fp32")
    ranks = run_group(lane_group.update_both_ways, config, DIVIDED_STEPS)
    for rank in ranks:
        for (norm, rate), (expected, expected_rate), apart in rank:
            assert norm == pytest.approx(expected, rel=1e-6)
            assert rate == expected_rate
            assert apart < 1e-6
    assert len({tuple(ours for ours, _, _ in rank) for rank in ranks}) == 1


@pytest.mark.timeout(120)
def test_other_ranks_and_runs_go_on_from_the_state_bit_for_bit(text_corpus: Path, tmp_path: Path) -> None:
    layout = LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2)
    config = config_of(text_corpus, layout, "reproducible", "fp32")
    for rank in run_group(lane_group.carry_over, config, tmp_path, DIVIDED_STEPS):
        assert all(rank.values()), rank
