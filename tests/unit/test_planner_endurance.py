"""Losses endured before a wipe-out: closed forms against exact enumeration, Monte Carlo and sums over every count."""

import numpy as np
import pytest

from benchmarks.paper_model import asymptotic_endured_losses
from spare_megatron.core.saves import endurance as module
from spare_megatron.core.saves.endurance import coverage_probabilities, endured_losses, lost_counts, wiped_probabilities
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.forecast import Forecast, forecast, forecast_with_rejoin
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.partition_redundancy import state_time_to_wipe_out_s
from spare_megatron.tools.plan.readmission import RejoinTimes
from tests.oracle.enumeration import covered_shares
from tests.oracle.monte_carlo import endured_samples

GRID = [(n, r) for n in (200, 600, 1000) for r in range(2, 21)]


def test_three_groups_on_a_ring_endure_one_loss_and_no_two() -> None:
    assert covered_shares(make_placement("golomb", 3, 2)).tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_extreme_redundancies_are_exact(n: int) -> None:
    for r in (1, n):
        exact = covered_shares(make_placement("golomb", n, r))
        np.testing.assert_allclose(coverage_probabilities(n, r), exact)
        assert endured_losses(n, r) == pytest.approx(r - 1)


@pytest.mark.parametrize(("n", "r"), [(5, 3), (7, 3), (8, 2), (13, 4), (16, 3), (18, 2), (19, 4), (20, 10)])
def test_expected_losses_are_within_6_percent_of_exact_enumeration(n: int, r: int) -> None:
    exact = float(covered_shares(make_placement("golomb", n, r))[1:].sum())
    print(f"N {n}, r {r}: {endured_losses(n, r):.3f}, exact {exact:.3f}")
    assert endured_losses(n, r) == pytest.approx(exact, rel=0.06)


def test_a_shard_is_wiped_by_as_many_sets_as_hold_all_its_hosts() -> None:
    # 10 pairs of 5 groups; those of 3 lost ones that hold two given groups: 3 of 10.
    assert wiped_probabilities(5, 2)[3] == pytest.approx(3 / 10)
    assert wiped_probabilities(5, 0).tolist() == [1.0] * 6


@pytest.mark.slow
def test_closed_forms_are_within_1_2_percent_of_monte_carlo_on_average() -> None:
    """The paper states 1.13% for its form over N in {200, 600, 1000}; r from 2 to 20."""
    asymptotic, refined = [], []
    for n, r in GRID:
        hosts = make_placement("golomb", n, r).host_array
        # The spread of the losses endured goes with 1 / r.
        counted = endured_samples(hosts, n, max(6000 // r, 800), np.random.default_rng([7, n, r])).mean()
        asymptotic.append(abs(asymptotic_endured_losses(n, r) / counted - 1))
        refined.append(abs(endured_losses(n, r) / counted - 1))
    print(f"mean error: closed form {np.mean(asymptotic):.2%}, sum over counts {np.mean(refined):.2%}")
    assert np.mean(asymptotic) < 0.012
    assert np.mean(refined) < 0.006  # most of it is noise


def test_the_published_figure() -> None:
    assert asymptotic_endured_losses(600, 20) == pytest.approx(426, rel=0.005)
    assert endured_losses(600, 20) == pytest.approx(426, rel=0.005)


def test_golomb_placements_endure_more_than_consecutive_ones_at_first() -> None:
    """Consecutive hosts: the second loss of neighbours already hits the same shards."""
    golomb, beside = (covered_shares(make_placement(kind, 13, 3)) for kind in ("golomb", "consecutive"))
    assert golomb[3] == beside[3]  # as many triples of hosts
    assert golomb[5] < beside[5]  # which overlap when they are neighbours


@pytest.mark.parametrize("r", [0, 8])
def test_a_redundancy_that_does_not_fit_is_refused(r: int) -> None:
    with pytest.raises(ValueError, match=r"redundancy=\d"):
        endured_losses(7, r)


def test_too_many_groups_to_enumerate_are_refused() -> None:
    with pytest.raises(ValueError, match="23 groups"):
        covered_shares(make_placement("golomb", 23, 2))


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
