"""Runs whose optimizer state is stacked: bitwise those with all of it in every group, whichever groups are lost."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.faults.points import FaultKind, FaultPoint
from spare_megatron.journal.records import (
    CheckpointRecord,
    FaultRecord,
    ParamsRecord,
    RepairRecord,
    RestartRecord,
    UpdateRecord,
    VoteRecord,
)
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints, checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.mcore_group import run_ranks
from tests.integration.scattered_gradients import norms_both_ways
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    REPLICATED,
    Run,
    assert_masked,
    complete_run,
    entries_of,
    kill,
    losses_of,
    params_of,
    tiny_config,
)
from tests.unit.journal_in_memory import check_journal

pytestmark = pytest.mark.timeout(180)

STEPS = 5
STAGES = LayoutConfig(num_groups=4, pipeline_parallel=2)
GROUPS = LayoutConfig(num_groups=5)
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def stacked(redundancy: int) -> OptimizerConfig:
    return OptimizerConfig(sharding="stacked", redundancy=redundancy)


def test_losses_in_an_update_and_in_a_gather_of_many_rounds_change_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    expected = reproducible(text_corpus, tmp_path / "replicated", STAGES, REPLICATED)
    faults = [kill("after_commit", 1, 1, 1), kill("in_gather", 3, 3)]
    run = reproducible(text_corpus, tmp_path / "faults", STAGES, stacked(3), faults, bucket_mib=0.02)
    assert_same(run, expected)
    assert steps_gathered_again(run) == {2, 4}  # those after the steps that were hit


def test_two_losses_at_once_and_one_after_the_last_update_change_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    expected = reproducible(text_corpus, tmp_path / "replicated", GROUPS, REPLICATED)
    faults = [kill("before_gather", 2, 0), kill("in_gather", 2, 2), kill("in_gather", STEPS - 1, 1)]
    run = reproducible(text_corpus, tmp_path / "faults", GROUPS, stacked(4), faults)
    assert_same(run, expected)
    assert steps_gathered_again(run) == {3, STEPS}
    last = entries_of(run.journal)[-1]
    assert last["entry"] == "finish"
    final = [line for line in run.journal.lines if isinstance(line.record, VoteRecord)][-2:]
    assert {(line.record.attempt, line.record.is_complete) for line in final} == {(last["attempt"], True)}
    lacking = replace(final[0], record=replace(final[0].record, is_complete=False))
    lines = tuple(lacking if line is final[0] else line for line in run.journal.lines)
    assert check_journal(replace(run.journal, lines=lines)).verdict == "invalid"


def test_bf16_without_failures_keeps_all_groups_alike(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), optimizer=stacked(2), precision="bf16")
    run = complete_run(config, tmp_path)
    assert_masked(run)
    assert all(len(digests) == 1 for digests in params_of(run).values())
    assert set(params_of(run)) == set(range(config.train.steps + 1))
    expected = complete_run(replace(config, optimizer=REPLICATED), tmp_path / "replicated")
    assert losses_of(run.journal) == losses_of(expected.journal)


def test_losing_all_hosts_of_a_state_partition_is_a_wipe_out_that_names_it(text_corpus: Path, tmp_path: Path) -> None:
    """Partition 0 of four is on groups 0 and 3. Every group hosts every shard, so that no shard is lost."""
    faults = [kill("before_gather", 2, 0), kill("before_gather", 2, 3)]
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), faults=faults, optimizer=stacked(2))
    run = complete_run(config, tmp_path)
    assert run.summary.outcome == "wipe_out"
    assert run.summary.outcome_reason == "no surviving group holds partitions [0] of the optimizer state"
    assert run.summary.verdict == "valid", run.summary.reasons
    assert run.summary.groups_lost == 2
    assert run.summary.steps_committed == 3


def test_without_a_store_groups_save_the_state_partitions_that_they_have(text_corpus: Path, tmp_path: Path) -> None:
    """All that hold the parameters of the last step: on a busy machine, the store may die while others gather them."""
    fault = FaultConfig(phase=FaultPoint.BEFORE_REDUCE, step=2, group=1, rank=0, kind="kill_store")
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), faults=[fault], optimizer=stacked(2))
    run = complete_run(config, tmp_path)
    assert run.summary.outcome == "failed"
    [path] = all_checkpoints(tmp_path / "checkpoints")
    assert path.name == "step-00000002.state"
    hosted = {"group-0000-rank-0": [0, 1], "group-0001-rank-0": [1, 2], "group-0002-rank-0": [0, 2]}
    files = {file.stem: file for file in path.glob("*.state")}
    assert "group-0001-rank-0" in files
    assert (str(path) if len(files) > 1 else "no group has saved partitions [0]") in run.summary.outcome_reason
    for name, file in files.items():
        partitions = torch.load(file, weights_only=True)["slices"]
        assert sorted(partitions) == hosted[name]
        assert all(moments.any(dim=1).all() for moments in partitions.values())


def reproducible(
    corpus: Path,
    run_dir: Path,
    layout: LayoutConfig,
    optimizer: OptimizerConfig,
    faults: Sequence[FaultConfig] = (),
    bucket_mib: float = 32.0,
) -> Run:
    config = tiny_config(
        corpus, layout, steps=STEPS, faults=faults, mode="reproducible", optimizer=optimizer, **DROPOUT
    )
    run = complete_run(replace(config, reduce=replace(config.reduce, bucket_mib=bucket_mib)), run_dir)
    assert_masked(run)
    return run


def assert_same(run: Run, expected: Run) -> None:
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert params_of(run) == params_of(expected)
    assert len({record.digest for record in run.journal.of(ParamsRecord)}) == STEPS + 1


def steps_gathered_again(run: Run) -> set[int]:
    """Committed steps whose parameters some group lacked."""
    return {entry["step"] for entry in entries_of(run.journal) if entry["entry"] == "retry" and entry["gather"]}


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


def losses_by_step(run: Run) -> dict[int, float]:
    return {record.step: record.loss for record in run.journal.of(UpdateRecord)}


def test_a_state_wipe_out_ends_bitwise_like_the_run_without_faults(text_corpus: Path, tmp_path: Path) -> None:
    """Partition 0 of four is on groups 0 and 3, both of which die in an update; every shard still has two hosts."""
    layout, common = LayoutConfig(num_groups=4), {"steps": 4, "mode": "reproducible", "hidden_dropout": 0.1}
    whole = complete_run(tiny_config(text_corpus, layout, **common), tmp_path / "whole")
    faults = [kill(FaultPoint.AFTER_COMMIT, 1, 0), kill(FaultPoint.AFTER_COMMIT, 1, 3)]
    stacked = OptimizerConfig(sharding="stacked", redundancy=2)
    config = tiny_config(text_corpus, layout, **common, faults=faults, max_restarts=1, optimizer=stacked)
    run = complete_run(config, tmp_path / "run")
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert (run.summary.steps_committed, run.summary.restarts, run.summary.steps_lost) == (4, 1, 2)
    assert len(run.journal.of(FaultRecord)) == 2
    kinds = [entry["entry"] for entry in entries_of(run.journal)]
    assert (kinds.count("restart"), kinds[-1]) == (1, "finish")
    assert losses_by_step(run) == losses_by_step(whole)
    assert run.summary.params_sha256 == whole.summary.params_sha256


EVERY = 2
FOUR = LayoutConfig(num_groups=4)


def config_of(
    corpus: Path,
    layout: LayoutConfig = FOUR,
    *,
    steps: int,
    redundancy: int = 2,
    faults: Sequence[FaultConfig] = (),
    max_restarts: int = 0,
    **checkpoint: Any,
) -> RunConfig:
    """Eight microbatches a step, and a checkpoint every two steps."""
    config = tiny_config(
        corpus,
        layout,
        steps=steps,
        num_microbatches=8 // layout.num_groups,
        mode="reproducible",
        optimizer=OptimizerConfig(sharding="stacked", redundancy=redundancy),
        max_restarts=max_restarts,
    )
    settings = {"interval_steps": EVERY, "asynchronous": False, "keep_last": 9, **checkpoint}
    config = replace(config, checkpoint=replace(config.checkpoint, **settings))
    return replace(config, faults=replace(config.faults, trace=tuple(faults)))


def assert_proven(run: Run, num_faults: int) -> None:
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert len(run.journal.of(FaultRecord)) == num_faults


def saved(run: Run) -> list[tuple[int, int]]:
    """Steps and group of every save that its group survived to report as visible."""
    return sorted((r.step, r.group) for r in run.journal.of(CheckpointRecord) if r.outcome == "saved")


def test_a_state_wipe_out_goes_back_to_a_checkpoint_which_half_the_groups_load_too(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Partition 0 is on groups 0 and 3, which both die before the update after which the second checkpoint is due."""
    whole = complete_run(config_of(text_corpus, steps=4, asynchronous=True), tmp_path / "whole")
    assert_proven(whole, 0)
    assert saved(whole) == [(2, 0), (4, 1)]
    faults = [kill(FaultPoint.AFTER_COMMIT, 3, group) for group in (0, 3)]
    run = complete_run(config_of(text_corpus, steps=4, faults=faults, max_restarts=1), tmp_path / "run")
    assert_proven(run, 2)
    assert {(r.step, r.rework_steps) for r in run.journal.of(RestartRecord)} == {(2, 2)}
    assert run.summary.params_sha256 == whole.summary.params_sha256

    folder = tmp_path / "whole" / "checkpoints"
    assert [name.name for name in folder.glob("*.tmp")] == []
    manifest = verify(checkpoint_path(folder, 4)).manifest
    assert manifest.optimizer == {"sharding": "stacked", "num_slices": 4, "redundancy": 2, "writers": [0, 1, 2, 3]}
    assert manifest.num_bytes == next(r.num_bytes for r in whole.journal.of(CheckpointRecord) if r.step == 4)
    load = str(checkpoint_path(folder, 2))
    there = config_of(text_corpus, LayoutConfig(num_groups=2), steps=4, load=load, interval_steps=None)
    resumed = complete_run(there, tmp_path / "resumed")
    assert_proven(resumed, 0)
    assert losses_of(resumed.journal).keys() == {2, 3}
    assert resumed.summary.params_sha256 == whole.summary.params_sha256


