"""Scenarios from presets, files and overrides; their errors; when to save."""

from math import inf
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.core.cadence import optimal_cadence_s
from spare_megatron.simulator.costs import CostModel
from spare_megatron.simulator.engine import simulate
from spare_megatron.simulator.failures import FailureSpec
from spare_megatron.simulator.presets import ScenarioError, load_scenario, preset_names
from spare_megatron.simulator.scenario import Scenario


@pytest.mark.parametrize(
    ("name", "num_groups", "redundancy", "reduce_s"),
    [("paper_n200", 200, 9, 2.0), ("paper_n600", 600, 8, 6.0), ("paper_n1000", 1000, 9, 10.0)],
)
def test_the_papers_presets(name: str, num_groups: int, redundancy: int, reduce_s: float) -> None:
    scenario = load_scenario(name)
    assert (scenario.name, scenario.num_groups, scenario.redundancy) == (name, num_groups, redundancy)
    assert (scenario.costs.reduce_s, scenario.costs.compute_s, scenario.num_steps) == (reduce_s, 64.0, 10_000)
    assert (scenario.failures.mean_s, scenario.failures.shape, scenario.repair_s) == (300.0, 0.78, None)


def test_all_presets_can_be_simulated() -> None:
    assert set(preset_names()) >= {"paper_n200", "paper_n600", "paper_n1000"}
    for name in preset_names():
        assert simulate(load_scenario(name, ["num_steps=3"]), seed=0).num_steps == 3


def test_overrides_are_texts_or_values() -> None:
    overrides = ["policy=replication", "costs.save_s=3", "repair_s=10.5", "last_resort=false"]
    scenario = load_scenario("paper_n200", overrides)
    assert (scenario.policy, scenario.costs.save_s, scenario.repair_s) == ("replication", 3.0, 10.5)
    assert load_scenario("paper_n200", {"repair_s": None, "redundancy": 4}).redundancy == 4
    assert load_scenario("paper_n200", ["save_interval_s=inf"]).save_cadence_s() == inf
    assert load_scenario("paper_n200", ["repair_s=none"]).repair_s is None


def test_a_file_names_a_trace_beside_it(tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text("seconds,group,repair_s\n50,1,30\n10.5,0,\n")
    path = tmp_path / "mine.toml"
    path.write_text(
        "num_groups = 4\nredundancy = 2\n[costs]\ncompute_s = 1\n"
        '[failures]\nkind = "trace"\ntrace_file = "losses.csv"\n'
    )
    scenario = load_scenario(path)
    assert scenario.name == "mine"
    assert [(loss.at_s, loss.groups, loss.repair_s) for loss in scenario.failures.trace] == [
        (10.5, (0,), None),
        (50.0, (1,), 30.0),
    ]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["redundancy=201"], "redundancy=201 exceeds num_groups=200"),
        (["num_groups=0"], "num_groups=0 has to be 1 or more"),
        (["costs.save_s=-1"], r"costs.save_s=-1.0 has to be 0 or more"),
        (["costs.compute_s=0"], "costs.compute_s=0.0 has to be above 0"),
        (["repair_s=-5"], "repair_s=-5.0 has to be 0 or more"),
        (["failures.mean_s=0"], "failures.mean_s=0.0"),
        (["failures.groups_per_domain=0"], "groups_per_domain=0"),
        (["failures.kind=trace"], "the trace is empty"),
        (["policy=spars"], "policy='spars' has to be one of checkpoint_only, replication, spare"),
        (["redundency=3"], "unknown setting redundency; the nearest valid one is redundancy"),
        (["num_steps=1.5"], "num_steps=1.5 has to be of type int"),
        (["redundancy"], "must have the form key=value"),
        (["last_resort=true"], "last_resort takes single microbatches"),
        (["last_resort=true", "policy=replication"], "last_resort belongs to the policy spare"),
        (["failures.trace_file=missing.csv"], "cannot read the trace"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_said(overrides: list[str], text: str) -> None:
    with pytest.raises(ScenarioError, match=text):
        load_scenario("paper_n200", overrides)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_steps=0 .*; redundancy=9 exceeds num_groups=4"):
        Scenario(name="x", num_groups=4, redundancy=9, num_steps=0, costs=CostModel(compute_s=1.0))


def test_an_unknown_preset_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no preset paper_n20; known: .*paper_n200"):
        load_scenario("paper_n20")
    with pytest.raises(ScenarioError, match="cannot read the scenario"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("num_groups = = 3")
    with pytest.raises(ScenarioError, match="not valid TOML"):
        load_scenario(tmp_path / "bad.toml")
    (tmp_path / "short.toml").write_text("num_groups = 3")
    with pytest.raises(ScenarioError, match="has to set redundancy"):
        load_scenario(tmp_path / "short.toml")


@pytest.mark.parametrize("text", ["", "seconds,group\n", "seconds,rank\n1,2\n", "seconds,group\nsoon,2\n"])
def test_a_trace_without_losses_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "losses.csv").write_text(text)
    overrides = [f"failures.trace_file={tmp_path / 'losses.csv'}", "failures.kind=trace"]
    with pytest.raises(ScenarioError, match=r"holds no losses|is no loss"):
        load_scenario("paper_n200", overrides)


def test_a_trace_of_unknown_groups_or_negative_times_is_refused(tmp_path: Path) -> None:
    for text, said in (("5,200\n", "ids go from 0 to num_groups - 1 = 199"), ("-5,3\n", "negative time")):
        (tmp_path / "losses.csv").write_text("seconds,group\n" + text)
        overrides = [f"failures.trace_file={tmp_path / 'losses.csv'}", "failures.kind=trace"]
        with pytest.raises(ScenarioError, match=said):
            load_scenario("paper_n200", overrides)


def small(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "x",
        "num_groups": 20,
        "redundancy": 2,
        "costs": CostModel(compute_s=10.0, save_s=5.0, restart_s=100.0),
        "failures": FailureSpec(mean_s=1000.0),
    }
    return Scenario(**{**settings, **changes})


def test_the_cadence_is_the_best_for_the_time_to_wipe_out_of_the_policy() -> None:
    scenario = small(policy="checkpoint_only")
    assert scenario.time_to_wipe_out_s() == 1000.0
    assert scenario.save_cadence_s() == optimal_cadence_s(5.0, 1000.0, 100.0)
    times = [
        small(policy="checkpoint_only").time_to_wipe_out_s(),
        small(policy="spare").time_to_wipe_out_s(),
        small(policy="replication").time_to_wipe_out_s(),
        small(policy="replication", repair_s=600.0).time_to_wipe_out_s(),
        small(policy="spare", last_resort=True, repair_s=600.0).time_to_wipe_out_s(),
    ]
    assert times == sorted(times)
    assert times[-1] == inf


def test_free_saves_are_taken_after_every_step_and_without_failures_none() -> None:
    free = small(costs=CostModel(compute_s=10.0), num_steps=5)
    assert simulate(free, 0).saves == 5
    assert simulate(small(failures=FailureSpec(), num_steps=5), 0).saves == 0


@pytest.mark.parametrize("policy", ["spare", "replication", "checkpoint_only"])
def test_the_expected_time_to_wipe_out_is_met_by_simulation(policy: str) -> None:
    costs = CostModel(compute_s=1e-3, save_s=1e-6)
    scenario = small(policy=policy, num_steps=20_000, costs=costs, failures=FailureSpec(mean_s=0.05), num_groups=30)
    result = simulate(scenario, seed=1)
    working_s = result.end_s
    assert result.restarts > 50
    assert working_s / result.restarts == pytest.approx(scenario.time_to_wipe_out_s(), rel=0.15)
