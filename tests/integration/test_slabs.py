"""Groups whose pipelines have fewer stages, of several slabs each, beside those in which each slab is a stage."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from spare_megatron.config.schema import (
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ReduceConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.stacking.layout import Slabs
from tests.integration import slab_groups
from tests.integration.mcore_group import all_work, reference_sums, run_group, work_of
from tests.integration.reference import relative_distance
from tests.integration.test_mcore_gradients import only_rank, whole_model
from tests.integration.whole_run import MUON, needs_muon

WORK = work_of((0, 0), (1, 2), (1, 0), (0, 2), (1, 1))
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS = {"num_experts": 4, "num_dense_layers": 1, "linear_bias": False}
BF16 = {"precision": "bf16"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fast", {}),
    "fp32, dropout": ("fast", DROPOUT),
    "bf16": ("fast", BF16),
    "bf16, dropout, reproducible": ("reproducible", {**BF16, **DROPOUT}),
    "windows of some layers": ("fast", {"sliding_window": 4, "window_attn_skip_freq": [1, 0, 1, 1, 0, 0]}),
    "experts": ("fast", EXPERTS),
    "experts, bf16, dropout": ("fast", {**EXPERTS, **BF16, **DROPOUT}),
}
LENGTHS = (3, 2, 1)
CLIPPED = OptimizerConfig(clip_grad=0.01)
CLIPPED_MUON = replace(MUON, clip_grad=0.01)
GradientDigests = dict[str, dict[str, str]]
"""Variant -> parameter -> digest."""


def config_of(
    corpus: Path, length: int, mode: str, *, lanes: int = 1, optimizer: OptimizerConfig = CLIPPED, **model: Any
) -> RunConfig:
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    fields = {name: model.pop(name) for name in ("window_attn_skip_freq", "mtp_num_layers") if name in model}
    config = RunConfig(
        model=ModelConfig(hidden_size=32, seq_length=16, **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **model}),
        layout=LayoutConfig(num_groups=2, pipeline_parallel=length, data_parallel=lanes),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=3 * (lanes if "num_experts" in model else 1)),
        data=DataConfig(corpus=str(corpus)),
        train=TrainConfig(steps=4),
        optimizer=optimizer,
        reduce=ReduceConfig(mode=mode, bucket_mib=0.01),
        megatron={**(balancing if "num_experts" in model else {}), **fields},
    )
    prepare_index(config)
    return config


def digests_by_length(random_corpus: Path) -> dict[int, GradientDigests]:
    """Of the gradients of six layers, by the length of the pipeline."""
    found: dict[int, GradientDigests] = {}
    for length in LENGTHS:
        configs = {
            name: config_of(random_corpus, length, mode, num_layers=6, tie_embeddings=False, **model)
            for name, (mode, model) in VARIANTS.items()
        }
        config, slabs = configs["fp32"], Slabs(6, LENGTHS)
        ranks = run_group(slab_groups.digests_of_gradients, config, slabs, configs, WORK[:2], WORK[2:])
        found[length] = {
            name: {key: one for of_rank in ranks for key, one in of_rank[name].items()} for name in configs
        }
    return found


def test_gradients_have_the_same_bits_in_pipelines_of_all_lengths(random_corpus: Path) -> None:
    gradients = digests_by_length(random_corpus)
    of_layers = {f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(6)}
    audited = {f"{kind} of slab {n} at position {n}" for kind in ("forward", "backward", "gradients") for n in range(4)}
    for length, variant in product(LENGTHS[1:], VARIANTS):
        expected = gradients[LENGTHS[0]][variant]
        assert gradients[length][variant] == expected, (length, variant)
        assert {"embedding.word_embeddings.weight", "output_layer.weight", *of_layers, *audited} <= expected.keys()
        assert sum(key.startswith("position ") and not key.endswith(" 1 buckets") for key in expected) == 4
        others = gradients[length][next(other for other in VARIANTS if other != variant)]
        named = [digest for name, digest in expected.items() if name not in audited]
        assert set(others.values()).isdisjoint(named), "digests see what differs"


FUTURE = {"mtp_num_layers": 2, "position_embedding": "rope", "tie_embeddings": False, **EXPERTS}


@pytest.mark.parametrize("model", [{}, FUTURE], ids=["tied", "several tokens"])
def test_stages_of_unequal_length_compute_the_gradients_of_the_full_model(
    random_corpus: Path, model: dict[str, Any]
) -> None:
    """In three stages of four layers, the last of two slabs, as in four stages; both ends have the embedding table.
    That of a model of several tokens stands in `test_future_tokens`.
    """
    slabs, found = Slabs(4, (4, 3)), []
    for length, numbers in ((4, [[0], [1], [2], [3]]), (3, [[0], [1], [2, 3]])):
        config = config_of(random_corpus, length, "fast", num_layers=4, **model)
        ranks = run_group(slab_groups.compute_in_slabs, config, slabs, WORK)
        assert [of_rank for of_rank, _ in ranks] == numbers
        values, gradients = whole_model([sums for _, sums in ranks], config)
        if not model:
            _, expected = run_group(reference_sums, only_rank(config), values, WORK)[0]
            assert relative_distance(gradients, expected) < 1e-6
        found.append((values, gradients))
    for of_four, of_three in zip(*found, strict=True):
        assert of_four.keys() == of_three.keys()
        for name, array in of_four.items():
            np.testing.assert_array_equal(array, of_three[name], err_msg=name)


# -------------------------------------------------------------------------------------------- groups beside each other

BESIDE = Slabs(6, (3, 2))
HELD = {3: [[0], [1, 2], [3]], 2: [[0, 1], [2, 3]]}
"""Slabs of the stages of a group, by the length of its pipeline."""


def held_by(lengths: tuple[int, int], lanes: int = 1) -> list[list[int]]:
    """The positions of each rank, as in the answers of `run_beside`."""
    stages = [stage for length in lengths for stage in HELD[length]]
    return [[slab * lanes + lane for slab in stage] for stage in stages for lane in range(lanes)]


def run_beside(task: Callable[..., Any], configs: Sequence[RunConfig], works: slab_groups.Works) -> list[Any]:
    """What the ranks of two groups, which run at once, returned: the first one's, then the other's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(len(configs)) as pool:
        running = [
            pool.submit(run_group, task, config, BESIDE, group, store.port, works)
            for group, config in enumerate(configs)
        ]
        return [answer for future in running for answer in future.result()]