def test_losing_writers_leaves_nothing_torn(text_corpus: Path, tmp_path: Path) -> None:
    """Another host writes the partition of group 2. What group 1 was about to publish is removed."""
    faults = [kill(FaultPoint.SAVE_WRITE, EVERY - 1, 2), kill(FaultPoint.SAVE_MANIFEST, 2 * EVERY - 1, 1)]
    run = complete_run(config_of(text_corpus, steps=6, redundancy=3, faults=faults), tmp_path / "run")
    assert_proven(run, 2)
    folder = tmp_path / "run" / "checkpoints"
    assert saved(run) == [(2, 0), (6, 0)]
    assert visible_steps(folder) == [6, 2]
    assert [name.name for name in folder.glob("*.tmp")] == []
    writers = [verify(checkpoint_path(folder, step)).manifest.optimizer["writers"] for step in (2, 6)]
    assert writers == [[0, 1, 3], [0, 3]]


CORRUPTED_STEPS = 4


def run_with(corpus: Path, run_dir: Path, redundancy: int, *faults: FaultConfig) -> Run:
    config = tiny_config(
        corpus,
        GROUPS,
        steps=CORRUPTED_STEPS,
        faults=faults,
        mode="reproducible",
        optimizer=OptimizerConfig(sharding="stacked", redundancy=redundancy),
    )
    run = complete_run(config, run_dir)
    assert len(run.journal.of(FaultRecord)) == len(faults)
    return run


