"""The stages of saves, loads and rejoins as a table: nothing is missing from it."""

import pytest

from spare_megatron.faults.points import PHASES_BETWEEN_STEPS, PHASES_OF_A_ROUND
from tests.stages.cells import CELLS, NUM_GROUPS, draw_faults, sample_cells


def test_every_stage_is_struck_on_every_rank_that_reaches_it() -> None:
    assert {cell.phase for cell in CELLS} == PHASES_BETWEEN_STEPS - PHASES_OF_A_ROUND
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == 48
    assert {cell.rank for cell in CELLS if cell.place == "restart"} == {0, 1}


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_has_cells_of_different_places(seed: int) -> None:
    cells = sample_cells(3, seed)
    assert len({cell.place for cell in cells}) == len(cells) == 3
    assert cells == sample_cells(3, seed)


def test_samples_come_to_every_cell_and_faults_to_every_group() -> None:
    assert {cell for seed in range(1000) for cell in sample_cells(3, seed)} == set(CELLS)
    [cell] = [cell for cell in CELLS if str(cell) == "restart-load_read-rank1"]
    assert {draw_faults(cell, seed)[-1].group for seed in range(50)} == set(range(NUM_GROUPS))
    assert draw_faults(cell, 3) == draw_faults(cell, 3)
