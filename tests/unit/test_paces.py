"""A rank that computes slower than its peers is named, with its slowdown, whichever rank waits for it."""

from statistics import median
from typing import Any

import numpy as np
import pytest

from spare_megatron.journal.files import Line
from spare_megatron.journal.records import ContributionRecord, EntryRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.rank_paces import MOST_SAMPLES, RankPaces, find_slowest, over_others
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.tools.report.figures import LEAST_PACE, MOST_PACE, MOST_PACE_COLUMNS, rank_map
from spare_megatron.tools.report.history import History
from spare_megatron.tools.report.page import plots_of
from tests.unit.measured_run import valid_history

NUM_GROUPS, NUM_RANKS, LOAD = 6, 2, 4
SLOW_GROUP, SLOW_RANK = 2, 1
RUN: dict[str, Any] = {
    "name": "slow",
    "num_groups": NUM_GROUPS,
    "ranks_per_group": NUM_RANKS,
    "redundancy": 2,
    "microbatches_per_shard": LOAD,
    "num_steps": 1,
    "placement": "golomb",
    "granularity": "microbatch",
    "reduce_mode": "fast",
    "faults": [],
}


def history_with_a_slow_rank(num_steps: int, ratio: float, seed: int) -> History:
    """Stages of unlike cost, steps that are longer for all, noise of 5%, now and then a hiccup, and one slow rank."""
    rng = np.random.default_rng(seed)
    run = RunRecord(**{**RUN, "num_steps": num_steps})
    run_state = RunState()
    run_state.add_line(Line(source="driver", at_s=0.0, record=run))
    for step in range(num_steps):
        pace_s = np.array([0.5, 0.7]) * rng.uniform(0.8, 1.3) * rng.normal(1.0, 0.05, (NUM_GROUPS, NUM_RANKS))
        pace_s[SLOW_GROUP, SLOW_RANK] *= ratio
        pace_s[rng.random(pace_s.shape) < 0.02] *= 20.0
        for record in records_of(step, pace_s):
            run_state.add_line(Line(source="group", at_s=float(step + 1), record=record))
    return valid_history(run_state, now_s=float(num_steps + 1))


def records_of(step: int, pace_s: np.ndarray) -> list[ContributionRecord | UpdateRecord | EntryRecord]:
    found: list[ContributionRecord | UpdateRecord | EntryRecord] = []
    for group, of_ranks in enumerate(pace_s):
        found.append(
            ContributionRecord(
                group=group,
                step=step,
                attempt=step,
                epoch=0,
                members=list(range(NUM_GROUPS)),
                microbatches={str(group): list(range(LOAD))},
            )
        )
        found.append(EntryRecord(group=group, index=step, entry={"entry": "commit", "step": step, "attempt": step}))
        found.append(
            UpdateRecord(
                group=group,
                step=step,
                attempt=step,
                num_microbatches=NUM_GROUPS * LOAD,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                makespan=LOAD,
                step_s=1.0,
                compute_s=(of_ranks * LOAD).tolist(),
            )
        )
    return found


