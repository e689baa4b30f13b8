"""Whole runs on GPUs: NCCL between groups, ranks that are killed. Ranks share GPUs where there are too few."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.machine.gpus import visible_gpus
from spare_megatron.tools.bench.bench_throughput import memory_of
from spare_megatron.tools.bench.plain_megatron import run_plain
from tests.integration.whole_run import alert_config, assert_masked, complete_run, kill, losses_of

pytestmark = pytest.mark.timeout(900)

ON_GPU = ClusterConfig(device="gpu")
GROUPS = LayoutConfig(num_groups=4)
INSIDE = ({"pipeline_parallel": 2}, {"tensor_parallel": 2}, {"data_parallel": 2})
MODEL = {"precision": "bf16", "hidden_size": 128, "seq_length": 128, "hidden_dropout": 0.1, "attention_dropout": 0.1}
KILLS = (
    [kill("forward", 1, 1), kill("before_reduce", 3, 2)],
    [kill("in_reduce", 1, 1), kill("after_vote", 3, 2)],
    [kill("after_reduce", 1, 1), kill("after_commit", 3, 2)],
    [kill("backward", 2, 1), kill(FaultPoint.PATCH, 2, 2)],
    [kill("backward", 2, 1), kill(FaultPoint.REBUILD, 2, 2)],
)
"""Two lost groups of each run, in all phases of a step; the last two while the step recovers from the first."""


def on_gpus(
    corpus: Path,
    faults: Sequence[FaultConfig],
    *,
    layout: LayoutConfig = GROUPS,
    rejoins: int = 0,
    sharding: str = "replicated",
    mode: str = "reproducible",
) -> RunConfig:
    # Of three hosts of a state partition two may be lost in one step.
    optimizer = OptimizerConfig(sharding=sharding, redundancy=3)
    num_ranks = layout.num_groups * layout.tensor_parallel * layout.pipeline_parallel * layout.data_parallel
    return alert_config(
        corpus,
        layout,
        steps=6,
        faults=faults,
        mode=mode,
        cluster=replace(ON_GPU, ranks_per_gpu=-(-num_ranks // len(visible_gpus()))),
        rejoins=rejoins,
        optimizer=optimizer,
        **MODEL,
    )


@pytest.mark.gpu
def test_a_group_alone_trains_on_one_gpu(text_corpus: Path, tmp_path: Path) -> None:
    config = alert_config(text_corpus, LayoutConfig(num_groups=1), cluster=ON_GPU, **MODEL)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert len(losses_of(run.journal)) == config.train.steps


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_plain_megatron_trains_beside_it(text_corpus: Path, device: Any) -> None:
    config = alert_config(text_corpus, LayoutConfig(num_groups=1), cluster=ClusterConfig(device=device), **MODEL)
    ends, memory = run_plain(config, partial(memory_of, is_gpu=device == "gpu"))
    assert len(ends) == config.train.steps
    assert (memory.device_bytes > 0) == (device == "gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["replicated", "stacked"])
def test_killed_ranks_are_masked_bit_for_bit(text_corpus: Path, tmp_path: Path, sharding: str) -> None:
    expected = complete_run(on_gpus(text_corpus, [], sharding=sharding), tmp_path / "none")
    for number, faults in enumerate(KILLS):
        run = complete_run(on_gpus(text_corpus, faults, sharding=sharding), tmp_path / str(number))
        assert_masked(run)
        assert losses_of(run.journal) == losses_of(expected.journal)
        assert run.summary.params_sha256 == expected.summary.params_sha256


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["replicated", "stacked"])
def test_sums_in_bf16_are_masked_too(text_corpus: Path, tmp_path: Path, sharding: str) -> None:
    config = on_gpus(text_corpus, [kill("in_reduce", 2, 1)], sharding=sharding, mode="fast_bf16")
    config = replace(config, reduce=replace(config.reduce, overlap=True))
    assert_masked(complete_run(config, tmp_path / "run"))


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["replicated", "stacked"])
def test_a_rank_that_hangs_is_lost_alone_though_it_blocks_the_others(
    text_corpus: Path, tmp_path: Path, sharding: str
) -> None:
    hang = FaultConfig(phase=FaultPoint.IN_REDUCE, kind="hang", step=3, group=1, rank=0)
    config = on_gpus(text_corpus, [hang], sharding=sharding)
    reduce = replace(config.reduce, overlap=True, bucket_mib=0.125)  # most buckets leave in the backward pass
    run = complete_run(replace(config, reduce=reduce), tmp_path / "run", holds_back=False)
    assert_masked(run)


@pytest.mark.gpu
def test_a_killed_group_comes_back(text_corpus: Path, tmp_path: Path) -> None:
    config = on_gpus(text_corpus, [kill("backward", 2, 1)], rejoins=1)
    config = replace(config, train=replace(config.train, steps=200))
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert run.summary.groups_rejoined == 1


@pytest.mark.gpu
@pytest.mark.parametrize("inside", INSIDE, ids=lambda inside: next(iter(inside)))
def test_a_group_of_several_ranks_is_masked_bit_for_bit(
    text_corpus: Path, tmp_path: Path, inside: dict[str, int]
) -> None:
    layout = LayoutConfig(num_groups=3, **inside)
    runs = []
    for number, faults in enumerate(([], [kill("in_reduce", 2, 1, rank=1)])):
        config = on_gpus(text_corpus, faults, layout=layout)
        config = replace(config, reduce=replace(config.reduce, overlap=True, bucket_mib=0.125))
        runs.append(complete_run(config, tmp_path / str(number), holds_back=False))
        assert_masked(runs[-1])
    calm, struck = runs
    assert struck.summary.groups_lost == 1
    assert losses_of(struck.journal) == losses_of(calm.journal)
    assert struck.summary.params_sha256 == calm.summary.params_sha256
