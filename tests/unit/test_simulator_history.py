"""Runs that start in the steady state, losses of whole racks, and goodput: the simulator against counts of machines."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import pytest
from scipy.stats import poisson

from spare_megatron.journal.files import Line
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, MachineDomain, WithDomains, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.measured import in_order
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.scenario_presets import load_scenario
from spare_megatron.tools.simulate.sweep import grid
from spare_megatron.tools.simulate.world import World
from tests.unit.journal_in_memory import check_journal

N, SIZE = 60, 10


def scenario_with(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "steady",
        "num_groups": N,
        "redundancy": 4,
        "microbatches_per_shard": 16,
        "machines_per_group": SIZE,
        "reform_s": 1.0,
        "repair_s": 400.0,
        "history_s": 400.0,
        "last_resort": True,
        "costs": CostModel(compute_s=8.0, reduce_s=2.0, restart_s=100.0),
        "failures": FailureSpec(mean_s=10.0),
        "num_steps": 30,
        "save_interval_s": float("inf"),
    }
    return Scenario(**{**settings, **changes})


def num_missing(scenario: Scenario, seed: int) -> int:
    """Groups that do not take part at the start."""
    return int((~World(scenario, seed).fleet.is_up).sum())


@pytest.mark.parametrize("changes", [{}, {"num_spares": 15}, {"repair_is_random": True, "history_s": 4000.0}])
def test_a_history_leaves_as_many_groups_as_poisson_many_absences_do(changes: dict[str, Any]) -> None:
    scenario = scenario_with(**changes)
    away = np.arange(200)
    missing = np.maximum(np.ceil((away - scenario.num_spares) / SIZE), 0)
    expected = float(poisson.pmf(away, 400 / 10) @ missing)
    # Of the missing groups nothing is lost, which makes fewer of them: 5% here.
    found = np.mean([num_missing(scenario, seed) for seed in range(60)])
    assert expected * 0.94 < found < expected * 1.03


def test_a_run_with_a_history_is_as_slow_as_one_long_after_its_start() -> None:
    runs = [simulate(scenario_with(), seed) for seed in range(3)]
    at_once = np.mean([run.time_to_train_ratio for run in runs])
    fresh = np.mean([simulate(scenario_with(history_s=0.0), seed).time_to_train_ratio for seed in range(3)])
    later = np.mean(
        [simulate(scenario_with(history_s=0.0, num_steps=200), seed).time_to_train_ratio for seed in (0, 1)]
    )
    assert at_once == pytest.approx(later, rel=0.03)
    assert fresh < at_once - 0.03
    assert not any(run.restarts for run in runs)


def test_the_journal_of_a_run_that_starts_without_some_groups_is_valid() -> None:
    lines: list[Line] = []
    run = simulate(scenario_with(num_steps=8), 0, journal=lines.append)
    verdict = check_journal(in_order(lines))
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    assert run.restarts == 0
    assert run.losses
    assert num_missing(scenario_with(), 0)


def test_goodput_counts_sums_and_idle_machines() -> None:
    run = simulate(scenario_with(history_s=0.0, failures=FailureSpec(), num_spares=40, further_groups=2), 0)
    assert run.time_to_train_ratio == pytest.approx(1.0)
    assert run.goodput == pytest.approx(8 / (8 + 2) * N * SIZE / (N * SIZE + 2 * SIZE + 40))


def test_goodput_counts_a_spare_as_one_machine_where_nodes_are_lost_and_where_nothing_is_re_formed() -> None:
    failures = FailureSpec(kind="node", nodes_per_group=16)
    nodes = scenario_with(history_s=0.0, reform_s=None, machines_per_group=1, failures=failures, num_spares=40)
    assert simulate(nodes, 0).goodput == pytest.approx(8 / (8 + 2) * N * 16 / (N * 16 + 40))
    (sets,) = grid(scenario_with(failures=FailureSpec(), num_spares=40), (("replication", "stack"),), (4,))
    assert simulate(sets, 0).goodput == pytest.approx(8 / (4 * 8 + 2) * N * SIZE / (N * SIZE + 40))


class Once:
    """These losses, once."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        self.left = list(losses)

    def next_s(self) -> float:
        return self.left[0].at_s if self.left else float("inf")

    def strike(self, _is_up: object) -> Loss:
        return self.left.pop(0)

    def came_back(self, *_: object) -> None:
        pass

    restarted = came_back


def test_a_lost_rack_breaks_the_groups_that_its_machines_stand_in_and_spares_mend_them() -> None:
    """4 groups of 2 machines and 3 spares; the rack has both machines of group 1, one of group 0 and one of group 2."""
    scenario = scenario_with(num_groups=4, machines_per_group=2, num_spares=3, history_s=0.0)
    rack = Loss(at_s=5.0, groups=(), domain=range(1, 5), repair_s=50.0, cause="rack")
    fleet = Fleet(scenario, Once([rack]), np.random.default_rng(0))
    (loss,) = fleet.lose_until(5.0)
    assert loss.groups == (0, 1, 2)
    assert fleet.ready(6.0) == (0, 2), "one spare each; the third is alone"
    fleet.take_in(6.0, fleet.ready(6.0))
    assert fleet.ready(54.9) == ()
    assert fleet.ready(56.0) == (1,)
    assert fleet.losses_by_cause == {"rack": 3}


