"""What is let into the sum: norms against the median of the last steps, computed once more by NumPy."""

import math

import numpy as np
import pytest

from spare_megatron.core.log.gradient_guard import LEAST_STEPS, WINDOW_STEPS, GradientFinding, GradientGuard

FACTOR = 10.0


def judged(guard: GradientGuard, step: int, norm: float, num_microbatches: int) -> GradientFinding:
    """The finding by the norm, which is also the device's: whether the norm exceeds the limit."""
    limit = guard.limit(step, num_microbatches)
    finding = guard.on_norm(step, norm, num_microbatches)
    assert (finding is GradientFinding.SOUND) == (norm <= limit)
    return finding


def guard_after(norms: list[float]) -> GradientGuard:
    guard = GradientGuard(FACTOR)
    for step, norm in enumerate(norms):
        assert judged(guard, step, norm, 1) is GradientFinding.SOUND
    return guard


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_found_from_the_first_step_on_whatever_the_factor(norm: float) -> None:
    for factor in (0.0, FACTOR):
        assert judged(GradientGuard(factor), 0, norm, 4) is GradientFinding.NOT_FINITE


@pytest.mark.parametrize("seed", range(20))
def test_a_norm_is_outlying_above_the_factor_times_the_median_of_the_last_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    norms = [float(norm) for norm in random.lognormal(sigma=0.5, size=random.integers(LEAST_STEPS, 80))]
    limit = FACTOR * float(np.median(norms[-WINDOW_STEPS:]))
    step = len(norms)
    assert judged(guard_after(norms), step, limit * 0.999, 1) is GradientFinding.SOUND
    assert judged(guard_after(norms), step, limit * 1.001, 1) is GradientFinding.OUTLYING


def test_nothing_is_outlying_before_there_are_enough_steps() -> None:
    guard = guard_after([1.0] * (LEAST_STEPS - 1))
    assert judged(guard, LEAST_STEPS - 1, 1e30, 1) is GradientFinding.SOUND
    assert judged(guard_after([1.0] * LEAST_STEPS), LEAST_STEPS, 1e30, 1) is GradientFinding.OUTLYING


def test_the_limit_is_finite_however_large_the_norms_are() -> None:
    guard = guard_after([1e308] * LEAST_STEPS)
    assert judged(guard, LEAST_STEPS, math.inf, 1) is GradientFinding.NOT_FINITE
    assert judged(guard, LEAST_STEPS, 1.7e308, 1) is GradientFinding.SOUND


def test_a_factor_of_zero_judges_no_sizes() -> None:
    guard = GradientGuard(0.0)
    assert {judged(guard, step, 10.0**step, 1) for step in range(30)} == {GradientFinding.SOUND}


def test_what_was_found_outlying_does_not_move_the_median() -> None:
    guard = guard_after([1.0] * LEAST_STEPS)
    for step in range(LEAST_STEPS, 60):
        assert judged(guard, step, 20.0, 1) is GradientFinding.OUTLYING
    assert judged(guard, 60, 1.0, 1) is GradientFinding.SOUND


def test_a_second_attempt_of_a_step_is_held_against_other_steps_and_takes_the_place_of_the_first() -> None:
    guard = GradientGuard(FACTOR)
    for step in range(LEAST_STEPS - 1):
        judged(guard, step, 1.0, 1)
    for _ in range(5):
        assert judged(guard, LEAST_STEPS - 1, 100.0, 1) is GradientFinding.SOUND, "the median of one step less"
    for step in range(LEAST_STEPS, 40):
        assert judged(guard, step, 2.0, 1) is GradientFinding.SOUND
    assert judged(guard, 40, 20.1, 1) is GradientFinding.OUTLYING


def test_norms_are_compared_per_microbatch_and_those_of_nothing_not_at_all() -> None:
    guard = GradientGuard(FACTOR)
    for step in range(LEAST_STEPS):
        judged(guard, step, 4.0, 4)
    for step in range(LEAST_STEPS, 100):
        assert judged(guard, step, 0.0, 0) is GradientFinding.SOUND
    assert judged(guard, 100, 79.0, 8) is GradientFinding.SOUND
    assert judged(guard, 101, 81.0, 8) is GradientFinding.OUTLYING


def test_gradients_of_zero_have_no_outliers() -> None:
    assert judged(guard_after([0.0] * LEAST_STEPS), LEAST_STEPS, 1.0, 1) is GradientFinding.SOUND


def test_the_steps_after_a_restart_push_out_the_oldest() -> None:
    guard = guard_after([1.0] * 40)
    for step in range(20, 20 + WINDOW_STEPS):
        assert judged(guard, step, 5.0, 1) is GradientFinding.SOUND
    assert judged(guard, 60, 49.0, 1) is GradientFinding.SOUND


@pytest.mark.parametrize(
    ("finding", "cure"),
    [(GradientFinding.NOT_FINITE, "learning_rate"), (GradientFinding.OUTLYING, "gradient_outlier_factor=10 ")],
)
def test_two_groups_that_find_the_same_say_the_same_and_what_to_do_about_it(
    finding: GradientFinding, cure: str
) -> None:
    texts = []
    for norm in (1.0, 2.0):
        guard = guard_after([norm] * LEAST_STEPS)
        judged(guard, 1234567, norm * 1e9, 1)
        texts.append(str(guard.error(finding, 1234567)).splitlines())
    assert texts[0][-1] == texts[1][-1]
    assert texts[0][0] != texts[1][0]
    assert "norm per microbatch in a bucket of this rank 1e+09, median before 1" in texts[0][0]
    assert "step 1234567" in texts[0][-1]
    assert cure in texts[0][-1]
    assert len(texts[0][-1]) <= 200, "a fence holds no more"
