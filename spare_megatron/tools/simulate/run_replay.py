"""Replays a real run's losses in virtual time, to compare predicted with measured times. Each loss is placed once its
step has been computed in the simulation, so one simulation is enough for all.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nextafter
from statistics import median

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import BoolArray
from spare_megatron.tools.simulate.calibrate import Scatter
from spare_megatron.tools.simulate.compute_fit import stretch
from spare_megatron.tools.simulate.failures import FailureProcess, Loss
from spare_megatron.tools.simulate.measured import (
    JoinTime,
    LossTime,
    MeasuredRecovery,
    MeasuredStep,
    in_order,
    read_joins,
    read_losses,
    read_recoveries,
    read_retries,
    read_steps,
    refuse_unlike,
)
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.simulated_journal import SimulatedJournal
from spare_megatron.tools.simulate.spare_run import SpareRun
from spare_megatron.tools.simulate.world import World

_LATEST = 0.999
"""Latest moment of a loss: a share of the time from compute to sum if it stopped the reduction, else of the update."""


@dataclass(slots=True)
class _Pending:
    """A loss that has yet to strike."""

    at_s: float
    """When; infinite while it waits for the sum that it came after."""
    loss: LossTime
    is_stop: bool
    """Whether it prevented the commit of that reduction."""
    own_at_s: float
    """The moment as long after the compute as measured."""


class PlacedLosses(FailureProcess):
    """Losses that are added during the simulation."""

    def __init__(self) -> None:
        self.pending: list[_Pending] = []

    def next_s(self) -> float:
        return min((item.at_s for item in self.pending), default=inf)

    def strike(self, is_up: BoolArray) -> Loss:
        struck = min(self.pending, key=lambda item: item.at_s)
        self.pending.remove(struck)
        group = GroupId(struck.loss.group)
        # A group that comes back at the end of this step is ready at once, others when their step begins.
        repair_s = 0.0 if struck.loss.back_after == struck.loss.step else None
        return Loss(at_s=struck.at_s, groups=(group,) if is_up[group] else (), repair_s=repair_s)

    def restarted(self, _began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self.pending = [item for item in self.pending if item.at_s > now_s]


class ReplayedWorld(World):
    """Virtual time in which a run loses and admits its groups in the same steps as measured. A loss comes at the same
    share of the step's compute, or as long after it: before the sum is complete if it stopped the reduction, else after
    it. The scenario has no losses of its own; `retried_at_s` is `read_retries`.
    """

    def __init__(
        self,
        scenario: Scenario,
        steps: Sequence[MeasuredStep],
        losses: Sequence[LossTime],
        retried_at_s: Mapping[int, float],
    ) -> None:
        self._placed = PlacedLosses()
        super().__init__(scenario, 0, self._placed)
        self._measured: Mapping[int, MeasuredStep] = {step.step: step for step in steps}
        self._retried_at_s = retried_at_s
        self._losses: dict[int, list[LossTime]] = defaultdict(list)
        self._returns: dict[int, list[GroupId]] = defaultdict(list)
        for loss in losses:
            self._losses[loss.step].append(loss)
            if loss.back_after is not None and loss.back_after > loss.step:
                self._returns[loss.back_after].append(GroupId(loss.group))
        self._computed_at_s = 0.0

    def compute(self, step: int, stacks: float) -> None:
        began_s = self.now_s
        super().compute(step, stacks)
        self._computed_at_s = self.now_s
        for loss in self._losses.pop(step, ()):  # only the first time that the step is computed
            self._place(loss, began_s)
        for group in self._returns.pop(step, ()):
            self.fleet.ready_from(group, began_s)

    def wait(self, phases: Sequence[tuple[str, float]]) -> tuple[GroupId, ...]:
        if any(cause == "reduce" for cause, _ in phases):
            self._fit_into(self.now_s + sum(seconds for _, seconds in phases))
        return super().wait(phases)

    def _place(self, loss: LossTime, began_s: float) -> None:
        measured = self._measured[loss.step]
        is_stop = measured.began_at_s + loss.into_s < self._retried_at_s.get(loss.step, -inf)
        after_s = loss.into_s - measured.computed_s
        if after_s <= 0:
            own_at_s = began_s + loss.into_s / measured.computed_s * (self.now_s - began_s)
        else:
            own_at_s = self.now_s + after_s
        at_s = own_at_s if is_stop or after_s <= 0 else inf
        self._placed.pending.append(_Pending(at_s, loss, is_stop, own_at_s))

    def _fit_into(self, end_s: float) -> None:
        """Moves losses that would come on the wrong side of the end of a reduction."""
        pending = sorted(self._placed.pending, key=lambda item: item.at_s)
        stops = [item for item in pending if item.is_stop]
        for item in stops[:1]:  # further ones stop a later reduction
            latest_s = self._computed_at_s + _LATEST * (end_s - self._computed_at_s)
            item.at_s = min(item.at_s, max(latest_s, self.now_s))
        if not stops:
            update_s = self.scenario.costs.update_s * stretch(int(self.fleet.is_up.sum()), self.scenario.costs)
            for item in pending:
                item.at_s = max(min(item.own_at_s, end_s + _LATEST * update_s), nextafter(end_s, inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A measured time and its prediction; None if the simulator does not model it."""

    measured_s: float
    predicted_s: float | None
    error: float | None


