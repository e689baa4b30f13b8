"""Fits the simulator's cost model to the journal of a real run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from math import inf
from statistics import fmean, median

import numpy as np

from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal.files import Journal
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.tools.simulate import measured
from spare_megatron.tools.simulate.compute_fit import ComputeFit, FloatArray, finish_times, fit_compute, stretch
from spare_megatron.tools.simulate.scenario import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Mean seconds beyond the typical ones: medians leave out single slow steps and recoveries, wall time has them."""

    step_s: float = 0.0
    """Of a step without a loss, from the end of the step before."""
    warm_up_s: float = 0.0
    """The same for a warm-up step after groups came back, beyond the time to admit them."""
    recovery_s: float = 0.0
    """Of a recovery from a single loss in which the step was reduced again."""


def scatter_of(
    committed: Sequence[measured.MeasuredStep],
    recoveries: Sequence[measured.MeasuredRecovery],
    step_s: Callable[[measured.MeasuredStep], float],
    recovery_s: Callable[[measured.MeasuredRecovery], float],
) -> Scatter:
    """The scatter of a run, given the typical time of a step without a loss (admission included) and of a recovery."""
    beyond_s: dict[measured.Disturbance, list[float]] = defaultdict(list)
    for before, after in pairwise(committed):
        beyond_s[after.disturbance].append(after.ended_at_s - before.ended_at_s - step_s(after))
    retried = [
        times.recovery.total_s - recovery_s(times)
        for times in recoveries
        if times.is_retried and len(times.recovery.lost) == 1
    ]
    return Scatter(step_s=_mean(beyond_s[""]), warm_up_s=_mean(beyond_s["join"]), recovery_s=_mean(retried))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


_LEAST_RECOVERIES, _LARGEST_MISFIT = 3, 0.5
"""A rebuild time needs at least this many recoveries, and has to leave less than this share of the misfit."""

_DISTURBANCES: dict[measured.Disturbance, str] = {
    "start": f"are the first {measured.WARM_UP_STEPS} of the run",
    "join": f"are the first {measured.WARM_UP_STEPS} after groups came back",
    "loss": "had a loss or a second attempt",
    "fault": "had a fault that cost no group",
}

_SIGMA_OF_MAD = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The costs of a run, by the names of `CostModel`; None where the run has nothing to measure a cost by."""

    name: str
    num_groups: int
    num_steps: int
    """Steps without a loss, after the warm-up of the run and of groups that came back."""
    num_recoveries: int
    num_joins: int
    """Admissions of groups that nothing else disturbed."""
    compute_s: float
    full_speed_groups: float
    """From the processors of the machine; the other costs are fitted."""
    pipeline_fill: float
    jitter: float
    reduce_s: float
    update_s: float
    detect_s: float | None
    agree_s: float | None
    rebuild_s: float | None
    retry_s: float | None
    join_s: float | None
    fit: ComputeFit
    scatter: Scatter
    """Mean excess of the run's times over these costs."""
    unmeasured: tuple[str, ...]
    """Sentences on what the run could not measure."""

    @property
    def costs(self) -> dict[str, float]:
        """The measured costs by their names in the cost model."""
        names = {field.name for field in fields(CostModel)}
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        return {name: value for name, value in found.items() if value is not None}


