"""What `spare config show` says that a run, a loss, a slow machine and a wipe-out cost, against simulated runs."""

import dataclasses
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.building import valid_keys
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import flops_per_token
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.pace_evidence import STEPS_TO_ACT
from spare_megatron.tools.plan.run_costs import ABSENCE_S, FORWARD_SHARE, SLOW_S, START_S, run_costs
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.measured_run import FLOPS, ORIGIN, STEP_S, measured_lines, write_journal

STEPS = 1500
GIVEN = ("layout.num_groups=8", "spare.microbatches_per_shard=8", f"train.steps={STEPS}", "cluster.device=cpu")


def configured(*overrides: str) -> RunConfig:
    """A step takes a second at the assumed speed unless `overrides` change that."""
    config = load_run_config(None, ["data.corpus=c", *GIVEN, *overrides]).config
    per_step = flops_per_token(config) * run_sizes(config).tokens_per_step
    peak = per_step / run_sizes(config).num_ranks / 0.4 / 1e12
    return dataclasses.replace(config, metrics=dataclasses.replace(config.metrics, peak_tflops=peak))


def costs(config: RunConfig, endured: float = 9.0, measured: Path | None = None) -> dict[str, tuple[float, str]]:
    rows = run_costs(config, run_sizes(config), endured, measured)
    return {name: (seconds, basis) for name, seconds, basis in rows}


def simulated_s(config: RunConfig, loss_at_s: float | None, **changes: Any) -> float:
    """The end of a simulated run of steps of a second, with one loss or none."""
    losses = () if loss_at_s is None else (Loss(at_s=loss_at_s, groups=(GroupId(3),)),)
    scenario = Scenario(
        name="one loss",
        num_groups=config.layout.num_groups,
        redundancy=config.spare.redundancy,
        microbatches_per_shard=config.spare.microbatches_per_shard,
        granularity=config.spare.granularity,
        num_steps=STEPS,
        costs=CostModel(compute_s=1.0, reduce_s=0.0, save_s=1e-6, restart_s=START_S),
        failures=FailureSpec(kind="trace", trace=losses) if losses else FailureSpec(),
        last_resort=config.data.access == "shared",
        repair_s=ABSENCE_S,
        save_interval_s=float("inf"),
    )
    return simulate(dataclasses.replace(scenario, **changes), seed=0).end_s


def test_the_time_of_the_run_is_that_of_its_steps() -> None:
    assert costs(configured())["run"][0] == pytest.approx(STEPS) == simulated_s(configured(), None)
    ramp = configured("spare.ramp_start=4", "spare.ramp_increment=4", "spare.ramp_steps=500")
    assert costs(ramp)["run"][0] == pytest.approx(STEPS - 250)
    assert costs(configured("train.max_minutes=10"))["run"][0] == 600.0


def test_evaluations_cost_what_they_cost_a_simulated_run() -> None:
    config = configured("eval.every_steps=100", "data.split=9,1")
    calm_s = simulated_s(config, None)
    timed = CostModel(compute_s=1.0, evaluate_s=FORWARD_SHARE, restart_s=START_S)
    simulated = simulated_s(config, None, costs=timed, evaluate_every=100) - calm_s
    found, basis = costs(config)["evaluations"]
    assert found == pytest.approx(simulated) == pytest.approx(15 / 3), basis
    assert "evaluations" not in costs(configured())
    ended = configured("eval.every_steps=100", "data.split=9,1", "train.max_minutes=10")
    assert costs(ended)["evaluations"][0] == pytest.approx(6 / 3), "600 of the steps"


@pytest.mark.parametrize(
    "overrides", [(), ("spare.redundancy=5",), ("data.access=shared",), ("spare.granularity=stack",)]
)
def test_a_lost_group_costs_what_it_costs_a_simulated_run(overrides: tuple[str, ...]) -> None:
    config = configured(*overrides)
    calm_s = simulated_s(config, None)
    simulated = mean(simulated_s(config, 500.0 + 0.7 * number) - calm_s for number in range(3))
    found, basis = costs(config)["lost_group"]
    assert found == pytest.approx(simulated, abs=3.0), basis  # that of a stack would be 300 s, of a microbatch 67 s
    assert found > 60.0


def test_a_group_that_never_comes_back_is_away_for_half_of_the_run_on_average() -> None:
    config = configured("spare.rejoins=0")
    calm_s = simulated_s(config, None)
    losses = [STEPS * (number + 0.5) / 8 for number in range(8)]
    simulated = mean(simulated_s(config, at_s, repair_s=None) - calm_s for at_s in losses)
    assert costs(config)["lost_group"][0] == pytest.approx(simulated, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "interval_s", "setting"),
    [
        (("checkpoint.interval_steps=120",), 120.0, "checkpoint.interval_steps"),
        (("checkpoint.interval_s=90.0", "checkpoint.interval_steps=120"), 90.0, "checkpoint.interval_s"),
        (("snapshot.every_steps=40", "checkpoint.interval_s=90.0"), 40.0, "snapshot.every_steps"),
        ((), STEPS, "no copy of the state before; checkpoint.interval_s"),
    ],
)
def test_a_wipe_out_costs_a_start_and_half_of_the_steps_since_the_last_copy(
    overrides: tuple[str, ...], interval_s: float, setting: str
) -> None:
    config = configured(*overrides)
    found, basis = costs(config)["wipe_out"]
    assert basis.endswith(f": {setting}")
    saves = {"policy": "checkpoint_only", "save_interval_s": interval_s if interval_s < STEPS else float("inf")}
    losses = [interval_s * (10 if interval_s < STEPS else 0) + interval_s * (number + 0.5) / 6 for number in range(6)]
    simulated = mean(simulated_s(config, at_s, **saves) for at_s in losses) - simulated_s(config, None)
    assert found == pytest.approx(simulated, rel=0.03, abs=2.0)


