"""Runs that send gradients of partitions only to the groups that update them, as over NCCL: losses change no bit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import RepairRecord, UpdateRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration.mcore_group import run_ranks
from tests.integration.scattered_gradients import norms_both_ways
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    entries_of,
    kill,
    losses_of,
    params_of,
    tiny_config,
)

pytestmark = pytest.mark.timeout(180)

STEPS = 5
STAGES = LayoutConfig(num_groups=4, pipeline_parallel=2)
"""Both stages have the tied embeddings, whose gradients every group needs."""


def test_losses_in_a_reduction_and_an_update_with_copies_under_way_change_no_bit(
    text_corpus: Path, tmp_path: Path
) -> None:
    expected = scattered(text_corpus, tmp_path / "expected", [])
    flip = FaultConfig(phase=FaultPoint.STAGED, step=2, group=2, rank=0, kind="sum_flip", bit=5)
    faults = [kill("in_reduce", 1, 1, 1), flip, kill("after_commit", 3, 3)]
    run = scattered(text_corpus, tmp_path / "faults", faults, 2)
    reasons = [entry["reason"] for entry in entries_of(run.journal) if entry["entry"] == "fence" and entry["discard"]]
    found = "the staged copy of bucket 0 differs from its checksum"
    assert reasons == [f"its own checks found wrong numbers: rank 0: {found}"]
    retries = [entry for entry in entries_of(run.journal) if entry["entry"] == "retry" and entry["wrong_sums"]]
    assert [(entry["step"], entry["recompute"], entry["gather"]) for entry in retries] == [(2, True, True)]
    assert retries[0]["wrong_sums"], "those to whom that part of the bucket has come"
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert params_of(run) == params_of(expected)
    assert norms_of(run) == norms_of(expected)
    assert min(norms_of(run).values()) > run.config.optimizer.clip_grad, "gradients are clipped"
    assert run.journal.of(RepairRecord), "a copy that a loss has asked for is whole"
    figures = [record.values for record in run.journal.of(UpdateRecord) if record.step == 0]
    assert len({values["train/params_norm"] for values in figures}) == 1
    [by_part] = {tuple((key, value) for key, value in values.items() if "grad_norm/" in key) for values in figures}
    assert math.hypot(*dict(by_part).values()) == pytest.approx(norms_of(run)[0], rel=1e-6)
    assert {"train/grad_norm/embedding", "train/grad_norm/layer_0", "train/grad_norm/layer_1"} <= dict(by_part).keys()


def test_sums_in_bf16_go_only_where_they_are_needed(text_corpus: Path, tmp_path: Path) -> None:
    faults = [kill("in_reduce", 1, 1, 1)]
    run = scattered(text_corpus, tmp_path / "run", faults, mode="fast_bf16", precision="bf16")
    assert norms_of(run).keys() == set(range(STEPS)), "groups agree"


@pytest.mark.parametrize("layout", [STAGES, LayoutConfig(num_groups=3, tensor_parallel=2)], ids=["PP", "TP"])
@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_the_squares_of_state_partitions_make_up_the_norm_that_megatron_takes_of_all_gradients(
    text_corpus: Path, layout: LayoutConfig, mode: str
) -> None:
    optimizer = OptimizerConfig(sharding="stacked", redundancy=2)
    config = tiny_config(text_corpus, layout, mode=mode, optimizer=optimizer)
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.02))
    prepare_index(config)
    for of_parts, of_all, scattered_norms, norms, num_parts in run_ranks(2, norms_both_ways, config):
        assert of_parts == pytest.approx(of_all, rel=1e-6)  # squares are added in fp64 here, in fp32 there
        assert scattered_norms == {key: pytest.approx(value, rel=1e-6) for key, value in norms.items()}
        assert any(key.startswith("train/grad_norm/layer_") for key in norms)
        assert num_parts > layout.num_groups


def scattered(
    corpus: Path,
    run_dir: Path,
    faults: list[FaultConfig],
    *found: int,
    mode: str = "reproducible",
    precision: str = "fp32",
) -> Run:
    optimizer = OptimizerConfig(sharding="stacked", redundancy=3)
    settings = {"mode": mode, "precision": precision, "optimizer": optimizer}
    config = tiny_config(corpus, STAGES, steps=STEPS, faults=faults, **settings)
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.02))
    run = complete_run(config, run_dir, Watch(scatters=True, whole_copies=frozenset({3})), holds_back=False)
    assert_masked(run, *found)
    return run


def norms_of(run: Run) -> dict[int, float]:
    """Step -> norm of its gradient, on which all groups agree."""
    norms = {record.step: record.grad_norm for record in run.journal.of(UpdateRecord)}
    assert {(record.step, record.grad_norm) for record in run.journal.of(UpdateRecord)} == set(norms.items())
    return norms