def calibrate(journal: Journal) -> Calibration:
    """Fits the costs of a run; ValueError without a run record or a step without a loss after the warm-up."""
    runs = journal.of(RunRecord)
    if not runs:
        raise ValueError("its journal has no run record, so nothing can be measured by it")
    measured.refuse_unlike(runs[0])
    committed = measured.read_steps(journal)
    steps = [step for step in committed if step.is_clean]
    if not steps:
        raise ValueError(_nothing_to_measure(committed))
    run, recoveries, joins = runs[0], measured.read_recoveries(journal), measured.read_joins(journal, committed)
    groups = run.num_processors / run.ranks_per_group if run.num_processors else inf
    fit = fit_compute(
        steps, recoveries, run.microbatches_per_shard, full_speed_groups=groups, most_fill=run.pipeline_fill
    )
    speed = CostModel(compute_s=fit.compute_s, pipeline_fill=fit.pipeline_fill, full_speed_groups=groups)
    reduce_s = median(step.reduce_s / stretch(len(step.loads), speed) for step in steps)
    update_s = median(step.update_s / stretch(len(step.loads), speed) for step in steps)
    masked, unmeasured = _fit_recoveries(recoveries, reduce_s, speed)
    join_s = median(join.pause_s for join in joins) if joins else None
    known = {name: seconds for name, seconds in masked.items() if seconds is not None}
    costs = replace(speed, reduce_s=reduce_s, update_s=update_s, join_s=join_s or 0.0, **known)
    return Calibration(
        name=run.name,
        num_groups=run.num_groups,
        num_steps=len(steps),
        num_recoveries=len(recoveries),
        num_joins=len(joins),
        compute_s=fit.compute_s,
        full_speed_groups=groups,
        pipeline_fill=fit.pipeline_fill,
        jitter=_spread(steps, fit),
        reduce_s=reduce_s,
        update_s=update_s,
        **masked,
        join_s=join_s,
        fit=fit,
        scatter=scatter_of(
            committed,
            recoveries,
            partial(_typical_step_s, costs, run.microbatches_per_shard, {join.step for join in joins}),
            partial(_typical_recovery_s, costs, run.microbatches_per_shard),
        ),
        unmeasured=(*unmeasured, *_unmeasured_joins(committed, joins)),
    )


def _typical_step_s(
    costs: CostModel, num_microbatches: int, joined: Collection[int], step: measured.MeasuredStep
) -> float:
    """A step without a loss in the simulator; groups are admitted right before the steps in `joined`."""
    loads = np.array(list(step.loads.values()))
    compute_s = costs.compute_s * float(finish_times(loads, num_microbatches, costs).max())
    join_s = costs.join_s if step.step in joined else 0.0
    return join_s + compute_s + (costs.reduce_s + costs.update_s) * stretch(len(step.loads), costs)


def _typical_recovery_s(costs: CostModel, num_microbatches: int, times: measured.MeasuredRecovery) -> float:
    loads = np.array(list(times.loads.values()))
    covered_s = costs.agree_s + costs.compute_s * float(finish_times(loads, num_microbatches, costs).max())
    reduce_s = costs.retry_s + costs.reduce_s * stretch(times.num_alive, costs)
    return max(0.0, costs.detect_s - times.hidden_s) + max(costs.rebuild_s, covered_s) + reduce_s


def _nothing_to_measure(committed: Sequence[measured.MeasuredStep]) -> str:
    if not committed:
        return "its journal has no committed step before the first restart, so nothing can be measured by it"
    counts = Counter(step.disturbance for step in committed)
    reasons = ", ".join(f"{counts[name]} {text}" for name, text in _DISTURBANCES.items() if counts[name])
    return (
        f"its journal has no step without a loss after the warm-up: of {len(committed)} committed steps {reasons}; "
        f"measure a run with more steps or fewer faults"
    )


def _spread(steps: Sequence[measured.MeasuredStep], fit: ComputeFit) -> float:
    """Relative standard deviation of compute times from the fit, by medians so that single slow steps do not count."""
    fitted = {(state.loads, state.load): state.fitted_s for state in fit.states if state.what == "step"}
    ratios = []
    for step in steps:
        loads = tuple(sorted(load for load in step.loads.values() if load))
        if loads and (loads, loads[-1]) in fitted:
            ratios.append(step.computed_s / fitted[loads, loads[-1]])
    middle = median(ratios)
    return _SIGMA_OF_MAD * median(abs(ratio - middle) for ratio in ratios) / middle


