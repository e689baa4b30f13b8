"""Losses endured before a wipe-out: closed forms against exact enumeration and Monte Carlo."""

import numpy as np
import pytest

from benchmarks.paper_model import asymptotic_endured_losses
from spare_megatron.core.saves.endurance import coverage_probabilities, endured_losses, wiped_probabilities
from spare_megatron.stacking.placement import make_placement
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