@pytest.mark.parametrize("seed", range(4))
def test_what_a_power_cut_takes_is_not_lost_again_alone(seed: int) -> None:
    power = MachineDomain(name="power", machines=4, mean_s=50.0)
    failures = FailureSpec(mean_s=100.0, domains=(power,))
    changes: dict[str, Any] = {"num_groups": 4, "machines_per_group": 1, "history_s": 0.0, "repair_s": None}
    fleet = World(scenario_with(failures=failures, **changes), seed).fleet
    fleet.lose_until(2000.0)
    assert (fleet.num_lost, int(fleet.is_up.sum())) == (4, 0)


def test_after_a_restart_groups_beyond_the_shards_are_lost_as_well() -> None:
    fleet = World(scenario_with(further_groups=N, history_s=0.0), 0).fleet
    due_s = fleet.next_loss_s
    fleet.restart(0.0, 100.0)
    assert fleet.next_loss_s == pytest.approx(100.0 + due_s / 2)


def test_racks_are_lost_at_their_rate_and_as_a_whole() -> None:
    rack = MachineDomain(name="rack", machines=8, mean_s=1000.0, repair_s=5.0)
    spec = FailureSpec(mean_s=50.0, domains=(rack,))
    is_up = np.ones(N, dtype=np.bool_)
    process = WithDomains(
        make_process(spec, N, np.random.default_rng(0)), spec.domains, N * SIZE, np.random.default_rng(1)
    )
    losses = []
    while process.next_s() < 20_000.0:
        losses.append(process.strike(is_up))
    assert [loss.at_s for loss in losses] == sorted(loss.at_s for loss in losses)
    racks = [loss for loss in losses if loss.domain is not None]
    expected = 20_000 / 1000 * ceil(N * SIZE / 8)
    assert abs(len(racks) - expected) < 4 * expected**0.5
    assert abs(len(losses) - len(racks) - 400) < 80
    assert {loss.domain for loss in racks} == {range(first, first + 8) for first in range(0, N * SIZE, 8)}
    assert {loss.cause for loss in racks} == {"rack"}


def test_racks_cost_what_their_machines_cost_if_spares_suffice() -> None:
    """With spares for all that is away only joins and patches are left, for one group or two as for a machine."""
    rack = MachineDomain(name="rack", machines=5, mean_s=4800.0, repair_s=100.0)
    changes: dict[str, Any] = {"num_spares": 100, "num_steps": 200}
    failures = FailureSpec(mean_s=100.0, domains=(rack,))
    run = simulate(scenario_with(failures=failures, **changes), 0)
    alone = simulate(scenario_with(failures=FailureSpec(mean_s=100.0), **changes), 0)
    assert run.losses_by_cause["rack"] > 20
    assert alone.time_to_train_ratio < run.time_to_train_ratio < 1.2
    assert run.restarts == 0


def test_racks_and_a_history_are_read_from_a_scenario() -> None:
    scenario = load_scenario(
        "million_chips",
        {
            "failures.domains.rack.machines": 16,
            "failures.domains.rack.mean_s": 1e8,
            "failures.domains.row.machines": 500,
            "failures.domains.row.mean_s": 2e8,
            "failures.domains.row.repair_s": 3600.0,
        },
    )
    rack, row = scenario.failures.domains
    assert (rack.name, rack.machines, rack.repair_s) == ("rack", 16, None)
    assert (row.name, row.repair_s) == ("row", 3600.0)
    assert scenario.num_machines * 8 == 1_200_000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failures": FailureSpec(kind="node", mean_s=9.0), "reform_s": None}, "history_s=400.0 needs reform_s"),
        ({"notice_s": 5.0}, "history_s=400.0 needs reform_s, failures.kind system and notice_s=0"),
        ({"history_s": -1.0}, "history_s=-1.0 has to be 0 or more"),
    ],
)
def test_a_history_without_machines_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        scenario_with(**changes)


def test_domains_that_cannot_be_lost_are_refused() -> None:
    rack = MachineDomain(name="rack", machines=8, mean_s=1000.0)
    with pytest.raises(ValueError, match=r"failures.domains.rack takes machines: set reform_s"):
        scenario_with(failures=FailureSpec(domains=(rack,)), reform_s=None, machines_per_group=1, history_s=0.0)
    with pytest.raises(ValueError, match=r"beside failures.kind system, not node"):
        FailureSpec(kind="node", domains=(rack,))
    with pytest.raises(ValueError, match=r"failures.domains.rack needs machines of 1 or more"):
        MachineDomain(name="rack", machines=0, mean_s=1000.0)
