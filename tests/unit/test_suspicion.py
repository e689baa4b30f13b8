"""Which microbatches are suspect by their losses, and that ordinary ones are not."""

import math
from random import Random

import pytest

from spare_megatron.core.audits.suspects import LEAST_STEPS, WINDOW_STEPS, LossWatch
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch, Numbered


def losses(*values: float) -> dict[Numbered, float]:
    return {Numbered(Microbatch(ShardId(0), index), index): value for index, value in enumerate(values)}


def watched(num_steps: int, seed: int = 1) -> LossWatch:
    random, watch = Random(seed), LossWatch()
    for step in range(num_steps):
        assert watch.on_losses(step, losses(*(random.gauss(3.0, 0.1) for _ in range(4)))) == []
    return watch


def found(watch: LossWatch, step: int, *values: float) -> list[int]:
    return [suspect.microbatch.number for suspect in watch.on_losses(step, losses(*values))]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_suspect_from_the_first_step_on(value: float) -> None:
    assert found(LossWatch(), 0, 3.0, value) == [1]


@pytest.mark.parametrize("value", [5.0, 1.0, -3.0])
def test_a_loss_far_from_those_before_is_suspect_once_there_are_some(value: float) -> None:
    assert found(watched(LEAST_STEPS), LEAST_STEPS, 3.0, value, 3.1) == [1]
    assert found(watched(LEAST_STEPS - 1), LEAST_STEPS - 1, 3.0, value, 3.1) == []


def test_what_is_suspect_is_not_what_others_are_compared_with() -> None:
    watch = watched(LEAST_STEPS)
    for step in range(LEAST_STEPS, LEAST_STEPS + 3 * WINDOW_STEPS):
        assert found(watch, step, 3.0, 9.0, 3.1) == [1]


def test_the_losses_of_an_earlier_attempt_of_a_step_are_replaced() -> None:
    watch = watched(LEAST_STEPS)
    assert [found(watch, LEAST_STEPS, 3.0, 9.0) for _ in range(4)] == [[1]] * 4


def test_losses_that_are_all_alike_make_a_small_change_no_suspect() -> None:
    watch = LossWatch()
    for step in range(LEAST_STEPS):
        assert found(watch, step, 3.0, 3.0) == []
    assert found(watch, LEAST_STEPS, 3.3, 3.4) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_a_training_that_goes_on_as_usual_has_no_suspects(seed: int) -> None:
    """It falls from 11 to 3 in the first 300 steps and scatters by 5%; then it scatters alone."""
    random, watch = Random(seed), LossWatch()
    for step in range(1500):
        middle = 3.0 + 8.0 * math.exp(-step / 80.0)
        assert found(watch, step, *(random.gauss(middle, 0.05 * middle) for _ in range(8))) == []
