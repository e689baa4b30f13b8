"""Whole runs of other layouts and precisions: lanes, divided groups and state, split sequences, bf16, interleaving."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import (
    AuditConfig,
    ClusterConfig,
    FaultConfig,
    FaultsConfig,
    LayoutConfig,
    OptimizerConfig,
    RunConfig,
)
from spare_megatron.config.schema_sections import EvalConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import LossRecord, StartRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.mcore.weights import StoredWeights
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from spare_megatron.state.checkpoint.verification import verify
from spare_megatron.tools.weights.hf_folder import export_hf
from spare_megatron.tools.weights.weights_folder import ExportOptions
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.forked_supervisors import Forks
from tests.integration.reference import assert_exact
from tests.integration.test_run_checkpoint import assert_proven, config_of
from tests.integration.test_run_reproducible import bucketed, run_through
from tests.integration.watched_rank import Watch, read_census
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    evaluations_of,
    kill,
    losses_of,
    params_of,
    patched_in,
    tiny_config,
)
from tests.unit.journal_in_memory import check_journal

INTERLEAVED = LayoutConfig(num_groups=4, pipeline_parallel=2, virtual_pipeline=2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_interleaved_schedule_stays_exact_through_losses(text_corpus: Path, tmp_path: Path, is_tied: bool) -> None:
    faults = [kill("receive", 1, 1, 1), kill("in_reduce", 2, 2), kill("backward", 3, 3, 1)]
    config = tiny_config(
        text_corpus, INTERLEAVED, steps=5, faults=faults, num_microbatches=3, num_layers=4, tie_embeddings=is_tied
    )
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(5))))
    assert_masked(run)
    assert_exact(run, range(5))
    assert all(patched_in(run.journal)[step] > 0 for step in (1, 2, 3))


@pytest.mark.timeout(120)
def test_a_whole_domain_may_be_lost_if_the_hosts_of_a_shard_are_in_different_ones(
    text_corpus: Path, tmp_path: Path
) -> None:
    faults = [kill("forward", 2, 2), kill("backward", 2, 3)]
    layout = LayoutConfig(num_groups=4)
    config = tiny_config(text_corpus, layout, faults=faults, redundancy=2, groups_per_domain=2)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(4))))
    assert_masked(run)
    assert_exact(run, range(4))
    assert patched_in(run.journal)[2] == 2 * 2
    # The same losses are a wipe-out, and the same journal is invalid, where the placement knows of no domains.
    assert make_placement("golomb", 4, 2).uncovered(frozenset({GroupId(0), GroupId(1)}))
    lines = tuple(
        replace(line, record=replace(line.record, groups_per_domain=1)) if isinstance(line.record, RunRecord) else line
        for line in run.journal.lines
    )
    assert check_journal(replace(run.journal, lines=lines)).verdict == "invalid"


@pytest.mark.timeout(120)
def test_bf16_masks_losses_and_keeps_all_groups_equal(text_corpus: Path, tmp_path: Path) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    faults = [kill("forward", 1, 1), kill("in_reduce", 2, 2, 1)]
    config = tiny_config(text_corpus, layout, steps=4, faults=faults, precision="bf16")
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert all(patched_in(run.journal)[step] > 0 for step in (1, 2))


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_nothing_that_a_rank_holds_grows_with_the_steps_or_the_losses(text_corpus: Path, tmp_path: Path) -> None:
    """150 steps of four groups, two of which are lost on the way."""
    early, before, last = 20, 55, 149
    faults = [kill("in_reduce", 60, 1), kill("forward", 75, 2)]
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), steps=150, faults=faults)
    watch = Watch(census_steps=frozenset({early, before, last}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    for group in (0, 3):
        held = read_census(run.run_dir, group, 0)
        assert held.keys() == watch.census_steps
        for count in ("num_threads", "num_files"):
            counts = {step: getattr(census, count) for step, census in held.items()}
            assert counts[early] == counts[before], count
            # What a loss broke is released when it has ended, some steps later or within reduce.timeout_s.
            assert counts[last] <= counts[early], count
        # Allocators fill up in the first hundreds of steps, by some 4 MB. Keeping the 140 kB buffer of each step
        # would come to 18 MB.
        assert held[last].anonymous_bytes - held[early].anonymous_bytes < 9e6


FAULTS = (kill(FaultPoint.BACKWARD, 1, 1, 1), kill(FaultPoint.IN_REDUCE, 3, 2, 2))
"""On the second lane of the first stage, and on the first lane of the last, with some buckets sent."""


def run_with(corpus: Path, run_dir: Path, lanes: int, faults: Sequence[FaultConfig] = ()) -> Run:
    layout = LayoutConfig(num_groups=3, data_parallel=lanes, pipeline_parallel=2)
    config = bucketed(corpus, faults, layout=layout, overlap=lanes > 1, num_microbatches=3)
    data = replace(config.data, split="9,1")
    run = run_through(replace(config, data=data, eval=EvalConfig(every_steps=2, sequences=9)), run_dir)
    assert_masked(run)
    return run


@pytest.mark.timeout(180)
def test_two_lanes_train_through_losses_bitwise_as_one_without_any(text_corpus: Path, tmp_path: Path) -> None:
    """With overlap, buckets, dropout, tied embeddings, evaluations, and lanes with unequal numbers of microbatches."""
    expected = run_with(text_corpus, tmp_path / "one lane", 1)
    run = run_with(text_corpus, tmp_path / "two lanes", 2, FAULTS)
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert evaluations_of(run.journal) == evaluations_of(expected.journal)
    assert all(len(digests) == 1 for digests in params_of(run).values())
    assert all(patched_in(run.journal)[step] > 0 for step in (1, 3))


STEPS = 10
AWAITED = (4, 8)
"""The steps at whose ends the first and the second group that is lost are admitted."""


@pytest.mark.timeout(300)
def test_a_group_comes_back_after_the_loss_of_a_rank_and_of_a_whole_node_and_changes_no_bit(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The second group to be lost has its leader on the lost node, and only the one that is back to take it in."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2)
    faults = [
        kill(FaultPoint.BACKWARD, 2, 1, rank=1),
        FaultConfig(phase=FaultPoint.FORWARD, step=AWAITED[0] + 2, group=0, rank=0, kind="kill_supervisor"),
    ]
    config = tiny_config(
        text_corpus,
        layout,
        steps=STEPS,
        faults=faults,
        rejoins=1,
        mode="reproducible",
        hidden_dropout=0.1,
        cluster=ClusterConfig(device="cpu", num_nodes=4),
    )
    plain = replace(config, faults=FaultsConfig(), cluster=replace(config.cluster, num_nodes=1))
    whole = complete_run(plain, tmp_path / "whole")
    watch = Watch(awaited=frozenset({(AWAITED[0], Member(GroupId(1), 1)), (AWAITED[1], Member(GroupId(0), 1))}))
    run = complete_run(config, tmp_path / "run", watch, launcher=Forks())  # type: ignore[arg-type]
    assert_masked(run)
    rejoined = [(e.member.group, e.member.incarnation, e.step) for e in run.events if isinstance(e, GroupRejoined)]
    assert rejoined == [(1, 1, AWAITED[0] + 1), (0, 1, AWAITED[1] + 1)]
    started = {(line.source, line.record) for line in run.journal.lines if isinstance(line.record, StartRecord)}
    assert started == {
        (source, StartRecord(group=group, incarnation=1, num_ranks=1, num_spares=0))
        for source, group in (("supervisor-2", 1), ("supervisor-3", 1), ("supervisor-0-life-1", 0), ("supervisor-1", 0))
    }
    assert not any(record.is_given_up for record in run.journal.of(LossRecord))
    assert {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1} == {0, 1}
    assert run.summary.groups_rejoined == 2
    assert run.summary.params_sha256 == whole.summary.params_sha256


DIVIDED_STEPS, SAVED, BACK = 6, 4, 2
ONE_LANE, LANES = LayoutConfig(num_groups=2), LayoutConfig(num_groups=2, data_parallel=2)


def divided_config(corpus: Path, layout: LayoutConfig, faults: Sequence[FaultConfig] = (), load: str = "") -> RunConfig:
    config = tiny_config(
        corpus,
        layout,
        steps=DIVIDED_STEPS,
        faults=faults,
        rejoins=1,
        mode="reproducible",
        precision="bf16",
        hidden_dropout=0.1,
    )
    saves = replace(config.checkpoint, interval_steps=SAVED, asynchronous=False, load=load)
    return replace(config, checkpoint=saves, optimizer=replace(config.optimizer, clip_grad=0.1))


@pytest.mark.timeout(180)
def test_a_run_with_lanes_goes_on_through_a_loss_a_rejoin_and_without_lanes_and_changes_no_bit(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The bf16 model's fp32 parameters and both moments too, and what is exported from them."""
    whole = complete_run(divided_config(text_corpus, ONE_LANE), tmp_path / "whole")
    assert_masked(whole)
    faults = [kill(FaultPoint.BACKWARD, 1, 1, rank=1)]
    watch = Watch(awaited=frozenset({(BACK, Member(GroupId(1), 1))}))
    lanes = complete_run(divided_config(text_corpus, LANES, faults), tmp_path / "lanes", watch)
    assert_masked(lanes)
    assert [event.member for event in lanes.events if isinstance(event, GroupRejoined)] == [Member(GroupId(1), 1)]
    assert losses_of(lanes.journal) == losses_of(whole.journal)

    path = checkpoint_path(tmp_path / "lanes" / "checkpoints", SAVED)
    resumed = complete_run(divided_config(text_corpus, ONE_LANE, load=str(path)), tmp_path / "resumed")
    assert (resumed.summary.verdict, resumed.summary.steps_committed) == ("valid", DIVIDED_STEPS - SAVED)
    assert resumed.summary.params_sha256 == whole.summary.params_sha256

    ours, theirs = (checkpoint_path(tmp_path / name / "checkpoints", DIVIDED_STEPS) for name in ("lanes", "whole"))
    assert_same_tensors(ours, theirs)
    exported = [tmp_path / f"exported-{name}" for name in ("lanes", "whole")]
    for path, out in zip((ours, theirs), exported, strict=True):
        export_hf(verify(path), whole.config, out, ExportOptions())
    assert len({(out / "model.safetensors").read_bytes() for out in exported}) == 1


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = StoredWeights(one), StoredWeights(other)
    assert ours.names() == theirs.names()
    for key in ours.names():
        shape = theirs.shape(key)
        values = [torch.empty(shape, dtype=stored.dtype(key)) for stored in (ours, theirs)]
        for stored, into in zip((ours, theirs), values, strict=True):
            stored.read(key, [0] * len(shape), into)
        assert torch.equal(*values), key