def flip(group: int, kind: FaultKind = "param_flip") -> FaultConfig:
    """Before the update of step 1, in the first partition that the group hosts."""
    return FaultConfig(phase=FaultPoint.AFTER_COMMIT, step=1, group=group, rank=0, kind=kind, bit=10)


def entries(run: Run, kind: str) -> list[dict[str, object]]:
    return [entry for entry in entries_of(run.journal) if entry["entry"] == kind]


@pytest.mark.parametrize("kind", ["param_flip", "moment_flip"])
def test_wrong_state_of_an_owner_is_found_by_its_other_hosts_and_costs_its_group_alone(
    text_corpus: Path, tmp_path: Path, kind: FaultKind
) -> None:
    """Partition 0 is on groups 0, 3 and 4. Group 0 owns it, so that groups 1 and 2 get what it has."""
    expected = run_with(text_corpus, tmp_path / "none", 3)
    assert (expected.summary.outcome, expected.summary.verdict) == ("finished", "valid"), expected.summary
    run = run_with(text_corpus, tmp_path / "run", 3, flip(0, kind))
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    [fence] = entries(run, "fence")
    assert (fence["group"], fence["discard"]) == (0, True)
    assert fence["reason"] == "its state of partition 0 before step 2 differs from that of 2 other hosts"
    [retry] = entries(run, "retry")
    assert (retry["step"], retry["recompute"], retry["gather"]) == (2, True, True)
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert run.summary.params_sha256 == expected.summary.params_sha256
    assert params_of(run)[CORRUPTED_STEPS] == params_of(expected)[CORRUPTED_STEPS]


def test_two_hosts_of_a_state_partition_that_differ_end_the_run_which_names_them(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Partition 0 is on groups 0 and 4."""
    run = run_with(text_corpus, tmp_path, 2, flip(0))
    assert (run.summary.outcome, run.summary.verdict) == ("wipe_out", "valid"), run.summary
    assert [entry["group"] for entry in entries(run, "fence")] == [0, 4]
    assert run.summary.outcome_reason == (
        "no surviving group holds partitions [0] of the optimizer state: "
        "groups [0, 4] hold different state of partition 0 before step 2, and no majority is right"
    )
    assert run.summary.steps_committed == 2