@pytest.mark.parametrize(
    ("mode", "lanes", "model"),
    [
        ("fast", 1, DROPOUT),
        ("fast", 2, BF16),
        ("reproducible", 2, {**EXPERTS, **DROPOUT}),
        pytest.param("fast", 2, {**BF16, "optimizer": CLIPPED_MUON}, marks=needs_muon),
        pytest.param("reproducible", 2, {**EXPERTS, "optimizer": CLIPPED_MUON}, marks=needs_muon),
    ],
    ids=["fast, tied", "lanes, bf16", "lanes, reproducible, experts", "lanes, bf16, Muon", "lanes, experts, Muon"],
)
def test_a_group_of_two_stages_trains_beside_one_of_three_to_the_bits_of_equal_groups(
    random_corpus: Path, mode: str, lanes: int, model: dict[str, Any]
) -> None:
    """Each sum is over the ranks that hold a slab, wherever that is in their pipelines."""
    works = [[work_of((0, 0), (0, 1), (0, 2)), work_of((1, 0), (1, 1), (1, 2))]] * 3
    mixed, equal = (
        run_beside(
            slab_groups.train,
            [config_of(random_corpus, length, mode, lanes=lanes, num_layers=6, **model) for length in lengths],
            works,
        )
        for lengths in ((3, 2), (3, 3))
    )
    whole: dict[str, str] = {}
    for _, complete, figures, named in (*mixed, *equal):
        assert complete == mixed[0][1], "the same buckets at all positions"
        assert figures == mixed[0][2], "losses, norms and digests"
        assert all(whole.setdefault(name, digest) == digest for name, digest in named.items())
    assert len(mixed[0][1]) == len(works)
    assert [number > 1 for number in mixed[0][1][0]] == [True] * 4 * lanes
    for (posted, *_), held in zip(mixed, held_by((3, 2), lanes), strict=True):
        of_step = posted[: len(posted) // len(works)]
        assert posted == of_step * len(works)
        assert of_step == sorted(of_step, reverse=True), "last slabs first"
        assert sorted(set(of_step)) == held


def test_buckets_are_kept_by_slab_whichever_ranks_hold_it(random_corpus: Path) -> None:
    works = [[work_of((0, 0)), work_of((1, 0), (1, 1))], [work_of((0, 1)), work_of((0, 2))]]
    configs = [config_of(random_corpus, length, "fast", num_layers=6, **DROPOUT) for length in (3, 2)]
    answers = run_beside(slab_groups.retry, configs, works)
    kept = answers[0][0]
    assert (kept[:3], kept[3] > 1) == ((0, 0, 0), True)
    for (kept_here, counted), held in zip(answers, held_by((3, 2)), strict=True):
        assert kept_here == kept
        assert sorted(counted) == held
        for position, numbers in counted.items():
            assert set(numbers) == {3 if position == 3 else 5}, "only what was not kept has the work of the patch"


@pytest.mark.parametrize("as_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("length", "other", "precision", "lanes"),
    [(3, 2, "fp32", 1), (2, 3, "bf16", 1), (2, 3, "fp32", 2), (3, 2, "bf16", 2)],
)
def test_a_newcomer_takes_the_state_of_a_group_with_another_pipeline_over(
    random_corpus: Path, tmp_path: Path, length: int, other: int, precision: str, lanes: int, as_checkpoint: bool
) -> None:
    configs = [
        config_of(random_corpus, stages, "fast", lanes=lanes, num_layers=6, precision=precision, **DROPOUT)
        for stages in (length, other)
    ]
    assert_taken_over(configs, tmp_path, as_checkpoint=as_checkpoint)


@needs_muon
def test_so_it_does_with_muon(random_corpus: Path, tmp_path: Path) -> None:
    model = {"num_layers": 6, "optimizer": CLIPPED_MUON, **BF16, **DROPOUT}
    configs = [config_of(random_corpus, stages, "fast", lanes=2, **model) for stages in (2, 3)]
    assert_taken_over(configs, tmp_path, as_checkpoint=False)


def assert_taken_over(configs: Sequence[RunConfig], folder: Path, *, as_checkpoint: bool) -> None:
    given, taken = (
        run_group(partial(task, as_checkpoint=as_checkpoint), config, BESIDE, folder, [all_work(config)] * 3)
        for task, config in zip((slab_groups.give, slab_groups.take), configs, strict=True)
    )
    assert [*given, *taken] == [given[0]] * sum(config.parallel.ranks_per_group for config in configs)
