"""The benchmarks beside the paper: what they assume; and the presets of the paper give the results they always gave."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import psutil
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from benchmarks.paper_assumptions import (
    ASSUMPTIONS,
    DEFAULT,
    READING,
    Assumption,
    FreshClocks,
    Renewals,
    coverage,
    simulate_assumed,
)
from benchmarks.paper_table import ROWS, SIZES, scenarios_of, sweep_rows
from spare_megatron.stacking.order import Granularity
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, make_process
from spare_megatron.tools.simulate.scenario import SimulatedPolicy
from spare_megatron.tools.simulate.scenario_presets import PUBLISHED, load_scenario
from spare_megatron.tools.simulate.sweep import VARIANTS, Variant, variant_name

ROOT = Path(__file__).parents[2]
EVEN = FailureSpec(mean_s=100.0, shape=1e6)
"""Losses every 100 s to within a thousandth, so that times can be computed by hand."""


def losses_of(assumption: Assumption, *, restart: tuple[float, float]) -> list[float]:
    """Times of the first two losses of 4 groups, of a restart after them, and of the loss after it."""
    process, is_up = Renewals(EVEN, 4, assumption, np.random.default_rng(0)), np.ones(4, dtype=np.bool_)
    times_s = []
    for _ in range(2):
        loss = process.strike(is_up)
        is_up[list(loss.groups)] = False
        times_s.append(loss.at_s)
    process.restarted(*restart, ())
    return [*times_s, process.next_s()]


@pytest.mark.parametrize(
    ("assumption", "expected"),
    [
        # Rates 1, 3/4, then 1/2 up to the restart at 300 s, which uses up 33.3 of the next 100 s.
        (DEFAULT, [100.0, 233.3, 1066.7]),
        (replace(DEFAULT, losses_in_restarts=True), [100.0, 233.3, 366.7]),
        (replace(DEFAULT, rate_falls=False), [100.0, 200.0, 1000.0]),
    ],
)
def test_losses_come_when_the_assumption_says(assumption: Assumption, expected: list[float]) -> None:
    assert losses_of(assumption, restart=(300.0, 1000.0)) == pytest.approx(expected, rel=1e-3)


def test_the_default_loses_groups_as_the_product_does() -> None:
    is_up, ours, theirs = np.ones(4, dtype=np.bool_), [], make_process(EVEN, 4, np.random.default_rng(0))
    for _ in range(2):
        loss = theirs.strike(is_up)
        is_up[list(loss.groups)] = False
        ours.append(loss.at_s)
    theirs.restarted(300.0, 1000.0, ())
    assert losses_of(DEFAULT, restart=(300.0, 1000.0)) == pytest.approx([*ours, theirs.next_s()], rel=1e-3)


def test_fresh_clocks_start_over_at_a_restart() -> None:
    process, is_up = FreshClocks(replace(EVEN, kind="group"), 4, np.random.default_rng(0)), np.ones(4, dtype=np.bool_)
    assert process.strike(is_up).at_s == pytest.approx(100.0, rel=1e-3)
    process.restarted(150.0, 1000.0, ())
    assert [process.strike(is_up).at_s for _ in range(4)] == pytest.approx([1100.0] * 4, rel=1e-3)


def test_overlapping_hosts_end_a_run_that_disjoint_sets_survive() -> None:
    scenario = load_scenario("paper_n200", {"policy": "replication", "redundancy": 3})
    overlapping, disjoint = coverage(scenario, READING), coverage(scenario, DEFAULT)
    fatal = [0, 0]
    rng = np.random.default_rng(0)
    for _ in range(400):
        is_up = np.ones(200, dtype=np.bool_)
        is_up[rng.choice(200, 36, replace=False)] = False
        fatal[0] += not overlapping(is_up)
        fatal[1] += not disjoint(is_up)
    # P(some of n shards has all 3 hosts among 36 of 200 dead) is about 1 - exp(-n p), p = C(197, 33) / C(200, 36).
    p = 36 * 35 * 34 / (200 * 199 * 198)
    assert fatal[0] / 400 == pytest.approx(1 - np.exp(-200 * p), abs=0.08)
    assert fatal[1] / 400 == pytest.approx(1 - np.exp(-66 * p), abs=0.08)


def expected_largest(n: int) -> float:
    """Mean of the largest of n standard normal numbers."""
    found: float = quad(lambda x: x * n * norm.pdf(x) * norm.cdf(x) ** (n - 1), -10, 10)[0]
    return found


@pytest.mark.parametrize(("jitter", "shards"), [("group", 1), ("shard", 3)])
def test_a_step_takes_as_long_as_its_slowest_group(jitter: str, shards: int) -> None:
    point = next(p for p in PUBLISHED if (p.policy, p.num_groups) == ("replication", 200))
    never = replace(DEFAULT, jitter=jitter, settings=lambda _: {"failures.mean_s": inf, "save_interval_s": inf})
    result = simulate_assumed(point, never, 2000, 0)
    slowest = 1 + 0.05 / shards**0.5 * expected_largest(200)
    assert result.end_s / 2000 == pytest.approx(3 * 64.0 * slowest + 2.0, rel=2e-3)
    assert result.failure_free_s == 2000 * (64.0 + 2.0)


def test_a_loss_costs_replication_a_shard_if_that_is_assumed() -> None:
    point = next(p for p in PUBLISHED if p.policy == "replication")
    costly = simulate_assumed(point, replace(DEFAULT, loss_costs_shard=True), 200, 0)
    assert costly.losses > 10
    assert costly.terms["patch"] > 0
    assert simulate_assumed(point, DEFAULT, 200, 0).terms["patch"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "num_steps"), [("replication", 1000), ("spare", 500)])
def test_the_default_assumption_is_the_simulation_of_the_product(policy: str, num_steps: int) -> None:
    """The two draw losses in another order, so that only means agree: to within 0.22 and 0.17 of about 2.5."""
    point = next(p for p in PUBLISHED if (p.policy, p.num_groups) == (policy, 200))
    overrides = {"policy": policy, "redundancy": point.redundancy, "num_steps": num_steps}
    scenario = load_scenario("paper_n200", overrides)
    ours = [simulate_assumed(point, DEFAULT, num_steps, seed).time_to_train_ratio for seed in range(8)]
    theirs = [simulate(scenario, seed).time_to_train_ratio for seed in range(8)]
    spread = np.hypot(np.std(ours, ddof=1), np.std(theirs, ddof=1)) / 8**0.5
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * spread < 0.3


def test_every_assumption_is_named_once_and_fits_every_point_of_the_paper() -> None:
    assert len({assumption.name for assumption in ASSUMPTIONS}) == len(ASSUMPTIONS)
    for assumption in ASSUMPTIONS:
        for point in PUBLISHED:
            assert simulate_assumed(point, assumption, 2, 0).time_to_train_ratio > 0


def test_the_table_has_the_papers_points_at_the_papers_redundancy() -> None:
    for row in ROWS:
        if row.published_policy is not None:
            own = [(s.num_groups, s.policy, s.redundancy) for n in SIZES for s in scenarios_of(row, n, 10)]
            assert own == [(p.num_groups, p.policy, p.redundancy) for p in PUBLISHED if p.policy == own[0][1]]
    swept = [scenarios_of(row, 600, 10) for row in sweep_rows((2, 5))]
    assert [(s.redundancy, s.granularity) for (s,) in swept] == [(2, "stack"), (5, "stack")]


def is_running(process: psutil.Process) -> bool:
    """Whether it still runs. It may be a zombie without a parent that reaps it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def table_command(*options: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / "paper_table.py"), *options]


