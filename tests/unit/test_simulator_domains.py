"""Whole domains lost at a time: what a placement that knows of them is worth, and when it is used."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.oracle.monte_carlo import endured_samples
from tests.unit.journal_in_memory import check_journal


def scenario(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "racks",
        "num_groups": 24,
        "redundancy": 3,
        "num_steps": 400,
        "microbatches_per_shard": 4,
        "costs": CostModel(compute_s=10.0, save_s=1.0, restart_s=100.0),
        "failures": FailureSpec(kind="domain", mean_s=3000.0, groups_per_domain=4),
    }
    return Scenario(**{**settings, **changes})


def test_the_placement_takes_the_domains_of_the_failures_by_default() -> None:
    assert scenario().placed_groups_per_domain == 4
    assert scenario(groups_per_domain=1).placed_groups_per_domain == 1
    assert scenario(groups_per_domain=6).placed_groups_per_domain == 6
    assert scenario(placement="consecutive").placed_groups_per_domain == 1
    assert scenario(failures=FailureSpec(mean_s=100.0), groups_per_domain=3).placed_groups_per_domain == 3


def test_domains_of_a_placement_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="groups_per_domain=0 has to be 1 or more"):
        scenario(groups_per_domain=0)
    with pytest.raises(ValueError, match="groups_per_domain=4 needs the placement golomb"):
        scenario(groups_per_domain=4, placement="consecutive")


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_losses_of_domains_wipe_out_later_where_the_placement_knows_of_them(granularity: str) -> None:
    def wipe_outs_per_s(groups_per_domain: int | None) -> float:
        case = scenario(groups_per_domain=groups_per_domain, granularity=granularity, num_steps=4000)
        results = [simulate(case, seed) for seed in range(4)]
        return sum(result.restarts for result in results) / sum(result.end_s for result in results)

    assert wipe_outs_per_s(None) < 0.8 * wipe_outs_per_s(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"groups_per_domain": 1}, {"redundancy": 6, "num_steps": 8000}, {"num_groups": 60}]
)
def test_the_expected_time_to_wipe_out_by_domains_is_met_by_simulation(changes: dict[str, Any]) -> None:
    costs, failures = CostModel(compute_s=2.5e-3), FailureSpec(kind="domain", mean_s=0.3, groups_per_domain=4)
    case = scenario(costs=costs, failures=failures, save_interval_s=0.0, **{"num_steps": 4000} | changes)
    result = simulate(case, seed=1)
    assert result.restarts > 50
    assert result.end_s / result.restarts == pytest.approx(case.time_to_wipe_out_s(), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 8000},
        {"groups_per_domain": 1},
        {"num_groups": 60},
        {"num_groups": 60, "redundancy": 2},
        {"num_groups": 60, "redundancy": 2, "groups_per_domain": 1},
    ],
)
def test_the_expected_time_to_wipe_out_by_domains_that_come_back_is_near_that_of_simulation(
    changes: dict[str, Any],
) -> None:
    """A lower bound, as sets of domains that overlap are lost together more often than independent ones."""
    costs, failures = CostModel(compute_s=2.5e-3), FailureSpec(kind="domain", mean_s=0.3, groups_per_domain=4)
    case = scenario(costs=costs, failures=failures, save_interval_s=0.0, repair_s=0.1, **{"num_steps": 4000} | changes)
    result = simulate(case, seed=1)
    simulated_s = result.end_s / result.restarts
    print(f"{changes}: {result.restarts} wipe-outs, {simulated_s:.3f} s, expected {case.time_to_wipe_out_s():.3f} s")
    assert result.restarts > 50
    assert 0.6 * simulated_s < case.time_to_wipe_out_s() < 1.15 * simulated_s


@pytest.mark.parametrize(("num_groups", "size", "redundancy"), [(200, 4, 8), (200, 8, 9), (1000, 8, 9)])
def test_more_domains_are_endured_by_a_placement_that_knows_of_them(
    num_groups: int, size: int, redundancy: int
) -> None:
    domain_of = np.arange(num_groups) // size
    endured = {}
    for known in (1, size):
        hosts = make_placement("golomb", num_groups, redundancy, known).host_array
        samples = endured_samples(domain_of[hosts], num_groups // size, 1000, np.random.default_rng(num_groups))
        endured[known] = (samples.mean(), samples.std() / np.sqrt(samples.size))
    print(f"N {num_groups}, domains of {size}, r {redundancy}: endured {endured}")
    assert endured[size][0] > endured[1][0] + 5 * endured[1][1]


def test_the_journal_of_a_run_with_domains_is_checked_against_its_own_placement() -> None:
    lines: list[Line] = []
    simulate(
        scenario(num_steps=30, failures=FailureSpec(kind="domain", mean_s=600.0, groups_per_domain=4)), 1, lines.append
    )
    run = lines[0].record
    assert isinstance(run, RunRecord)
    assert run.groups_per_domain == 4
    assert check_journal(Journal(lines=tuple(lines))).verdict == "valid"
    other = dataclasses.replace(lines[0], record=dataclasses.replace(run, groups_per_domain=1))
    answer = check_journal(Journal(lines=(other, *lines[1:])))
    assert answer.verdict == "invalid"
    assert any("without hosting it" in reason for reason in answer.reasons)
