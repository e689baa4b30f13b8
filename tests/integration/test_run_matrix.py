"""Cells of the fault matrix as real runs: a sample that differs from commit to commit and follows from it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.whole_run import Run
from tests.matrix import trial
from tests.matrix.cells import (
    HOSTS,
    MEMBERSHIP_CELLS,
    PAUSE_CELLS,
    REFORM_CELLS,
    Cell,
    MembershipCell,
    PauseCell,
    draw_faults,
    sample_cells,
)
from tests.matrix.membership import run_membership_cell
from tests.matrix.pauses import run_pause_cell
from tests.matrix.trial import run_cell, run_without_faults, why_not_here

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

NUM_CELLS = 10


def seed_of_commit() -> int:
    """A number that follows from the commit; 0 outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return int(found.stdout[:8], 16) if found.returncode == 0 else 0


SEED = seed_of_commit()


@pytest.fixture(scope="module", autouse=True)
def reduction() -> Iterator[None]:
    """Of every other commit or so, sums overlap with the backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "reduction", trial.OVERLAPPING if SEED % 2 else {})
        yield


@pytest.fixture(scope="module")
def expected(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_without_faults(text_corpus, tmp_path_factory.mktemp("matrix") / "none")


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("cell", sample_cells(NUM_CELLS, SEED), ids=str)
def test_a_cell_of_the_matrix_is_masked_and_ends_with_the_bits_of_the_run_without_faults(
    text_corpus: Path, tmp_path: Path, expected: Run, cell: Cell, seed: int
) -> None:
    if reason := why_not_here(cell, text_corpus):
        pytest.skip(reason)
    outcome = run_cell(cell, seed, text_corpus, tmp_path / "run", expected)
    assert set(outcome.fenced) == {fault.group for fault in draw_faults(cell, seed)}
    assert outcome.params_sha256 == expected.summary.params_sha256


@pytest.mark.parametrize("cell", [cells[SEED % len(cells)] for cells in (PAUSE_CELLS, REFORM_CELLS)], ids=str)
def test_both_hosts_of_a_shard_come_back_in_a_pause_and_no_committed_step_is_done_again(
    text_corpus: Path, tmp_path: Path, expected: Run, cell: PauseCell
) -> None:
    outcome = run_pause_cell(cell, text_corpus, tmp_path / "run", expected)
    assert outcome.fenced == HOSTS
    assert outcome.params_sha256 == expected.summary.params_sha256


OF_EACH_CHANGE = [[cell for cell in MEMBERSHIP_CELLS if cell.change == change] for change in ("drain", "grow")]


@pytest.mark.parametrize("cell", [cells[SEED % len(cells)] for cells in OF_EACH_CHANGE], ids=str)
def test_a_loss_in_the_step_in_which_a_group_leaves_or_joins_changes_no_bit(
    text_corpus: Path, tmp_path: Path, expected: Run, cell: MembershipCell
) -> None:
    outcome = run_membership_cell(cell, text_corpus, tmp_path / "run", expected)
    assert outcome.fenced == (cell.victim,)
    assert outcome.params_sha256 == expected.summary.params_sha256
