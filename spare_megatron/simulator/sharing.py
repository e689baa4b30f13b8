"""How long groups compute that fill pipelines and may share processors."""

from math import inf

import numpy as np
import numpy.typing as npt

from spare_megatron.core.placement import IntArray
from spare_megatron.core.stepplan import Work
from spare_megatron.simulator.costs import CostModel

FloatArray = npt.NDArray[np.float64]


def finish_times(loads: IntArray, num_microbatches: int, costs: CostModel) -> FloatArray:
    """When each group has computed its load, all beginning together.

    A load of k > 0 microbatches is a demand of (k + f) / (m + f) shards, f the pipeline fill. Where more than G groups
    have something left to do, G the groups at full speed, all of these go on at the same rate: G / their number
    (generalized processor sharing). Cost: O(n log n) in the number of groups.

    Args:
        loads: Microbatches of each group.
        num_microbatches: Microbatches of a shard (m).
        costs: For the pipeline fill and the sharing.

    Returns:
        In units of compute_s; 0 for a group without load.

    >>> alone, shared = (CostModel(compute_s=1.0, full_speed_groups=groups) for groups in (inf, 1.0))
    >>> finish_times(np.array([4, 6, 6]), 4, alone).tolist(), finish_times(np.array([4, 6, 6]), 4, shared).tolist()
    ([1.0, 1.5, 1.5], [3.0, 4.0, 4.0])
    """
    fill = costs.pipeline_fill
    demands = np.where(loads > 0, (loads + fill) / (num_microbatches + fill), 0.0)
    if costs.full_speed_groups == inf:
        return demands
    order = np.argsort(demands, kind="stable")
    ascending = demands[order]
    num_left = loads.size - np.arange(loads.size)
    finished = np.empty_like(demands)
    finished[order] = np.cumsum(np.diff(ascending, prepend=0.0) * np.maximum(1.0, num_left / costs.full_speed_groups))
    return finished


def stacks_of(work: Work, num_microbatches: int, costs: CostModel) -> float:
    """When the last group has computed its part of the work, in units of compute_s."""
    if costs.full_speed_groups == inf:
        makespan = work.makespan
        return (makespan + costs.pipeline_fill) / (num_microbatches + costs.pipeline_fill) if makespan else 0.0
    return float(finish_times(work.loads, num_microbatches, costs).max(initial=0.0))


def stretch(num_groups: int, costs: CostModel) -> float:
    """By how much this many groups that do the same at the same time slow each other down."""
    return max(1.0, num_groups / costs.full_speed_groups)
