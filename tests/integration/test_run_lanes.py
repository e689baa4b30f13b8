"""Runs whose groups have several lanes: the bits of groups with one, through losses in several phases."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig
from spare_megatron.core.fault_points import FaultPoint
from tests.integration.test_run_buckets import bucketed, kept_by, run_of
from tests.integration.whole_run import Run, assert_masked, kill, losses_of, params_of, patched_in

pytestmark = pytest.mark.timeout(180)

ONE_LANE = LayoutConfig(num_groups=3, pipeline_parallel=2)
LANES = LayoutConfig(num_groups=3, data_parallel=2, pipeline_parallel=2)


def run_with(
    corpus: Path, run_dir: Path, layout: LayoutConfig, faults: Sequence[FaultConfig] = (), *, overlap: bool = False
) -> Run:
    config = bucketed(corpus, faults, layout=layout, overlap=overlap, num_microbatches=3)
    run = run_of(replace(config, eval=replace(config.eval)), run_dir)
    assert_masked(run)
    return run


FAULTS = {
    "reduce": [kill(FaultPoint.IN_REDUCE, 1, 1, 3), kill(FaultPoint.PATCH, 1, 2, 1)],
    "backward": [kill(FaultPoint.BACKWARD, 1, 1, 1), kill(FaultPoint.IN_REDUCE, 3, 2, 2)],
    "others": [kill(FaultPoint.AFTER_VOTE, 1, 1, 3), kill(FaultPoint.AFTER_COMMIT, 2, 2, 1)],
    "transfer": [kill(FaultPoint.SEND, 1, 0, 1), kill(FaultPoint.BEFORE_REDUCE, 3, 2, 2)],
}


@pytest.fixture(scope="module")
def expected(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_with(text_corpus, tmp_path_factory.mktemp("calm") / "none", ONE_LANE)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_lanes(text_corpus: Path, tmp_path: Path, expected: Run, faults: list[FaultConfig], overlap: bool) -> None:
    run = run_with(text_corpus, tmp_path / "lanes", LANES, faults, overlap=overlap)
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert all(len(digests) == 1 for digests in params_of(run).values())
    assert sum(patched_in(run.journal).values()) > 0
    print("kept", kept_by(run), patched_in(run.journal))