@pytest.mark.slow
def test_a_table_that_is_interrupted_leaves_no_process_and_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = table_command("--seeds", "1000", "--steps", "20", "--jobs", "2", "--out", str(out))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        deadline_s = time.monotonic() + 200
        while not (out.exists() and out.read_text().count("\n") >= 2):
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        workers = psutil.Process(child.pid).children(recursive=True)
        os.kill(child.pid, signal.SIGTERM)
        _, output = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"interrupted; goes on from {out}" in output
    assert "Traceback" not in output
    assert len(workers) >= 2
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline_s, [worker for worker in workers if is_running(worker)]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_sweep_prints_ours_beside_the_papers_as_json() -> None:
    command = table_command("--sweep-redundancy", "9", "--seeds", "1", "--steps", "5", "--jobs", "1", "--json")
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout)
    assert set(answer["ratio"]) == {"200", "600", "1000"}
    assert [(row["num_groups"], row["redundancy"]) for row in answer["rows"]] == [(200, 9), (600, 9), (1000, 9)]
    assert answer["kind"] == "simulated"


PRESETS = ("paper_n200", "paper_n600", "paper_n1000")
DIGESTS = {
    "checkpoint-only": "a80f271c80281efa3f2b41d76c17ea1dab0dd4d8c000e00084de87ea17109da7",
    "replication": "e6b0f2f08839f416ab46b105601614da2db02e027cfc5e020e10b58024aaa526",
    "spare, stack": "e07d608719d69b5daee588da4d8c77183922bd4aaa9d9e048a230889485b8aa2",
    "spare, microbatch": "50d9a68196e72b7677f246de8d9bc583b37943ab95ac8c127af642dc72775875",
}


def digest_of(policy: SimulatedPolicy, granularity: Granularity) -> str:
    """SHA-256 of times, counts and terms of 150 steps of every preset, lost groups gone for good or for 10 minutes."""
    digest = hashlib.sha256()
    for preset in PRESETS:
        base = load_scenario(preset, {"num_steps": 150, "costs.join_s": 30.0})
        for repair_s in (None, 600.0):
            scenario = replace(base, policy=policy, granularity=granularity, repair_s=repair_s)
            result = simulate(scenario, seed=3)
            assert result.losses > 10
            later = ("pause", "evaluate")
            terms = [spent_s for cause, spent_s in result.terms.items() if cause not in later or spent_s]
            times = [result.end_s, result.failure_free_s, result.mean_down, *terms]
            counts = [result.restarts, result.losses, result.saves, result.max_down]
            digest.update(f"{[time_s.hex() for time_s in times]} {counts}".encode())
    return digest.hexdigest()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant_name(*variant))
def test_results_of_the_paper_presets_do_not_change(variant: Variant) -> None:
    assert digest_of(*variant) == DIGESTS[variant_name(*variant)]
