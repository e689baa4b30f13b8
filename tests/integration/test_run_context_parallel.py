"""Whole runs whose ranks split each sequence."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.schema import AuditConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import EvalConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.test_run_checkpoint import assert_proven, config_of
from tests.integration.whole_run import Run, assert_masked, complete_run, evaluations_of, kill, losses_of

pytestmark = pytest.mark.timeout(180)

WHOLE, SPLIT = (LayoutConfig(num_groups=2, context_parallel=ranks) for ranks in (1, 2))


def with_documents(config: RunConfig) -> RunConfig:
    """Lines of the text are documents."""
    return replace(
        config,
        model=replace(config.model, position_embedding="rope"),
        data=replace(config.data, reset_attention_mask=True, end_of_document=ord("\n")),
    )


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
