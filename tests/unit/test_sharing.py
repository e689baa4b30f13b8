"""Groups that share processors: the times at which they are done, against small steps of time."""

from math import inf

import numpy as np
import pytest

from spare_megatron.stacking.placement import IntArray
from spare_megatron.stacking.plans import Work
from spare_megatron.tools.simulate.compute_fit import finish_times, stacks_of, stretch
from spare_megatron.tools.simulate.scenario import CostModel


def stepped(loads: IntArray, num_microbatches: int, costs: CostModel, tick: float = 1e-3) -> list[float]:
    """Every group that is not done gets the same rate, at most 1, in every tick."""
    fill = costs.pipeline_fill
    left = [(load + fill) / (num_microbatches + fill) if load else 0.0 for load in loads]
    done = [0.0] * len(left)
    now = 0.0
    while any(part > 0 for part in left):
        active = [index for index, part in enumerate(left) if part > 0]
        rate = min(1.0, costs.full_speed_groups / len(active))
        now += tick
        for index in active:
            left[index] -= rate * tick
            if left[index] <= 0:
                done[index] = now
    return done


@pytest.mark.parametrize("seed", range(12))
def test_finish_times_are_those_of_small_steps_of_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 9, size=int(rng.integers(1, 7)))
    groups = [inf, 0.5, 1.0, 1.4, 3.0][seed % 5]
    costs = CostModel(compute_s=1.0, pipeline_fill=float(rng.choice([0.0, 0.5, 3.0])), full_speed_groups=groups)
    assert finish_times(loads, 4, costs).tolist() == pytest.approx(stepped(loads, 4, costs), abs=0.02)


def test_the_last_group_to_finish_is_what_work_takes() -> None:
    work = Work(np.array([[0, 0, 0, 1], [1, 1, 1, 1]], dtype=np.int32))
    for groups in (inf, 2.0, 1.0):
        costs = CostModel(compute_s=1.0, pipeline_fill=1.0, full_speed_groups=groups)
        assert stacks_of(work, 4, costs) == pytest.approx(finish_times(work.loads, 4, costs).max())
    assert stacks_of(Work(np.full((2, 4), -1, dtype=np.int32)), 4, costs) == 0.0


def test_groups_slow_each_other_down_only_beyond_the_processors() -> None:
    costs = CostModel(compute_s=1.0, full_speed_groups=2.0)
    assert [stretch(n, costs) for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    assert stretch(1000, CostModel(compute_s=1.0)) == 1.0


def test_a_setting_in_which_no_group_computes_at_full_speed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"costs.full_speed_groups=0.0 has to be above 0"):
        CostModel(compute_s=1.0, full_speed_groups=0.0)
    with pytest.raises(ValueError, match=r"costs.rebuild_s=inf has to be 0 or more, and finite"):
        CostModel(compute_s=1.0, rebuild_s=inf)
