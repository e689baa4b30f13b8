"""One group's local sums and its update, against one process that holds the full model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import mcore_group as group
from tests.integration.expert_group import all_units
from tests.integration.mcore_group import run_group, work_of
from tests.integration.reference import relative_distance

MakeConfig = Callable[..., RunConfig]
WORK = work_of((0, 0), (1, 2), (1, 0), (0, 2), (1, 1))
"""Neither in order nor a multiple of anything."""


@pytest.fixture
def make_config(random_corpus: Path) -> MakeConfig:
    def make(mode: str = "fast", model: dict[str, Any] | None = None, **layout: int) -> RunConfig:
        config = RunConfig(
            model=ModelConfig(num_layers=4, hidden_size=64, seq_length=32, **(model or {})),
            layout=LayoutConfig(num_groups=2, **layout),
            spare=SpareConfig(redundancy=2, microbatches_per_shard=3),
            data=DataConfig(corpus=str(random_corpus)),
            train=TrainConfig(steps=4),
            reduce=ReduceConfig(mode=mode),
        )
        prepare_index(config)
        return config

    return make


# ---------------------------------------------------------------------------------- against a single full model

LAYOUTS = {
    "one rank": {},
    "two tensor-parallel ranks": {"tensor_parallel": 2},
    "two stages": {"pipeline_parallel": 2},
    "four stages": {"pipeline_parallel": 4},
    "two by two": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "two lanes": {"data_parallel": 2},
    "two stages of two lanes": {"data_parallel": 2, "pipeline_parallel": 2},
    "two lanes of two": {"data_parallel": 2, "tensor_parallel": 2},
}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_local_sums_are_those_of_the_full_model(make_config: MakeConfig, layout: dict[str, int], is_tied: bool) -> None:
    config = make_config(model={"tie_embeddings": is_tied}, **layout)
    ranks = run_group(group.compute_sums, config, WORK[:2], WORK[2:])
    values, gradients = whole_model(ranks, config)
    loss_sum, expected = run_group(group.reference_sums, only_rank(config), values, WORK)[0]
    assert relative_distance(gradients, expected) < 1e-6
    for totals, _ in ranks:
        assert set(totals.num_microbatches) == {len(WORK)}
    last_stage_losses = [totals.loss.total for totals, _ in ranks if totals.loss.total]
    assert len(last_stage_losses) == config.parallel.ranks_per_stage
    assert last_stage_losses == pytest.approx([loss_sum] * len(last_stage_losses), rel=1e-6)


@pytest.mark.parametrize("layout", ["four stages", "interleaved"])
def test_every_stage_masks_documents(make_config: MakeConfig, layout: str) -> None:
    """Also those in the middle, which read nothing else of a batch."""
    config = make_config(model={"position_embedding": "rope"}, **LAYOUTS[layout])
    # Any token may end a document.
    config = replace(config, data=replace(config.data, reset_attention_mask=True, end_of_document=7))
    values, gradients = whole_model(run_group(group.compute_sums, config, WORK), config)
    _, expected = run_group(group.reference_sums, only_rank(config), values, WORK)[0]
    assert relative_distance(gradients, expected) < 1e-6
    unmasked = replace(config, data=replace(config.data, reset_attention_mask=False))
    _, others = run_group(group.reference_sums, only_rank(unmasked), values, WORK)[0]
    assert relative_distance(gradients, others) > 1e-3


@pytest.mark.parametrize(
    ("vocab_size", "tensor_parallel", "is_tied"), [(260, 1, True), (260, 2, False), (256, 4, True)]
)
def test_columns_that_pad_the_vocabulary_are_no_tokens(
    make_config: MakeConfig, vocab_size: int, tensor_parallel: int, is_tied: bool
) -> None:
    """They had a share of the softmax, another one in each layout. With 4 ranks, two have nothing but padding."""
    model = {"vocab_size": vocab_size, "tie_embeddings": is_tied}
    config = make_config(model=model, tensor_parallel=tensor_parallel)
    values, gradients = whole_model(run_group(group.compute_sums, config, WORK), config)
    assert len(values["embedding.word_embeddings.weight"]) == {1: 384, 2: 512, 4: 512}[tensor_parallel]
    _, expected = run_group(group.reference_sums, only_rank(config), values, WORK)[0]
    assert relative_distance(gradients, expected) < 1e-6
    for name in {"embedding.word_embeddings.weight", "output_layer.weight"} & gradients.keys():
        assert not gradients[name][vocab_size:].any()
        assert gradients[name][:vocab_size].any()


def test_rotary_positions_and_bf16_come_close_to_the_full_model(make_config: MakeConfig) -> None:
    config = make_config(model={"precision": "bf16", "position_embedding": "rope"}, pipeline_parallel=2)
    ranks = run_group(group.compute_sums, config, WORK)
    values, gradients = whole_model(ranks, config)
    in_fp32 = replace(config, model=replace(config.model, precision="fp32"))
    _, expected = run_group(group.reference_sums, only_rank(in_fp32), values, WORK)[0]
    assert relative_distance(gradients, expected) < 0.02


@pytest.mark.parametrize("layout", ["two by two", "two lanes"])
def test_the_losses_of_microbatches_add_up_to_that_of_the_step(make_config: MakeConfig, layout: str) -> None:
    """Each is known on one rank of the last stage, once, after the call that has computed it."""
    config = make_config(**LAYOUTS[layout])
    ranks = run_group(group.microbatch_losses, config, WORK[:2], WORK[2:4])
    losses = [loss for _, found in ranks for of_call in found for loss in of_call.values()]
    numbers = [number for _, found in ranks for of_call in found for number in of_call]
    assert len(numbers) == len(set(numbers)) == 4
    assert all(len(of_call) in (0, 2 // config.layout.data_parallel) for _, found in ranks for of_call in found)
    num_tokens = config.train.micro_batch_size * config.model.seq_length
    assert sum(losses) * num_tokens == pytest.approx(max(total for total, _ in ranks), rel=1e-5)


def test_two_calls_in_a_step_equal_one(make_config: MakeConfig) -> None:
    config = make_config(pipeline_parallel=2)
    for once, twice, with_nothing in run_group(
        group.packed_sums, config, 0, [WORK], [WORK[:2], WORK[2:]], [[], WORK, []]
    ):
        np.testing.assert_array_equal(once, twice)
        np.testing.assert_array_equal(once, with_nothing)


def test_padding_of_the_interleaved_schedule_contributes_nothing(make_config: MakeConfig) -> None:
    config = make_config("reproducible", pipeline_parallel=2, virtual_pipeline=2)
    for padded, also_padded, unpadded in run_group(
        group.packed_sums, config, 0, [WORK], [WORK[:3], WORK[3:]], [WORK[:4], WORK[4:]]
    ):
        np.testing.assert_array_equal(padded, also_padded)
        np.testing.assert_array_equal(padded, unpadded)
        assert padded[-2] == len(WORK)


# ------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
@pytest.mark.parametrize("layout", [LAYOUTS["one rank"], LAYOUTS["interleaved"]], ids=["one rank", "interleaved"])
def test_buckets_one_after_the_other_are_the_whole_sums(
    make_config: MakeConfig, mode: str, layout: dict[str, int]
) -> None:
    config = make_config(mode, **layout)
    in_buckets = replace(config, reduce=replace(config.reduce, bucket_mib=0.01))
    whole, parts = (run_group(group.packed_sums, c, 0, [WORK[:2]]) for c in (config, in_buckets))
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[0][-2] == 2


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_what_is_computed_later_is_added_to_the_buckets_that_are_not_kept_alone(
    make_config: MakeConfig, mode: str
) -> None:
    config = make_config(mode)
    # The first bucket ends inside a parameter, and so does the last that is kept.
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.0123))
    for num_kept in (0, 1, 17):
        [of_rank] = run_group(group.kept_sums, config, [num_kept], WORK[:1], WORK[1:3])
        assert_kept(num_kept, *of_rank)


def assert_kept(
    num_kept: int, buckets: Sequence[range], first: np.ndarray, kept: np.ndarray, whole: np.ndarray
) -> None:
    end = sum(map(len, buckets[:num_kept]))
    np.testing.assert_array_equal(kept[:end], 3 * first[:end])
    np.testing.assert_array_equal(kept[end:], whole[end:])
    assert num_kept == 0 or np.any(first[:end])
    assert np.any(first[end:-3] != whole[end:-3])


def test_sums_in_bf16_lose_digits_of_gradients_and_none_of_what_is_counted(make_config: MakeConfig) -> None:
    config = make_config("fast_bf16", model={"precision": "bf16"})
    # A bucket has an odd number of elements; bf16 has no 597.
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.0123))
    (before, after, totals, loss) = run_group(group.summed_in_bf16, config, 593)[0]
    distance = np.linalg.norm(after - 3 * before) / np.linalg.norm(3 * before)
    assert 2**-12 < distance < 2**-8
    assert len(totals.num_microbatches) > 2
    assert set(totals.num_microbatches) == {3 * (593 + len(group.all_work(config)))}
    assert totals.loss.total == pytest.approx(3 * loss, rel=1e-6)
    assert totals.loss.total > 1.0


@pytest.mark.parametrize(
    ("mode", "layout", "is_tied"),
    [
        ("fast", LAYOUTS["one rank"], True),
        ("fast", LAYOUTS["two by two"], False),
        ("reproducible", LAYOUTS["interleaved"], True),
        ("fast", {"data_parallel": 3, **LAYOUTS["interleaved"]}, False),
    ],
    ids=["one rank", "2x2", "vpp", "lanes, one without work"],
)
def test_a_bucket_that_is_reported_ready_has_its_last_bit(
    make_config: MakeConfig, mode: str, layout: dict[str, int], is_tied: bool
) -> None:
    config = make_config(mode, model={"tie_embeddings": is_tied}, **layout)
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.02))
    last = WORK[2:4] if config.layout.data_parallel > 1 else WORK[2:]
    for reported, num_buckets, is_final in run_group(group.left_early, config, WORK[:2], last):
        assert is_final
        assert reported == sorted(reported)
        assert reported[-1] == num_buckets
        assert reported[0] < num_buckets, "the first leave before the last are computed"


# --------------------------------------------------------------------------------------------------------- lanes


def test_fixed_point_sums_do_not_depend_on_lanes(make_config: MakeConfig) -> None:
    """Three lanes divide some ranges unevenly, and in the first of two calls two of them have no work."""
    config = make_config("reproducible", model={"hidden_dropout": 0.1}, data_parallel=3)
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.05))
    ways = ([WORK], [WORK[:1], WORK[1:]])
    [expected] = run_group(group.packed_sums, only_rank(config), 1, [WORK])[0]
    for of_lanes in zip(*run_group(group.placed_sums, config, 1, *ways), strict=True):
        np.testing.assert_array_equal(sum(lane[:-3] for lane in of_lanes), expected[:-3])
        for lane in of_lanes:
            np.testing.assert_array_equal(lane[-3:], expected[-3:])


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_lanes_may_keep_unequal_numbers_of_buckets(make_config: MakeConfig, mode: str) -> None:
    config = make_config(mode, data_parallel=2)
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.0123))
    kept_on = [17, 3]
    ranks = run_group(group.kept_sums, config, kept_on, WORK[:1], WORK[1:3])
    for num_kept, of_rank in zip(kept_on, ranks, strict=True):
        assert_kept(num_kept, *of_rank)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_what_is_not_finite_on_one_lane_is_found_by_the_lane_that_sums_it(make_config: MakeConfig, mode: str) -> None:
    config = make_config(mode, data_parallel=2)
    first, second = run_group(group.norms_after_a_nan_on_the_last_lane, config, WORK)
    assert not np.isfinite(first[0])
    assert not np.isfinite(second[0])


# ------------------------------------------------------------------------------------------------ reproducibility

EXPERTS = {"linear_bias": False, "num_experts": 3, "expert_ffn_hidden_size": 40}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({"tie_embeddings": True}, LAYOUTS["one rank"]),
        ({"tie_embeddings": True}, LAYOUTS["two by two"]),
        ({"tie_embeddings": False}, LAYOUTS["two lanes of two"]),
        (EXPERTS, {"data_parallel": 3, "expert_parallel": 3}),
    ],
    ids=["one rank", "2x2", "lanes", "experts"],
)
def test_megatron_adds_no_gradient_that_integer_sums_have(
    make_config: MakeConfig, model: dict[str, Any], layout: dict[str, int]
) -> None:
    """And the step is bitwise that in which it does."""
    config = make_config("reproducible", model=model, **layout)
    work = all_units(config, 0)
    for without, added in run_group(group.with_and_without_megatron, config, work[:2], work[2:]):
        assert not without[0]
        assert added[0]
        np.testing.assert_array_equal(without[1], added[1])
        assert without[2:] == added[2:]


@pytest.mark.parametrize(
    "layout", [LAYOUTS["one rank"], LAYOUTS["two by two"], LAYOUTS["interleaved"]], ids=["one rank", "2x2", "vpp"]
)
def test_fixed_point_sums_do_not_depend_on_who_computes_what_when(
    make_config: MakeConfig, layout: dict[str, int]
) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    config = make_config("reproducible", model=dropout, **layout)
    backwards = WORK[::-1]
    ways = ([WORK], [backwards], [WORK[3:], WORK[:3]], [WORK[:2]], [WORK[2:]])
    for buffers in run_group(group.packed_sums, config, 1, *ways):
        whole, reordered, split, part, rest = buffers
        assert whole.dtype == np.int64
        assert np.count_nonzero(whole) > 0.9 * whole.size
        np.testing.assert_array_equal(whole, reordered)
        np.testing.assert_array_equal(whole, split)
        np.testing.assert_array_equal(whole, part + rest)


def test_sums_of_a_batch_do_not_depend_on_its_division_into_shards(make_config: MakeConfig) -> None:
    """Data and dropout of a microbatch follow from its number in the batch, at any number of groups."""
    config = make_config("reproducible", model={"hidden_dropout": 0.1, "attention_dropout": 0.1})
    sums = []
    for num_groups, microbatches in ((2, 3), (3, 2), (6, 1)):
        spare = replace(config.spare, microbatches_per_shard=microbatches)
        other = replace(config, layout=replace(config.layout, num_groups=num_groups), spare=spare)
        sums += run_group(group.packed_sums, other, 1, [group.all_work(other)])[0]
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_array_equal(sums[0], sums[2])


def test_dropout_differs_between_steps(make_config: MakeConfig) -> None:
    config = make_config("reproducible", model={"hidden_dropout": 0.1})
    (first,) = run_group(group.packed_sums, config, 0, [WORK[:1]])[0]
    (second,) = run_group(group.packed_sums, config, 1, [WORK[:1]])[0]
    assert np.any(first != second)


def test_fixed_point_is_close_to_floating_point(make_config: MakeConfig) -> None:
    values, fixed = whole_model(run_group(group.compute_sums, make_config("reproducible"), WORK), make_config())
    same_values, floating = whole_model(run_group(group.compute_sums, make_config("fast"), WORK), make_config())
    assert relative_distance(values, same_values) == 0.0
    assert relative_distance(fixed, floating) < 1e-6


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_the_norm_of_local_sums_is_that_of_all_their_elements(make_config: MakeConfig, mode: str) -> None:
    norm, sums = run_group(group.norm_and_buffer, make_config(mode), 1.0)[0]
    assert norm == pytest.approx(np.linalg.norm(sums.astype(np.float64)), rel=1e-5)
    assert norm > 1.0


@pytest.mark.parametrize(("mode", "factor"), [("fast", np.nan), ("reproducible", np.nan), ("reproducible", 1e6)])
def test_sums_that_are_not_finite_or_do_not_fit_have_no_norm(make_config: MakeConfig, mode: str, factor: float) -> None:
    norm, _ = run_group(group.norm_and_buffer, make_config(mode), factor)[0]
    assert not np.isfinite(norm)


def test_tensor_ranks_draw_different_masks_and_stay_in_step(make_config: MakeConfig) -> None:
    (first, after_first), (second, after_second) = run_group(group.random_numbers_on_tensor_ranks, make_config())[0]
    assert first != second
    assert after_first == after_second


# --------------------------------------------------------------------------------------------------------- update


def test_an_update_equals_a_step_of_plain_adamw(make_config: MakeConfig) -> None:
    config = make_config()
    result, before, gradients, after = run_group(group.update_once, config)[0]
    norm = np.sqrt(sum(float(np.sum(gradient.astype(np.float64) ** 2)) for gradient in gradients.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert result.num_microbatches == 6
    assert 5.0 < result.loss < 6.0
    for name, expected in plain_adamw(config, before, gradients, norm).items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)
        assert np.any(after[name] != before[name])


def test_both_ends_of_tied_embeddings_stay_equal(make_config: MakeConfig) -> None:
    first_stage, last_stage = run_group(group.update_several, make_config(pipeline_parallel=2), 3)
    for first, last in zip(first_stage, last_stage, strict=True):
        np.testing.assert_array_equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


def test_groups_of_one_seed_start_and_stay_equal(make_config: MakeConfig) -> None:
    """Two groups never speak to each other here; what they agree on is the seed and the sums."""
    config = make_config("reproducible", pipeline_parallel=2)
    for one, other in zip(*(run_group(group.update_several, config, 2) for _ in range(2)), strict=True):
        for values, same_values in zip(one, other, strict=True):
            assert relative_distance(values, same_values) == 0.0


def test_a_sum_that_misses_a_microbatch_is_not_applied(make_config: MakeConfig) -> None:
    message, is_unchanged = run_group(group.update_with_a_missing_microbatch, make_config())[0]
    assert "count 5 microbatches, the step has 6" in message
    assert is_unchanged


def test_a_world_of_another_size_than_the_layout_is_refused(make_config: MakeConfig) -> None:
    message = run_group(group.refusal_of_a_larger_layout, make_config())[0]
    assert "the world has 1 ranks, but tensor x context x data x pipeline parallel size is 2" in message


def test_fingerprints_see_the_least_change_of_one_element(make_config: MakeConfig) -> None:
    built, nudged, restored = run_group(group.fingerprints, make_config(model={"precision": "fp32"}))[0]
    assert built == restored
    assert built[0] != nudged[0]
    assert built[1] != nudged[1]
    assert built[0] != built[1]


# --------------------------------------------------------------------------------------------------------- probes


def test_the_backward_probe_strikes_inside_a_backward_pass(make_config: MakeConfig) -> None:
    calls = run_group(group.probed, make_config(), frozenset({FaultPoint.BACKWARD}), WORK[:2])[0]
    assert [phase for phase, _ in calls if phase is FaultPoint.BACKWARD] == [FaultPoint.BACKWARD] * 2
    is_inside = dict(calls[:2])
    assert is_inside[FaultPoint.BACKWARD]
    assert not is_inside[FaultPoint.FORWARD]


def test_transfers_between_stages_are_probed(make_config: MakeConfig) -> None:
    phases = frozenset({FaultPoint.SEND, FaultPoint.RECEIVE})
    for calls in run_group(group.probed, make_config(pipeline_parallel=2), phases, WORK[:3]):
        counts = {phase: sum(call is phase for call, _ in calls) for phase in FaultPoint}
        # Each microbatch goes one way as an activation and comes back as a gradient; some calls do both at once.
        assert counts[FaultPoint.SEND] == counts[FaultPoint.RECEIVE] == 3
        assert counts[FaultPoint.FORWARD] == 3
        assert counts[FaultPoint.BACKWARD] == 0


def test_only_the_optimizer_takes_cpu_tensors_for_cuda_tensors(make_config: MakeConfig) -> None:
    ours, the_optimizers = run_group(group.type_of_a_tensor_on_a_rank, make_config())[0]
    assert (ours, the_optimizers) == ("torch.FloatTensor", "torch.cuda.FloatTensor")


# -------------------------------------------------------------------------------------------------------- helpers


def only_rank(config: RunConfig) -> RunConfig:
    return replace(config, layout=LayoutConfig(num_groups=config.layout.num_groups))


def whole_model(ranks: Sequence[tuple[Any, dict[str, Any]]], config: RunConfig) -> tuple[group.Arrays, group.Arrays]:
    """Values and gradients of the whole model, put together from those of the ranks."""
    values: group.Arrays = {}
    gradients: group.Arrays = {}
    width = config.layout.tensor_parallel
    for rank in range(0, len(ranks), width):
        parts = [parameters for _, parameters in ranks[rank : rank + width]]
        for name, (value, gradient, partition_dim) in parts[0].items():
            if partition_dim is not None:
                value = np.concatenate([part[name][0] for part in parts], axis=partition_dim)
                gradient = np.concatenate([part[name][1] for part in parts], axis=partition_dim)
            if name in values:
                np.testing.assert_array_equal(value, values[name])
                np.testing.assert_array_equal(gradient, gradients[name])
            values[name], gradients[name] = value, gradient
    if config.model.tie_embeddings and config.layout.pipeline_parallel > 1:
        for arrays in (values, gradients):
            np.testing.assert_array_equal(arrays.pop("output_layer.weight"), arrays["embedding.word_embeddings.weight"])
    return values, gradients


def plain_adamw(config: RunConfig, before: group.Arrays, gradients: group.Arrays, norm: float) -> group.Arrays:
    """One step of torch's AdamW on clipped gradients, without weight decay on vectors."""
    settings = config.optimizer
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in before.items()}
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(gradients[name]) * min(1.0, settings.clip_grad / (norm + 1e-6))
    decay = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    torch.optim.AdamW(decay, lr=settings.learning_rate, betas=betas, eps=settings.eps).step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}
