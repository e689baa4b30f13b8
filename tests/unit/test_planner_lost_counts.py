"""Sums over ranges of counts against those over every count."""

import numpy as np
import pytest

from spare_megatron.core.saves import survival as module
from spare_megatron.core.saves.survival import coverage_probabilities, endured_losses, lost_counts
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.forecast import Forecast, forecast, forecast_with_rejoin
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.partition_redundancy import state_time_to_wipe_out_s
from spare_megatron.tools.plan.readmission import RejoinTimes

MANY = 12_000


@pytest.mark.parametrize("num_groups", [1, 2, 1999, 2000, 2001, 2003, 75_000, 10_000_000])
def test_every_count_is_in_one_range(num_groups: int) -> None:
    counts = lost_counts(num_groups)
    assert counts.first[0] == 0
    assert counts.first[-1] == num_groups
    assert counts.width.min() >= 1
    assert (counts.width <= 1 + counts.middle / 1900).all()


def test_ten_million_groups_are_not_ten_million_counts() -> None:
    """The plan for so many had not ended after minutes: it summed over every count, for every redundancy."""
    assert len(lost_counts(10_000_000).middle) < 20_000


def test_sums_of_ranges_leave_nothing_out() -> None:
    values = np.arange(2 * MANY, dtype=np.float64).reshape(2, MANY)
    found = lost_counts(MANY).sums(values)
    assert found.shape[1] < MANY
    assert found.sum(axis=1).tolist() == values.sum(axis=1).tolist()


@pytest.mark.parametrize("redundancy", [1, 2, 8, 48, MANY])
def test_losses_endured_are_those_of_every_count(redundancy: int) -> None:
    every = float(coverage_probabilities(MANY, redundancy)[1:].sum())
    assert endured_losses(MANY, redundancy) == pytest.approx(every, rel=1e-3)


def facts(*, last_resort: bool = False) -> ClusterFacts:
    return ClusterFacts(
        num_groups=MANY,
        times=StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=10.0),
        checkpoint=CheckpointTimes(save_s=60.0, restart_s=3600.0),
        num_microbatches=16,
        last_resort=last_resort,
        fetch_s=3.0,
    )


def outlooks(redundancy: int) -> list[Forecast]:
    returns = [
        RejoinTimes(repair_s=repair_s, join_s=10.0, num_spares=spares)
        for repair_s, spares in ((600.0, 0), (600.0, 40), (12_000.0, 0))
    ]
    return [
        forecast(facts(), redundancy, 1),
        forecast(facts(), redundancy, 16),
        forecast(facts(last_resort=True), redundancy, 16),
        *(forecast_with_rejoin(facts(), redundancy, 16, back) for back in returns),
    ]


@pytest.mark.parametrize("redundancy", [2, 9])
def test_outlooks_are_those_of_every_count(redundancy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outlooks(redundancy)
    state_s = state_time_to_wipe_out_s(MANY, redundancy, 1e5, None)
    assert len(lost_counts(MANY).middle) < MANY
    monkeypatch.setattr(module, "_SINGLE", MANY)
    assert len(lost_counts(MANY).middle) == MANY
    for by_range, by_count in zip(found, outlooks(redundancy), strict=True):
        assert by_range.lived_s == pytest.approx(by_count.lived_s, rel=1e-3)
        assert by_range.stretch == pytest.approx(by_count.stretch, rel=1e-3)
    assert state_s == pytest.approx(state_time_to_wipe_out_s(MANY, redundancy, 1e5, None), rel=1e-3)