WHOLE, SPLIT = (LayoutConfig(num_groups=2, context_parallel=ranks) for ranks in (1, 2))


def with_documents(config: RunConfig) -> RunConfig:
    """Lines of the text are documents."""
    return replace(
        config,
        model=replace(config.model, position_embedding="rope"),
        data=replace(config.data, reset_attention_mask=True, end_of_document=ord("\n")),
    )


@pytest.mark.timeout(180)
def test_a_training_goes_on_where_ranks_split_sequences_and_back(text_corpus: Path, tmp_path: Path) -> None:
    """With the losses of the one that had them whole, later ones too: the optimizer's state was kept."""

    def trained(name: str, layout: LayoutConfig, load: tuple[str, int] | None = None) -> Run:
        path = "" if load is None else str(checkpoint_path(tmp_path / load[0] / "checkpoints", load[1]))
        config = with_documents(config_of(text_corpus, layout, load=path))
        run = complete_run(replace(config, model=replace(config.model, hidden_dropout=0.0)), tmp_path / name)
        assert_proven(run)
        return run

    first = trained("first", WHOLE)
    split = trained("split", SPLIT, load=("first", 2))
    back = trained("back", WHOLE, load=("split", 4))
    assert [record.changes for run in (split, back) for record in run.journal.of(RunRecord)] == [{}, {}]
    expected = losses_of(first.journal)
    for run, steps in ((split, range(2, 6)), (back, range(4, 6))):
        losses = losses_of(run.journal)
        assert list(losses) == [*steps]
        for step in steps:
            np.testing.assert_allclose([*losses[step]], [*expected[step]], rtol=1e-5)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["replicated", "stacked"])
def test_a_run_of_split_sequences_is_bitwise_that_without_a_loss(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns, is_stacked: bool
) -> None:
    """A rank is killed in the backward pass of a sequence whose other half waits for it, another one as it sums; with
    evaluations, and audits of every step.
    """
    faults = (kill(FaultPoint.BACKWARD, 1, 1, 1), kill(FaultPoint.IN_REDUCE, 3, 2, 0))
    config = with_documents(config_of(text_corpus, replace(SPLIT, num_groups=3), faults=faults))
    config = replace(
        config,
        optimizer=OptimizerConfig(sharding="stacked", redundancy=3) if is_stacked else OptimizerConfig(),
        data=replace(config.data, split="9,1"),
        eval=EvalConfig(every_steps=2, sequences=6),
        audit=AuditConfig(every_steps=1),
    )
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    expected = fault_free(run.config)
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert evaluations_of(run.journal) == evaluations_of(expected.journal) != []
    assert run.summary.params_sha256 == expected.summary.params_sha256
