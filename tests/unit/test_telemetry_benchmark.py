"""What the benchmark of telemetry makes of steps whose cost is known."""

import numpy as np
import pytest

from benchmarks.telemetry import is_on, ratio_of


def steps(num_steps: int, cost: float) -> dict[int, float]:
    """Steps of a machine whose speed wanders by a quarter; those with telemetry take so much more."""
    noise = np.random.default_rng(0).normal(scale=0.02, size=num_steps)
    return {
        step: 0.5 * (1 + 0.25 * np.sin(step / 40)) * (1 + noise[step]) * (1 + cost * is_on(step))
        for step in range(1, num_steps)
    }


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.1])
def test_a_planted_cost_is_found_in_spite_of_a_drift(cost: float) -> None:
    found = ratio_of(steps(1600, cost))
    assert abs(found["ratio"] - (1 + cost)) < 1.5 * found["ratio_ci95"] < 0.005
    assert found["rounds"] == 196


def test_half_of_the_steps_are_with_it_and_both_halves_have_the_same_mean() -> None:
    on = [step for step in range(800) if is_on(step)]
    off = [step for step in range(800) if not is_on(step)]
    assert len(on) == len(off)
    assert sum(on) == sum(off)