def _fit_recoveries(
    recoveries: Sequence[measured.MeasuredRecovery], reduce_s: float, speed: CostModel
) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Costs of losses apart from the patch, and what the run could not measure of them: medians over the recoveries
    from single losses, as only those separate the stages.
    """
    single = [times for times in recoveries if len(times.recovery.lost) == 1]
    retried = [times for times in single if times.is_retried]
    detect_s = _detect_s(single)
    # From the fence, which comes detect_s after the loss or after the survivors' own compute, to the decision.
    agree = [max(0.0, r.recovery.detect_s + r.recovery.agree_s - max(0.0, detect_s - r.hidden_s)) for r in single]
    agree_s = median(agree) if agree else None
    rebuild_s, retry_s = None, None
    if retried and agree_s is not None:
        covered_s = [agree_s + max(r.patch_s.values(), default=0.0) for r in retried]
        rest_s = [
            r.recovery.total_s
            - r.recovery.detect_s
            - r.recovery.agree_s
            - max(r.patch_s.values(), default=0.0)
            - reduce_s * stretch(r.num_alive, speed)
            for r in retried
        ]
        rebuild_s, retry_s = fit_rebuild(covered_s, [max(0.0, rest) for rest in rest_s])
    costs = {"detect_s": detect_s if single else None, "agree_s": agree_s, "rebuild_s": rebuild_s, "retry_s": retry_s}
    return costs, tuple(_unmeasured(single, retried, rebuild_s))


def _detect_s(recoveries: Sequence[measured.MeasuredRecovery]) -> float:
    """From the loss to its fence: as survivors waited for it, or as journaled if their own compute always hid it."""
    waited = [times.recovery.detect_s for times in recoveries if times.hidden_s == 0]
    if waited:
        return median(waited)
    return min((times.fence_s for times in recoveries if times.fence_s is not None), default=0.0)


def fit_rebuild(covered_s: Sequence[float], rest_s: Sequence[float]) -> tuple[float | None, float]:
    """rebuild_s and retry_s of the least sum of |max(0, rebuild_s - covered) + retry_s - rest|; retry_s is 0 or one of
    21 quantiles of rest. `covered_s`: agreement and patch of each recovery, which hide a rebuild. `rest_s`: the rest of
    each recovery, without these and a reduction. rebuild_s is None with fewer than 3 recoveries, or unless a rebuild
    that is waited for halves the misfit. Cost: O(n log n).
    """
    covered, rest = np.array(covered_s), np.array(rest_s)
    hidden, hidden_misfit = (None, median(rest_s)), float(np.abs(median(rest_s) - rest).sum())
    found = []
    for retry_s in (0.0, *np.quantile(rest, np.linspace(0.0, 1.0, 21)).tolist()):
        left = np.maximum(rest - retry_s, 0.0)
        rebuild_s = covered + left
        misfits = _misfits(rebuild_s, covered, left) + np.maximum(retry_s - rest, 0.0).sum()
        best = int(misfits.argmin())
        found.append((float(misfits[best]), (float(rebuild_s[best]), retry_s)))
    misfit, waited_for = min(found, key=lambda item: round(item[0], 9))
    # Two constants fit any two recoveries exactly, and more of them always a little better than one constant.
    if len(rest_s) < _LEAST_RECOVERIES or misfit >= _LARGEST_MISFIT * hidden_misfit:
        return hidden
    return waited_for


def _misfits(rebuild_s: FloatArray, covered: FloatArray, rest: FloatArray) -> FloatArray:
    """For each rebuild_s the sum of |max(0, rebuild_s - covered) - rest|, for rest >= 0. Over rebuild_s a term is rest
    up to `covered`, falls to 0 at covered + rest, and rises again. Cost: O(n log n).
    """
    by_covered = np.argsort(covered, kind="stable")
    ends = covered + rest
    by_end = np.sort(ends)
    num_waiting, num_over = np.searchsorted(covered[by_covered], rebuild_s), np.searchsorted(by_end, rebuild_s)
    rest_sums, end_sums, over_sums = (
        np.concatenate([[0.0], np.cumsum(values)]) for values in (rest[by_covered], ends[by_covered], by_end)
    )
    misfits: FloatArray = (
        rest_sums[-1]
        - rest_sums[num_waiting]
        + (end_sums[num_waiting] - num_waiting * rebuild_s)
        + 2 * (num_over * rebuild_s - over_sums[num_over])
    )
    return misfits


def _unmeasured_joins(committed: Sequence[measured.MeasuredStep], joins: Sequence[measured.JoinTime]) -> Iterator[str]:
    if not joins and any(step.disturbance == "join" for step in committed):
        yield "how long it takes to admit groups: a loss came with it each time, or no quiet step has as many groups"


def _unmeasured(
    single: Sequence[measured.MeasuredRecovery], retried: Sequence[measured.MeasuredRecovery], rebuild_s: float | None
) -> Iterator[str]:
    if not single:
        yield "anything about recoveries, as it has none from a single loss"
        return
    if all(times.hidden_s > 0 for times in single):
        yield "how long survivors wait for a fence, as every loss came while they computed: taken as it was written"
    if not retried:
        yield "what reducing again takes, as no recovery had to"
    elif rebuild_s is None:
        least_s = min(max(times.patch_s.values(), default=0.0) for times in retried)
        yield f"how long a rebuild takes: patches of {format_duration(least_s)} and more have hidden it"
