"""Why groups are lost: how often each cause is drawn, what it takes to repair, and where it is reported."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import LossRecord
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureKind, FailureSpec, LossCause, make_process
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.scenario_presets import load_scenario
from spare_megatron.tools.simulate.sweep import Case, figures_of, run_case
from tests.unit.journal_in_memory import check_journal

GPU, SOFTWARE = LossCause(name="gpu", weight=3.0, repair_s=900.0), LossCause(name="software", weight=1.0, repair_s=5.0)
MIX = (GPU, SOFTWARE)


def scenario(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "name": "mixed",
        "num_groups": 13,
        "redundancy": 4,
        "microbatches_per_shard": 4,
        "num_steps": 150,
        "costs": CostModel(compute_s=60.0, reduce_s=5.0, restart_s=300.0),
        "failures": FailureSpec(mean_s=200.0, mix=MIX),
    }
    return Scenario(**{**settings, **changes})


def busy(*mix: LossCause) -> Scenario:
    costs, failures = CostModel(compute_s=1.0), FailureSpec(mean_s=40.0, mix=mix)
    return scenario(num_groups=40, redundancy=10, num_steps=8000, costs=costs, failures=failures)


def test_causes_are_drawn_in_proportion_to_their_weights() -> None:
    spec = load_scenario("llama3_16k").failures
    process = make_process(replace(spec, kind="system", nodes_per_group=1), 16, np.random.default_rng(0))
    drawn = Counter(process.strike(np.ones(16, dtype=np.bool_)).cause for _ in range(20_000))
    assert drawn.keys() == {cause.name for cause in spec.mix}
    expected = np.array([cause.weight for cause in spec.mix]) * 20_000 / 419
    assert chisquare([drawn[cause.name] for cause in spec.mix], expected).pvalue > 0.01


@pytest.mark.parametrize("kind", ["system", "group", "node", "domain"])
def test_every_kind_draws_causes_and_a_mix_changes_no_time_and_no_victim(kind: FailureKind) -> None:
    spec = FailureSpec(kind=kind, mean_s=100.0, groups_per_domain=4 if kind == "domain" else 1)
    all_groups = np.ones(40, dtype=np.bool_)
    plain, mixed = (make_process(s, 40, np.random.default_rng(5)) for s in (spec, replace(spec, mix=MIX)))
    for _ in range(40):
        one, other = plain.strike(all_groups), mixed.strike(all_groups)
        assert (one.at_s, one.groups) == (other.at_s, other.groups)
        assert (one.cause, one.repair_s) == ("simulated", None)
        assert (other.cause, other.repair_s) in {("gpu", 900.0), ("software", 5.0)}


def test_a_cause_has_a_repair_time_of_its_own() -> None:
    """By Little's law the groups down are the sum over causes of their rate times their repair time."""
    result = simulate(busy(LossCause(name="gpu", weight=3.0, repair_s=200.0), SOFTWARE), seed=0)
    by_cause = result.losses_by_cause
    assert by_cause["gpu"] / by_cause["software"] == pytest.approx(3.0, rel=0.2)
    half_a_step_s = 0.5 * result.time_to_train_ratio  # until it is admitted
    down_s = by_cause["gpu"] * (200.0 + half_a_step_s) + by_cause["software"] * (5.0 + half_a_step_s)
    assert result.mean_down == pytest.approx(down_s / result.end_s, rel=0.04)
    assert (result.restarts, result.losses > 200) == (0, True)


def test_a_cause_without_a_repair_time_takes_that_of_the_scenario() -> None:
    spec = FailureSpec(mean_s=100.0, mix=(GPU, LossCause(name="other", weight=1.0)))
    assert spec.mean_repair_s(100.0) == pytest.approx((3 * 900 + 100) / 4)
    assert spec.mean_repair_s(None) is None
    assert FailureSpec(mean_s=100.0, mix=MIX).mean_repair_s(None) == pytest.approx((3 * 900 + 5) / 4)
    never = scenario(failures=FailureSpec(mean_s=300.0, mix=(LossCause(name="other", weight=1.0),)))
    repaired = simulate(replace(never, repair_s=60.0), 0)
    assert 0 < repaired.mean_down < simulate(never, 0).mean_down / 2


def test_repair_times_of_causes_may_be_random_with_their_means() -> None:
    always = busy(LossCause(name="gpu", weight=1.0, repair_s=200.0))
    fixed, drawn = (simulate(replace(always, repair_is_random=is_random), seed=0) for is_random in (False, True))
    assert drawn != fixed
    assert drawn.mean_down == pytest.approx(fixed.mean_down, rel=0.15)


def test_the_cadence_knows_of_the_repairs_of_the_causes() -> None:
    same = scenario(failures=FailureSpec(mean_s=200.0), repair_s=(3 * 900 + 5) / 4)
    assert scenario().time_to_wipe_out_s() == same.time_to_wipe_out_s()


def test_the_journal_and_the_figures_show_the_causes() -> None:
    lines: list[Line] = []
    result = simulate(scenario(), 1, journal=lines.append)
    reported = Counter(line.record.cause for line in lines if isinstance(line.record, LossRecord))
    assert reported.keys() == {"gpu", "software"}
    assert sum(result.losses_by_cause.values()) == result.losses
    # A loss after the last reduction is never found; all others are.
    assert 0 <= result.losses - reported.total() <= 2
    assert all(reported[name] <= count for name, count in result.losses_by_cause.items())
    assert check_journal(Journal(lines=tuple(lines))).verdict == "valid"
    cases = [run_case(Case(scenario=scenario(), seed=seed), lambda: 0.0) for seed in range(3)]
    figures = figures_of(cases)
    assert sum(figures.losses_by_cause.values()) == pytest.approx(figures.losses)


def test_a_preset_is_mixed_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "num_groups = 4\nredundancy = 2\n[costs]\ncompute_s = 1\n[failures]\nmean_s = 100\n"
        "[failures.mix]\ngpu = { weight = 2, repair_s = 60 }\n[failures.mix.software]\nweight = 1\n"
    )
    found = load_scenario(path, ["failures.mix.software.repair_s=5", "failures.mix.power.weight=0.5"]).failures.mix
    assert found == (
        LossCause(name="gpu", weight=2.0, repair_s=60.0),
        LossCause(name="software", weight=1.0, repair_s=5.0),
        LossCause(name="power", weight=0.5),
    )
