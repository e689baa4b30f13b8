"""Runs whose groups have several lanes, against runs whose groups have one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig
from spare_megatron.config.schema_sections import EvalConfig
from spare_megatron.faults.points import FaultPoint
from tests.integration.test_run_buckets import bucketed, run_of
from tests.integration.whole_run import Run, assert_masked, evaluations_of, kill, losses_of, params_of, patched_in

pytestmark = pytest.mark.timeout(180)

FAULTS = (kill(FaultPoint.BACKWARD, 1, 1, 1), kill(FaultPoint.IN_REDUCE, 3, 2, 2))
"""On the second lane of the first stage, and on the first lane of the last, with some buckets sent."""


def run_with(corpus: Path, run_dir: Path, lanes: int, faults: Sequence[FaultConfig] = ()) -> Run:
    layout = LayoutConfig(num_groups=3, data_parallel=lanes, pipeline_parallel=2)
    config = bucketed(corpus, faults, layout=layout, overlap=lanes > 1, num_microbatches=3)
    data = replace(config.data, split="9,1")
    run = run_of(replace(config, data=data, eval=EvalConfig(every_steps=2, sequences=9)), run_dir)
    assert_masked(run)
    return run


def test_two_lanes_train_through_losses_bitwise_as_one_without_any(text_corpus: Path, tmp_path: Path) -> None:
    """With overlap, buckets, dropout, tied embeddings, evaluations, and lanes with unequal numbers of microbatches."""
    expected = run_with(text_corpus, tmp_path / "one lane", 1)
    run = run_with(text_corpus, tmp_path / "two lanes", 2, FAULTS)
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert evaluations_of(run.journal) == evaluations_of(expected.journal)
    assert all(len(digests) == 1 for digests in params_of(run).values())
    assert all(patched_in(run.journal)[step] > 0 for step in (1, 3))
