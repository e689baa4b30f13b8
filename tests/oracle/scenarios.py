"""Runs with many losses, for the simulator and for the models of it in other engines."""

from dataclasses import replace
from typing import Any

import numpy as np

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.scenario_presets import load_scenario

WAYS: dict[str, dict[str, Any]] = {
    "checkpoint_only": {"policy": "checkpoint_only", "save_interval_s": 300.0, "num_steps": 40},
    "stack": {},
    "microbatch": {"granularity": "microbatch"},
    "stack_rejoin": {"repair_s": 400.0},
    "microbatch_rejoin": {"granularity": "microbatch", "repair_s": 250.0},
}
"""Ways to train through losses: what they change in a random scenario."""


def random_scenario(seed: int, **changes: Any) -> Scenario:
    """13 groups, one of which is lost every three steps or so."""
    costs = CostModel(
        compute_s=64.0,
        reduce_s=10.0,
        jitter=0.05,
        detect_s=12.5,
        agree_s=1.5,
        rebuild_s=75.0,
        retry_s=3.0,
        save_s=15.0,
        restart_s=700.0,
        join_s=5.0,
        state_transfer_s=20.0,
    )
    settings: dict[str, Any] = {
        "name": "random",
        "num_groups": 13,
        "redundancy": 4,
        "microbatches_per_shard": 4,
        "num_steps": 150,
        "granularity": "stack",
        "costs": costs,
        "failures": FailureSpec(kind="trace", trace=random_losses(seed, 13, 400, scale_s=150.0)),
        "save_interval_s": 900.0,
    }
    return Scenario(**{**settings, **changes})


def paper_scenario(seed: int, num_steps: int) -> Scenario:
    """The first steps of the paper's run with 200 groups, with losses six times as often, known beforehand."""
    paper = load_scenario("paper_n200", {"num_steps": num_steps})
    losses = random_losses(seed, paper.num_groups, 60 * num_steps, scale_s=50.0)
    return replace(paper, failures=FailureSpec(kind="trace", trace=losses))


def random_losses(seed: int, num_groups: int, num_losses: int, *, scale_s: float) -> tuple[Loss, ...]:
    """Losses of single groups in bursts: Weibull times of shape 0.78."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(scale_s * rng.weibull(0.78, num_losses))
    groups = rng.integers(0, num_groups, num_losses)
    return tuple(Loss(at_s=float(t), groups=(GroupId(int(g)),)) for t, g in zip(at_s, groups, strict=True))


def jitter_factors(scenario: Scenario, seed: int) -> list[float]:
    """What the compute of each step is multiplied by in the simulation of this seed."""
    noise = np.random.default_rng([seed, 0]).standard_normal(scenario.num_steps)
    return [float(factor) for factor in 1 + scenario.costs.jitter * noise]
