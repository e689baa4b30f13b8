"""Runs whose optimizer state is stacked: bitwise those with all of it in every group, whichever groups are lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ParamsRecord, VoteRecord
from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints
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
