"""A kill in a stage of a save, a load, a restart and a rejoin: in which, differs from commit to commit."""

from pathlib import Path

import pytest

from tests.integration.test_run_matrix import SEED
from tests.integration.whole_run import Run
from tests.stages.cells import Cell, sample_cells
from tests.stages.trial import run_cell, run_without_faults

pytestmark = pytest.mark.timeout(180)

NUM_CELLS = 3


@pytest.fixture(scope="module")
def expected(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_without_faults(text_corpus, tmp_path_factory.mktemp("stages") / "none")


@pytest.mark.parametrize("cell", sample_cells(NUM_CELLS, SEED), ids=str)
def test_a_kill_in_a_stage_ends_in_the_bits_of_the_run_without_it_and_leaves_whole_checkpoints(
    text_corpus: Path, tmp_path: Path, expected: Run, cell: Cell
) -> None:
    run_cell(cell, SEED, text_corpus, tmp_path / "run", expected)
