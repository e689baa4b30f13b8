"""Scenarios from presets, files and overrides; their errors; when to save."""

from math import inf
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.core.saves.survival import optimal_cadence_s
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.scenario_presets import ScenarioError, load_scenario, preset_names


@pytest.mark.parametrize(
    ("name", "num_groups", "redundancy", "reduce_s"),
    [("paper_n200", 200, 9, 2.0), ("paper_n600", 600, 8, 6.0), ("paper_n1000", 1000, 9, 10.0)],
)
def test_the_papers_presets(name: str, num_groups: int, redundancy: int, reduce_s: float) -> None:
    scenario = load_scenario(name)
    assert (scenario.name, scenario.num_groups, scenario.redundancy) == (name, num_groups, redundancy)
    assert (scenario.costs.reduce_s, scenario.costs.compute_s, scenario.num_steps) == (reduce_s, 64.0, 10_000)
    assert (scenario.failures.mean_s, scenario.failures.shape, scenario.repair_s) == (300.0, 0.78, None)


def test_the_preset_of_llama_3_has_the_published_rate_and_mix() -> None:
    scenario = load_scenario("llama3_16k")
    num_nodes = scenario.num_groups * scenario.failures.nodes_per_group
    assert num_nodes * 8 == 16_384
    assert 54 * 86_400 / scenario.failures.mean_interval_s(scenario.num_groups) == pytest.approx(419, rel=1e-6)
    weights = [cause.weight for cause in scenario.failures.mix]
    assert (len(weights), sum(weights)) == (18, 419)
    assert sorted(weights, reverse=True)[:9] == [148, 72, 54, 35, 32, 19, 17, 7, 7]


@pytest.mark.parametrize(
    ("name", "per_1000_node_days", "num_nodes"), [("meta_rsc1", 6.5, 2000), ("meta_rsc2", 2.34, 1000)]
)
def test_the_presets_of_metas_clusters_have_the_published_rates(
    name: str, per_1000_node_days: float, num_nodes: int
) -> None:
    scenario = load_scenario(name)
    assert scenario.num_groups * scenario.failures.nodes_per_group == num_nodes
    interval_s = scenario.failures.mean_interval_s(scenario.num_groups)
    assert 1000 / num_nodes * 86_400 / interval_s == pytest.approx(per_1000_node_days, rel=1e-6)


