"""The figures of benchmarks/cadence.py that no run shows: the mean over all draws of the kills, the best interval."""

import re
from argparse import Namespace
from bisect import bisect_right

import numpy as np
import pytest

from benchmarks.cadence import FIRST_KILL, best_interval_s, draw_kills, mean_rework
from spare_megatron.core.saves.survival import optimal_cadence_s
from spare_megatron.journal.records import CadenceRecord


def rework_of(kill: int, saved: list[int]) -> int:
    """Steps that are computed again after a loss in this step, by going back one by one."""
    step = kill
    while step > 0 and step not in saved:
        step -= 1
    return kill - step


@pytest.mark.parametrize("saved", [[], [21], [7, 25, 26, 40], [10, 58, 59, 60], list(range(1, 61))])
def test_the_rework_of_all_kills_is_that_of_one_after_the_other(saved: list[int]) -> None:
    assert mean_rework(saved, 60) == sum(rework_of(kill, saved) for kill in range(FIRST_KILL + 1, 59))


def test_its_share_is_the_mean_over_the_kills_that_are_drawn() -> None:
    steps, mean_steps, saved = 400, 12.0, [15, 40, 90, 92, 180, 300]
    options = Namespace(steps=steps, mean_steps=mean_steps)
    kills = [
        [int(kill) for kill in re.findall(r"step=(\d+)", " ".join(draw_kills(options, run)))] for run in range(3000)
    ]
    rework = [sum(kill - ([0, *saved])[bisect_right(saved, kill)] for kill in of_run) for of_run in kills]
    assert np.mean(rework) == pytest.approx(mean_rework(saved, steps) / (1 + mean_steps), rel=0.02)


@pytest.mark.parametrize(("save_s", "time_s"), [(0.22, 10.0), (1.0, 7.5), (5.0, 4.0)])
def test_the_interval_that_is_searched_for_is_the_one_that_is_computed(save_s: float, time_s: float) -> None:
    record = CadenceRecord(
        group=0,
        step=3,
        interval_s=0.0,
        save_s=save_s,
        group_interval_s=1.0,
        absence_s=None,
        time_to_wipe_out_s=time_s,
        num_losses=0,
        exposure_s=1.0,
        num_members=4,
    )
    assert best_interval_s(record) == pytest.approx(optimal_cadence_s(save_s, time_s), rel=1e-6)
