"""The simulator's virtual time against a model of hosts, links and failures in SimGrid, for the same losses."""

from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context

import pytest

from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.scenario import Scenario
from tests.oracle.scenarios import WAYS, jitter_factors, paper_scenario, random_scenario
from tests.oracle.simgrid_model import Run, run_in_simgrid

TIMEOUT_S = 100.0

pytestmark = pytest.mark.skipif(
    find_spec("simgrid") is None, reason="simgrid is not installed: docs/planner.md says how to build it"
)


def run_of(scenario: Scenario, seed: int) -> Run:
    """What SimGrid comes to, in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply_async(run_in_simgrid, (scenario, jitter_factors(scenario, seed))).get(timeout=TIMEOUT_S)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", WAYS)
def test_simgrid_comes_to_the_same_end(way: str, seed: int) -> None:
    scenario = random_scenario(seed, **WAYS[way])
    run, result = run_of(scenario, seed), simulate(scenario, seed)
    assert result.end_s == pytest.approx(run.end_s, abs=1e-6)
    assert (result.restarts, result.pauses, result.losses) == (run.restarts, run.pauses, run.losses)
    assert run.losses > 10
    assert run.restarts or run.pauses
    assert run.broken_reductions or way == "checkpoint_only"
    assert bool(run.joined) == ("repair_s" in WAYS[way])


@pytest.mark.parametrize("granularity", ["stack", "microbatch"])
def test_simgrid_comes_to_the_same_end_as_the_papers_run(granularity: str) -> None:
    scenario = replace(paper_scenario(seed=0, num_steps=60), granularity=granularity)
    run, result = run_of(scenario, 0), simulate(scenario, 0)
    assert result.end_s == pytest.approx(run.end_s, abs=1e-6)
    assert (result.restarts, result.losses) == (run.restarts, run.losses)
    assert run.losses > 50


def test_a_wrong_cost_is_seen() -> None:
    """The comparison would prove little if what a recovery costs did not show in it."""
    scenario = random_scenario(0)
    end_s = run_of(scenario, 0).end_s
    for name in ("compute_s", "reduce_s", "detect_s", "agree_s", "rebuild_s", "retry_s", "save_s", "restart_s"):
        wrong = replace(scenario.costs, **{name: getattr(scenario.costs, name) * 1.0001})
        assert abs(simulate(replace(scenario, costs=wrong), 0).end_s - end_s) > 1e-5, name