def test_without_another_host_a_lost_group_is_a_wipe_out() -> None:
    for overrides in (("spare.redundancy=1",), ("layout.num_groups=1", "spare.redundancy=1")):
        found = costs(configured(*overrides))
        assert found["lost_group"][0] == found["wipe_out"][0]
        assert found["lost_group"][1].startswith("a wipe-out: ")
    shared = costs(configured("spare.redundancy=1", "data.access=shared"))
    assert shared["lost_group"][0] < shared["wipe_out"][0]


@pytest.mark.parametrize(
    ("overrides", "dealt"),
    # 64 microbatches: the slow one of 8 groups takes 4 while others take 9; one of 2 machines has half of them
    [
        ((), 9 / 8),
        (("spare.deal_by_pace=false",), 2.0),
        (("cluster.num_nodes=2",), 1.375),
        (("train.steps=100",), 9 / 8),
    ],
)
def test_a_slow_machine_costs_what_its_steps_take_longer(overrides: tuple[str, ...], dealt: float) -> None:
    config = configured(*([] if "cluster.num_nodes=2" in overrides else ["cluster.num_nodes=8"]), *overrides)
    at_s, steps, slow_s = 0.0, 0.0, min(SLOW_S, float(config.train.steps))
    while at_s < slow_s:  # in small parts, so that it ends inside a step
        at_s += 0.02
        steps += 0.02 / (2.0 if steps < STEPS_TO_ACT else dealt)
    assert costs(config)["slow_machine"][0] == pytest.approx(slow_s - steps, abs=0.2)


def test_the_best_interval_follows_the_assumed_losses() -> None:
    found = [
        costs(configured("checkpoint.cadence=optimal", f"checkpoint.group_life_s={life_s}", "train.steps=9000"))[
            "wipe_out"
        ][0]
        for life_s in (1e4, 1e5)
    ]
    # sqrt(2 x 60 s x time to a wipe-out, 10 losses of one of 8 groups), by Young
    assert [2 * (seconds - START_S) for seconds in found] == pytest.approx([1225.0, 3873.0], rel=0.05)


def test_each_figure_says_whether_it_is_measured_and_names_settings_that_are_there() -> None:
    for overrides in ((), ("checkpoint.cadence=optimal",), ("spare.redundancy=1",)):
        for name, (seconds, basis) in costs(configured(*overrides)).items():
            assert seconds > 0
            assert re.search(r"\b(assumed|measured)\b", basis) or basis.startswith("a wipe-out: "), name
            named = re.findall(r"\b(?:train|spare|checkpoint|snapshot|metrics)\.[a-z_]+", basis)
            assert named
            assert set(named) <= set(valid_keys())


# ------------------------------------------------------------------------------------------------- measured, and shown


def show(*words: str, expected: int = 0) -> str:
    result = CliRunner().invoke(app, ["config", "show", "demo_cpu", "--set", "data.corpus=c", *words])
    assert result.exit_code == expected, result.output
    return result.output


def test_a_measured_run_gives_its_speed_and_its_start(tmp_path: Path) -> None:
    run_dir = write_journal(tmp_path / "run", measured_lines(30))
    config = configured()
    per_step_s = flops_per_token(config) * run_sizes(config).tokens_per_step / (FLOPS / STEP_S / 2) / 8
    found = costs(config, measured=run_dir)
    assert found["run"][0] == pytest.approx(STEPS * per_step_s)
    assert found["run"][1].startswith("measured: 1 TFLOP/s a rank, steps of 2 s")
    assert "measured: " in found["wipe_out"][1]
    shown = json.loads(show("--run", str(run_dir), "--json"))["costs"]
    assert shown["run"]["basis"] == found["run"][1]
    assert shown.keys() == found.keys()
    lines = show("--run", str(run_dir))
    assert re.search(r"\nrun +[0-9.e-]+ hours +measured: 1 TFLOP/s a rank", lines)
    assert [
        name for name in ("lost group", "slow machine", "wipe-out") if not re.search(rf"\n{name} +[\d.]+ s ", lines)
    ] == []


def test_a_run_without_a_measured_speed_is_refused_with_the_reason(tmp_path: Path) -> None:
    simulated = write_journal(tmp_path / "a", measured_lines(30, origin={**ORIGIN, "flops_per_step": 0.0}))
    unstarted = write_journal(tmp_path / "b", measured_lines(30)[:1])
    for run_dir in (simulated, unstarted):
        assert f"--run {run_dir}: it has no steps, was simulated, or its batch grew" in show(
            "--run", str(run_dir), expected=2
        )
    assert "holds no journal" in show("--run", str(tmp_path), expected=2)