@pytest.mark.parametrize("num_steps", [60, 3000], ids=["every step", "every fourth"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_a_tenth_slower_is_named_with_its_factor(num_steps: int, seed: int) -> None:
    history = history_with_a_slow_rank(num_steps, 1.1, seed)
    slowest = find_slowest(history.paces.ratio)
    assert slowest is not None
    assert (slowest.group, slowest.rank) == (SLOW_GROUP, SLOW_RANK)
    assert slowest.ratio == pytest.approx(1.1, abs=0.025)
    assert slowest.next_ratio < 1.04
    (plot,) = [plot for plot in plots_of(history) if plot.title == "Compute of each rank"]
    assert f"Slowest: group 2 rank 1 (stage 1): {slowest.ratio:.2f} x the median; next: group " in plot.note


@pytest.mark.parametrize("num_steps", [60, 3000])
def test_the_slow_rank_is_the_row_of_the_map_that_stands_out(num_steps: int) -> None:
    (heat,) = rank_map(history_with_a_slow_rank(num_steps, 1.1, 1)).data
    rows = np.asarray(heat.z)
    assert rows.shape[0] == NUM_GROUPS * NUM_RANKS
    assert rows.shape[1] <= MOST_PACE_COLUMNS
    assert heat.y[SLOW_GROUP * NUM_RANKS + SLOW_RANK] == "2.1"
    usual = np.median(rows, axis=1)
    assert usual.argmax() == SLOW_GROUP * NUM_RANKS + SLOW_RANK
    # It takes up a third of the colours between it and the others.
    assert usual.max() - np.sort(usual)[-2] > 0.2 * (MOST_PACE - LEAST_PACE)


def test_a_run_without_a_slow_rank_names_the_next_one_as_close() -> None:
    slowest = find_slowest(history_with_a_slow_rank(200, 1.0, 1).paces.ratio)
    assert slowest is not None
    assert 1.0 <= slowest.next_ratio <= slowest.ratio < 1.02


def test_paces_are_compared_with_the_median_of_the_others() -> None:
    rng = np.random.default_rng(1)
    pace_s = rng.uniform(0.5, 2.0, (40, 5, 2)).astype(np.float32)
    pace_s[rng.random(pace_s.shape) < 0.4] = np.nan
    found = over_others(pace_s)
    for step, group, rank in np.ndindex(pace_s.shape):
        others = [
            float(pace_s[step, other, rank])
            for other in range(5)
            if other != group and not np.isnan(pace_s[step, other, rank])
        ]
        mine = pace_s[step, group, rank]
        expected = mine / median(others) if others and not np.isnan(mine) else np.nan
        assert found[step, group, rank] == pytest.approx(expected, nan_ok=True, rel=1e-5)


def test_a_single_group_has_no_other_to_be_compared_with() -> None:
    assert find_slowest(over_others(np.ones((9, 1, 2), np.float32))) is None
    assert find_slowest(over_others(np.empty((0, 3, 2), np.float32))) is None


def test_a_rank_that_was_there_for_a_moment_is_not_called_slow() -> None:
    ratio = np.ones((100, 3, 1), np.float32)
    ratio[:, 1] = 1.05
    ratio[:, 2] = np.nan
    ratio[:3, 2] = 9.0
    slowest = find_slowest(ratio)
    assert slowest is not None
    assert (slowest.group, slowest.next_group) == (1, 0)


def test_of_a_long_run_attempts_at_equal_distances_are_kept() -> None:
    paces = RankPaces(2, [0])
    num_attempts = 5 * MOST_SAMPLES
    for attempt in range(num_attempts):
        paces.add(attempt, 1, [2.0 * attempt], 2.0)
    kept, pace_s = paces.of(np.arange(num_attempts))
    assert paces.every == 8
    assert kept.tolist() == list(range(0, num_attempts, 8))
    assert pace_s[:, 1, 0].tolist() == kept.tolist()
    assert np.isnan(pace_s[:, 0]).all()


def test_lanes_that_compute_fewer_microbatches_are_not_faster() -> None:
    """Groups of 2 stages of 2 lanes: with 5 microbatches lane 0 computes 3, with 1 lane 1 computes none."""
    run = RunRecord(**{**RUN, "ranks_per_group": 4, "ranks_per_stage": 2, "lanes": 2})
    assert run.turns == [0, 1, 0, 1]
    paces = RankPaces(3, run.turns)
    paces.add(0, 0, [3.0, 2.0, 6.0, 4.0], 5.0)
    paces.add(0, 1, [2.0, 2.0, 4.0, 4.0], 4.0)
    paces.add(0, 2, [1.0, 0.0, 2.0, 0.0], 1.0)
    assert paces.of(np.arange(1))[1][0, :2].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 2
    np.testing.assert_array_equal(paces.of(np.arange(1))[1][0, 2], [1.0, np.nan, 2.0, np.nan])


def test_lanes_that_compute_rows_together_compute_as_many() -> None:
    run = RunRecord(**{**RUN, "ranks_per_group": 4, "ranks_per_stage": 4, "lanes": 4, "row_size": 2})
    assert run.turns == [0, 0, 1, 1]


def test_a_group_that_computed_nothing_and_a_journal_without_times_say_nothing() -> None:
    paces = RankPaces(2, [0, 0])
    paces.add(0, 0, [], 3.0)
    paces.add(0, 1, [1.0, 1.0], 0.0)
    paces.add(0, 1, [1.0, 1.0], float("nan"))
    assert paces.of(np.arange(3))[0].tolist() == []


def test_what_stretches_a_pass_is_a_part_of_it() -> None:
    now_s = [0.0]
    times = PassTimes(lambda: now_s[0], lambda began_s, ended_s: ended_s - began_s)

    def double(seconds: float) -> None:
        now_s[0] += seconds

    times.stretch = double
    for seconds in (1.0, 3.0):
        times.start_pass()
        now_s[0] += seconds
        times.end_pass()
    assert times.total_s() == 8.0


def test_passes_add_up_within_a_step_and_waiting_between_them_does_not_count() -> None:
    now_s = iter([0.0, 1.0, 5.0, 7.0, 20.0, 24.0])
    times = PassTimes(lambda: next(now_s), lambda began_s, ended_s: ended_s - began_s)
    for _ in range(2):
        times.start_pass()
        times.end_pass()
    times.end_pass()
    assert times.total_s() == times.usual_s() == 3.0
    times.begin_step()
    times.start_pass()
    times.end_pass()
    assert times.total_s() == 4.0


def test_single_long_passes_are_cut_and_reading_is_left_out() -> None:
    now_s = iter([0.0, 1.0, 9.0, 10.0, 10.0, 12.0, 12.0, 32.0, 40.0, 47.0])
    times = PassTimes(lambda: next(now_s), lambda began_s, ended_s: ended_s - began_s)
    times.start_pass(is_forward=True)
    times.end_pass()
    times.resume_pass()  # after it has read
    times.end_pass()
    for _ in range(2):
        times.start_pass(is_forward=True)
        times.end_pass()
    times.start_pass()
    times.end_pass()
    assert times.total_s() == 2.0 + 2.0 + 20.0 + 7.0
    assert times.usual_s() == 2.0 + 2.0 + 4.0 + 7.0