def _prediction(measured_s: float, predicted_s: float | None) -> Prediction:
    error = None if predicted_s is None or not measured_s else predicted_s / measured_s - 1
    return Prediction(measured_s=measured_s, predicted_s=predicted_s, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """The median step without a loss, after the warm-up, with this many groups."""

    num_alive: int
    num_steps: int
    time: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPrediction:
    """A recovery: the time of the step beyond its own compute, up to the commit."""

    step: int
    lost: tuple[int, ...]
    phase: str | None
    num_patched: int
    time: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPrediction:
    """The excess time of the first step with groups that came back, from the end of the step before."""

    step: int
    groups: tuple[int, ...]
    time: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """A run's measured times beside those predicted from given costs."""

    name: str
    steps: tuple[StepPrediction, ...]
    """By number of groups, descending."""
    recoveries: tuple[RecoveryPrediction, ...]
    joins: tuple[JoinPrediction, ...]
    median_recovery: Prediction | None
    """Medians over the recoveries that have a prediction; None if none has."""
    median_join: Prediction | None
    wall: Prediction
    """From the end of the first of these steps to the end of the last."""


def replay(journal: Journal, costs: CostModel, scatter: Scatter | None = None) -> RunReplay:
    """Simulates the run of the journal with these costs, up to its first restart, and compares. `scatter` is added to
    the predicted wall time. ValueError if the journal has no run record or no committed step, or what the simulator
    does not have.
    """
    runs, steps = journal.of(RunRecord), read_steps(journal)
    if not runs or not steps:
        raise ValueError("its journal has no committed step to replay")
    refuse_unlike(runs[0])
    losses, num_groups = read_losses(journal, steps), runs[0].num_groups
    if grown := sorted({loss.group for loss in losses if loss.group >= num_groups}):
        raise ValueError(
            f"it lost group {grown[0]}, which was added to its first {num_groups}, and the simulator knows "
            f"only those; replay a run that did not grow"
        )
    recoveries = {r.recovery.step: r for r in read_recoveries(journal) if r.recovery.step <= steps[-1].step}
    world = ReplayedWorld(_scenario(runs[0], len(steps), costs), steps, losses, read_retries(journal))
    simulated = _simulate(world)
    predicted = {r.recovery.step: r.recovery.total_s for r in read_recoveries(simulated)}
    compared = tuple(_compare_recovery(times, predicted) for _, times in sorted(recoveries.items()))
    simulated_steps = read_steps(simulated)
    joins = _compare_joins(read_joins(journal, steps), read_joins(simulated, simulated_steps))
    return RunReplay(
        name=runs[0].name,
        steps=_compare_steps(steps, simulated_steps),
        recoveries=compared,
        joins=joins,
        median_recovery=_median_of([recovery.time for recovery in compared]),
        median_join=_median_of([join.time for join in joins]),
        wall=_prediction(
            _wall_s(steps), _predicted_wall_s(simulated_steps, steps, recoveries.values(), scatter or Scatter())
        ),
    )


def _wall_s(steps: Sequence[MeasuredStep]) -> float:
    return steps[-1].ended_at_s - steps[0].ended_at_s


def _predicted_wall_s(
    simulated: Sequence[MeasuredStep],
    steps: Sequence[MeasuredStep],
    recoveries: Iterable[MeasuredRecovery],
    scatter: Scatter,
) -> float | None:
    """None if the simulation restarted where the run did not, so that it lacks steps."""
    if len(simulated) < len(steps):
        return None
    num_retried = sum(times.is_retried for times in recoveries)
    beyond_s = sum(scatter.warm_up_s if step.disturbance == "join" else scatter.step_s for step in steps[1:])
    return _wall_s(simulated) + beyond_s + num_retried * scatter.recovery_s


def _scenario(run: RunRecord, num_steps: int, costs: CostModel) -> Scenario:
    return Scenario(
        name=run.name,
        num_groups=run.num_groups,
        redundancy=run.redundancy,
        microbatches_per_shard=run.microbatches_per_shard,
        num_steps=num_steps,
        granularity="stack" if run.granularity == "stack" else "microbatch",
        placement=run.placement,  # type: ignore[arg-type]
        groups_per_domain=run.groups_per_domain,
        costs=replace(costs, jitter=0.0),
        save_interval_s=inf,
        last_resort=run.last_resort,
    )


def _simulate(world: ReplayedWorld) -> Journal:
    lines: list[Line] = []
    SpareRun(world, SimulatedJournal(world.scenario, world, lines.append), clock=None).run()
    return in_order(lines)


def _compare_steps(measured: Sequence[MeasuredStep], predicted: Sequence[MeasuredStep]) -> tuple[StepPrediction, ...]:
    samples_s, predicted_s = _by_num_alive(measured), _by_num_alive(predicted)
    return tuple(
        StepPrediction(
            num_alive=num_alive,
            num_steps=len(samples_s[num_alive]),
            time=_prediction(
                median(samples_s[num_alive]), median(predicted_s[num_alive]) if num_alive in predicted_s else None
            ),
        )
        for num_alive in sorted(samples_s, reverse=True)
    )


def _by_num_alive(steps: Sequence[MeasuredStep]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.is_clean:
            found[len(step.loads)].append(step.step_s)
    return found


def _compare_recovery(times: MeasuredRecovery, predicted_s: dict[int, float]) -> RecoveryPrediction:
    """Predicts only retried steps: the simulator has no losses after all survivors hold the sum."""
    recovery = times.recovery
    return RecoveryPrediction(
        step=recovery.step,
        lost=recovery.lost,
        phase=recovery.phase,
        num_patched=recovery.num_patched,
        time=_prediction(recovery.total_s, predicted_s.get(recovery.step) if times.is_retried else None),
    )


def _compare_joins(measured: Sequence[JoinTime], predicted: Sequence[JoinTime]) -> tuple[JoinPrediction, ...]:
    predicted_s = {join.step: join.pause_s for join in predicted}
    return tuple(
        JoinPrediction(step=join.step, groups=join.groups, time=_prediction(join.pause_s, predicted_s.get(join.step)))
        for join in measured
    )


def _median_of(times: Sequence[Prediction]) -> Prediction | None:
    pairs = [(time.measured_s, time.predicted_s) for time in times if time.predicted_s is not None]
    if not pairs:
        return None
    return _prediction(median(measured for measured, _ in pairs), median(predicted for _, predicted in pairs))