def test_all_presets_can_be_simulated(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("seconds,machine,repair_s\n5,node-1,100\n")
    assert set(preset_names()) >= {"paper_n200", "paper_n600", "paper_n1000", "trace_400"}
    for name in preset_names():
        trace = [f"failures.trace_file={tmp_path / 'trace.csv'}"] if name.startswith("trace_") else []
        assert simulate(load_scenario(name, ["num_steps=3", *trace]), seed=0).num_steps == 3


def test_overrides_are_texts_or_values() -> None:
    overrides = ["policy=replication", "costs.save_s=3", "repair_s=10.5", "last_resort=false"]
    scenario = load_scenario("paper_n200", overrides)
    assert (scenario.policy, scenario.costs.save_s, scenario.repair_s) == ("replication", 3.0, 10.5)
    assert load_scenario("paper_n200", {"repair_s": None, "redundancy": 4}).redundancy == 4
    assert load_scenario("paper_n200", ["save_interval_s=inf"]).save_cadence_s() == inf
    assert load_scenario("paper_n200", ["repair_s=none"]).repair_s is None
    assert load_scenario("paper_n200", ["slice_redundancy=2"]).partition_redundancy == 2, "as it was called"
    assert load_scenario("paper_n200", ["name=1\nseed = 2"]).name == "1\nseed = 2", "no value of TOML"


def test_a_file_names_a_trace_beside_it(tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text("seconds,group,repair_s,cause\n50,1,30,gpu\n10.5,0,,\n")
    path = tmp_path / "mine.toml"
    path.write_text(
        "num_groups = 4\nredundancy = 2\n[costs]\ncompute_s = 1\n"
        '[failures]\nkind = "trace"\ntrace_file = "losses.csv"\n'
    )
    scenario = load_scenario(path)
    assert scenario.name == "mine"
    assert [(loss.at_s, loss.groups, loss.repair_s, loss.cause) for loss in scenario.failures.trace] == [
        (10.5, (0,), None, "simulated"),
        (50.0, (1,), 30.0, "gpu"),
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
        (["policy=spars"], "policy='spars' must be one of checkpoint_only, replication, spare"),
        (["redundency=3"], "unknown setting redundency; the nearest valid one is redundancy"),
        (["num_steps=1.5"], "num_steps=1.5 must be a whole number"),
        (["redundancy"], "must have the form key=value"),
        (["last_resort=true"], "last_resort takes single microbatches"),
        (["last_resort=true", "policy=replication"], "last_resort belongs to the policy spare"),
        (["failures.trace_file=missing.csv"], "cannot read the trace"),
        (["failures.nodes_per_group=0"], "failures.nodes_per_group=0 has to be 1 or more"),
        (["failures.nodes_per_group=4"], "failures.nodes_per_group=4 belongs to the kind node"),
        (["failures.groups_per_domain=4"], "failures.groups_per_domain=4 belongs to the kind domain"),
        (["groups_per_domain=0"], "groups_per_domain=0 has to be 1 or more"),
        (["num_spares=-1"], "num_spares=-1 has to be 0 or more"),
        (["num_spares=2", "policy=checkpoint_only"], "num_spares=2 is never used"),
        (["repair_is_random=true"], "repair_is_random has no mean"),
        (["repair_is_random=true", "failures.mix.gpu.weight=1"], "repair_is_random has no mean"),
        (["failures.mix.gpu.weight=0"], "failures.mix.gpu.weight=0.0 has to be above 0"),
        (["failures.mix.gpu.weight=inf"], "failures.mix.gpu.weight=inf has to be above 0"),
        (["failures.mix.gpu.repair_s=5"], "has to set failures.mix.gpu.weight"),
        (["failures.mix.gpu.weight=1", "failures.mix.gpu.repair_s=-5"], "failures.mix.gpu.repair_s=-5.0 has to be 0"),
        (["failures.mix.gpu.wait=1"], "unknown setting failures.mix.gpu.wait; .* has weight, repair_s"),
        (["failures.mix=1"], "unknown setting failures.mix"),
        (["failures.trace=1"], "unknown setting failures.trace; the nearest valid one is failures.trace_file"),
        (["failures.mix.gpu={weight=1, repair_s=5}", "repair_s=9"], "unknown setting failures.mix.gpu; .*"),
        (["failures.mix.gpu.weight=1", "failures.mix.gpu.repair_s=5", "repair_s=9"], "repair_s=9.0 is never used"),
    ],
)
def test_problems_of_a_scenario_are_reported(overrides: list[str], text: str) -> None:
    with pytest.raises(ScenarioError, match=text):
        load_scenario("paper_n200", overrides)


def test_causes_and_traces_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text("seconds,group\n5,3\n")
    trace = f"failures.trace_file={tmp_path / 'losses.csv'}"
    with pytest.raises(ScenarioError, match=r"failures\.mix is of no use to a trace"):
        load_scenario("paper_n200", [trace, "failures.kind=trace", "failures.mix.gpu.weight=1"])
    with pytest.raises(ScenarioError, match=r"failures\.kind is system, which has no trace"):
        load_scenario("paper_n200", [trace])


def test_all_problems_are_reported_at_once() -> None:
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
    with pytest.raises(ScenarioError, match=r"holds no losses|is no loss|seconds='soon' has to be a number"):
        load_scenario("paper_n200", overrides)


def test_a_trace_of_unknown_groups_or_negative_times_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("5,200\n", "ids go from 0 to num_groups - 1 = 199"),
        ("-5,3\n", "seconds='-5' has to be a number of 0 or more"),
    ):
        (tmp_path / "losses.csv").write_text("seconds,group\n" + text)
        overrides = [f"failures.trace_file={tmp_path / 'losses.csv'}", "failures.kind=trace"]
        with pytest.raises(ScenarioError, match=message):
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
    assert scenario.save_cadence_s() == optimal_cadence_s(5.0, 1000.0)
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["spare", "replication", "checkpoint_only"])
def test_the_expected_time_to_wipe_out_is_met_by_simulation(policy: str) -> None:
    costs = CostModel(compute_s=1e-3, save_s=1e-6)
    scenario = small(policy=policy, num_steps=20_000, costs=costs, failures=FailureSpec(mean_s=0.05), num_groups=30)
    result = simulate(scenario, seed=1)
    working_s = result.end_s
    assert result.restarts > 50
    assert working_s / result.restarts == pytest.approx(scenario.time_to_wipe_out_s(), rel=0.15)
