"""Models compute times of groups that fill pipelines and may share processors, and fits them to a run."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import median

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.placement import IntArray
from spare_megatron.stacking.plans import Work
from spare_megatron.tools.simulate.measured import MeasuredRecovery, MeasuredStep
from spare_megatron.tools.simulate.scenario import CostModel

FloatArray = npt.NDArray[np.float64]


def finish_times(
    loads: IntArray, num_microbatches: int, costs: CostModel, fills: FloatArray | None = None
) -> FloatArray:
    """When each group has computed its load if all start together, in units of compute_s; 0 for a group without load. A
    load of k > 0 microbatches is a demand of (k + f) / (m + f) shards, f the pipeline fill; the first f is that of the
    group, if there are `fills`. While more than G groups (the groups at full speed) have work left, each of them runs
    at rate G / their number (generalized processor sharing). Cost: O(n log n) in the number of groups.

    >>> alone, shared = (CostModel(compute_s=1.0, full_speed_groups=groups) for groups in (inf, 1.0))
    >>> finish_times(np.array([4, 6, 6]), 4, alone).tolist(), finish_times(np.array([4, 6, 6]), 4, shared).tolist()
    ([1.0, 1.5, 1.5], [3.0, 4.0, 4.0])
    """
    fill = costs.pipeline_fill
    own = fill if fills is None else fills[: loads.size]
    demands = np.where(loads > 0, (loads + own) / (num_microbatches + fill), 0.0)
    if costs.full_speed_groups == inf:
        return demands
    order = np.argsort(demands, kind="stable")
    ascending = demands[order]
    num_left = loads.size - np.arange(loads.size)
    finished = np.empty_like(demands)
    finished[order] = np.cumsum(np.diff(ascending, prepend=0.0) * np.maximum(1.0, num_left / costs.full_speed_groups))
    return finished


def stacks_of(
    work: Work,
    num_microbatches: int,
    costs: CostModel,
    factors: FloatArray | None = None,
    fills: FloatArray | None = None,
) -> float:
    """When the last group has computed its part of the work, in units of compute_s. `factors`: times of slow groups and
    of smaller ones, which have `fills` of their own.
    """
    if factors is not None:
        finished = finish_times(work.loads, num_microbatches, costs, fills)
        return float((finished * factors[: finished.size]).max(initial=0.0))
    if costs.full_speed_groups == inf:
        makespan = work.makespan
        return (makespan + costs.pipeline_fill) / (num_microbatches + costs.pipeline_fill) if makespan else 0.0
    return float(finish_times(work.loads, num_microbatches, costs).max(initial=0.0))


def stretch(num_groups: int, costs: CostModel) -> float:
    """The factor by which this many groups slow each other down if all do the same at the same time."""
    return max(1.0, num_groups / costs.full_speed_groups)


_NUM_FILLS = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The time that groups of one load took beside the loads of the others."""

    what: str
    """Either "step" or "patch"."""
    loads: tuple[int, ...]
    """Microbatches of all groups that computed, ascending."""
    load: int
    """Microbatches of the groups that were timed."""
    median_s: float
    """Median time until the last of these groups was done."""
    count: int
    """Steps or patches behind the median."""
    fitted_s: float
    residual: float = 0.0
    """fitted_s / median_s - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFit:
    """The fitted compute times. `compute_s`: one group computes one shard, alone. `pipeline_fill`: as in the cost
    model: the part that other groups' work does not hide.
    """

    compute_s: float
    pipeline_fill: float
    states: tuple[State, ...]


def fit_compute(
    steps: Sequence[MeasuredStep],
    recoveries: Sequence[MeasuredRecovery],
    num_microbatches: int,
    *,
    full_speed_groups: float,
    most_fill: float,
) -> ComputeFit:
    """Minimizes the sum over states of sqrt(count) |log(median_s / fitted_s)| over compute_s and the pipeline fill.

    The error of a median falls with the square root of the count. For a given fill the best compute_s is a weighted
    median; the fill is searched on a grid from 0 to `most_fill`, the fill of a pipeline that no other work hides; the
    lower one on ties. `steps`, at least one, are without losses; `recoveries` give the patches of single losses.
    ValueError: no group took any time.
    """
    states = [state for state in _states(steps, recoveries) if state.median_s > 0]
    if not states:
        raise ValueError("its groups computed in no time, so nothing can be measured by it")
    found = []
    for fill in np.linspace(0.0, most_fill, _NUM_FILLS).tolist():
        costs = CostModel(compute_s=1.0, pipeline_fill=fill, full_speed_groups=full_speed_groups)
        found.append((*_fit(states, num_microbatches, costs), fill))
    _, compute_s, fitted_s, fill = min(found, key=lambda candidate: round(candidate[0], 9))
    fitted = tuple(
        replace(state, fitted_s=seconds, residual=seconds / state.median_s - 1)
        for state, seconds in zip(states, fitted_s.tolist(), strict=True)
    )
    return ComputeFit(compute_s=compute_s, pipeline_fill=fill, states=fitted)


def _fit(states: Sequence[State], num_microbatches: int, costs: CostModel) -> tuple[float, float, FloatArray]:
    """Misfit, compute_s and the seconds of each state for these costs, whose own compute_s is ignored."""
    stacks = np.array([_stacks(state, num_microbatches, costs) for state in states])
    ratios = np.log([state.median_s for state in states]) - np.log(stacks)
    weights = np.sqrt([state.count for state in states])
    middle = _weighted_median(ratios, weights)
    return float((weights * np.abs(ratios - middle)).sum()), exp(middle), stacks * exp(middle)


def _stacks(state: State, num_microbatches: int, costs: CostModel) -> float:
    finished = finish_times(np.array(state.loads), num_microbatches, costs)
    return float(finished[state.loads.index(state.load)])


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    """The lowest value at which half of the weight is reached."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _states(steps: Sequence[MeasuredStep], recoveries: Sequence[MeasuredRecovery]) -> Iterator[State]:
    found: dict[tuple[str, tuple[int, ...], int], list[float]] = defaultdict(list)
    measured = [("step", step.loads, step.compute_s) for step in steps]
    measured += [("patch", times.loads, times.patch_s) for times in recoveries if len(times.recovery.lost) == 1]
    for what, loads, seconds in measured:
        computing = {group: load for group, load in loads.items() if load}
        for load in sorted(set(computing.values())):
            last_s = max(seconds[group] for group, own in computing.items() if own == load)
            found[what, tuple(sorted(computing.values())), load].append(last_s)
    for (what, loads_of_all, load), samples in sorted(found.items()):
        middle_s = median(samples)
        yield State(what=what, loads=loads_of_all, load=load, median_s=middle_s, count=len(samples), fitted_s=middle_s)
