"""Turns the events of a run into metrics, among them where its time has gone so far."""

import contextlib
import dataclasses
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import tokens_before
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.formats.output import named_errors
from spare_megatron.journal.records import CheckpointRecord, RecoveryRecord, RestartRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import cause_of, flops_utilization, tflops_per_rank, tokens_per_second
from spare_megatron.journal.step_values import MEMORY, metrics_of
from spare_megatron.observe.metrics import (
    REST_S,
    DetachedSink,
    JsonlSink,
    MetricsSink,
    OnStep,
    StepHook,
    TensorBoardSink,
    Value,
    WandbSink,
)
from spare_megatron.process import reports
from spare_megatron.process.processes import report_held
from spare_megatron.stacking.layout import GroupId, Member

_QUIET_STEPS = 101
"""A step without incidents takes the median of this many recent steps with all groups."""


class LiveGoodput:
    """Running sums of useful time and of losses, by the names of `journal.state.goodput`; they add up to the time
    passed. A fault that costs no group counts as `scatter`. Keeps 17 bytes per step, for restarts that discard it.
    """

    def __init__(self, num_ranks: int, began_s: float) -> None:
        self._num_ranks = num_ranks
        self._began_s = self._at_s = began_s
        self._quiet_s: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._met: set[str] = set()
        self.has_newcomers = False
        self._names: list[str] = []
        self._useful_s, self._lost_s, self._cause = array("d"), array("d"), array("b")  # of each step
        self._sum_s = 0.0
        self._sums_s: dict[str, float] = {}

    def on_entry(self, name: str) -> None:
        """An entry of the log, by its name, which may be the cause of lost time."""
        self._met.add(name)

    def on_restart(self, num_thrown_away: int) -> None:
        """Reclassifies discarded steps as rework. Some of them may precede this run."""
        for _ in range(min(num_thrown_away, len(self._cause))):
            useful_s, lost_s = self._useful_s.pop(), self._lost_s.pop()
            self._sum_s -= useful_s
            self._add(self._names[self._cause.pop()], -lost_s)
            self._add("rework", useful_s + lost_s)

    def on_commit(self, at_s: float, step_s: float, num_ranks: int) -> None:
        """Accounts for a step that took `step_s` seconds and was committed at `at_s` by groups of `num_ranks`."""
        passed_s, self._at_s = at_s - self._at_s, at_s
        if num_ranks == self._num_ranks or not self._quiet_s:
            self._quiet_s.append(step_s)
        useful_s = min(passed_s, step_s, median(self._quiet_s))
        cause = cause_of(self._met, is_first=not self._useful_s, has_newcomers=self.has_newcomers)
        cause = cause or ("fewer_groups" if num_ranks < self._num_ranks else "scatter")
        if cause not in self._names:
            self._names.append(cause)
        self._useful_s.append(useful_s)
        self._lost_s.append(passed_s - useful_s)
        self._cause.append(self._names.index(cause))
        self._sum_s += useful_s
        self._add(cause, passed_s - useful_s)
        self._met.clear()
        self.has_newcomers = False

    @property
    def goodput(self) -> float:
        """Useful time over the time until the last commit."""
        passed_s = self._at_s - self._began_s
        return self._sum_s / passed_s if passed_s > 0 else 0.0

    @property
    def lost_s(self) -> Mapping[str, float]:
        return self._sums_s

    def _add(self, name: str, spent_s: float) -> None:
        self._sums_s[name] = self._sums_s.get(name, 0.0) + spent_s


_NOT_UPLOADED = ("slurm", "control", "watch")
"""Sections of the configuration that are not uploaded: they describe the site, not the training, and may be secret."""


def open_sinks(
    config: RunConfig,
    run_dir: Path,
    on_event: Callable[[reports.Message | reports.RecordsHeld], None],
    on_step: OnStep | None = None,
    *,
    rest_s: float = REST_S,
) -> list[MetricsSink]:
    """Opens the sinks that the configuration asks for, and one for `on_step`; `rest_s` is that of `DetachedSink`."""
    metrics = config.metrics

    def failed(reason: str) -> None:
        on_event(reports.Message(text=f"{reason}; metrics.jsonl has all of them, and training goes on"))

    def open_wandb() -> MetricsSink:
        uploaded = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_UPLOADED}
        with named_errors("--run-dir", run_dir):
            return WandbSink(run_dir, metrics.wandb_project, metrics.run_id, config.name, uploaded)

    def open_tensorboard() -> MetricsSink:
        with named_errors("--run-dir", run_dir):
            return TensorBoardSink(run_dir)

    sinks: list[MetricsSink] = [JsonlSink(run_dir, report_held(on_event))]
    if (port := metrics.prometheus_port) is not None:
        from spare_megatron.observe.prometheus import PrometheusSink  # whose package is optional

        try:
            sinks.append(PrometheusSink(run_dir, config.name, metrics.prometheus_address, port))
        except OSError as error:  # taken since it was tried
            raise ValueError(f"metrics.prometheus_port={port}: {error.strerror}; choose another") from error
    if metrics.tensorboard:
        sinks.append(DetachedSink("TensorBoard", open_tensorboard, failed, rest_s=rest_s))
    if metrics.wandb_project:
        sinks.append(DetachedSink("Weights & Biases", open_wandb, failed, rest_s=rest_s))
    if on_step is not None:
        sinks.append(DetachedSink("on_step", lambda: StepHook(on_step), failed, rest_s=rest_s))
    return sinks


class Telemetry:
    """Writes each committed step to the sinks once, as the first group reports it, and again if it is repeated."""

    def __init__(
        self,
        config: RunConfig,
        run: RunRecord,
        sinks: Sequence[MetricsSink],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._run = run
        self._sinks = sinks
        self._clock = clock
        self._placement = config.placement
        self._absent: set[GroupId] = set()
        self._lost: set[Member] = set()
        self._counts = {"fault/groups_lost": 0, "fault/groups_rejoined": 0, "fault/restarts": 0}
        self._num_restarts = 0  # and undos
        self._attempt = self._void = -1  # of the last step written; the last one that an undo has made void
        self._store: dict[str, Value] = {}
        self._next_step = 0
        self._evaluated_by = -1  # attempt
        self._goodput = LiveGoodput(run.num_ranks(run.num_groups), clock())
        self._last_recovery = (0, -1)  # restarts before it, and its step
        self._recoveries: list[RecoveryRecord] = []  # written with the next step
        self._memory: dict[GroupId, Mapping[str, float]] = {}

    def on_event(self, event: object) -> None:
        """Updates the counters by an event, and writes a step, a checkpoint or an evaluation."""
        match event:
            case CheckpointRecord() as record:
                self._write(_of_checkpoint(record))
            case reports.GroupLost(record=record):
                lost = Member(GroupId(record.group), record.incarnation)
                self._absent.add(lost.group)
                self._lost.add(lost)  # reported again when given up
                if len(self._lost) > self._counts["fault/groups_lost"]:
                    self._goodput.on_entry("fence")
                self._counts["fault/groups_lost"] = len(self._lost)
            case reports.GroupRejoined(member=member):
                self._absent.discard(member.group)
                self._counts["fault/groups_rejoined"] += 1
                self._goodput.has_newcomers = True
            case RestartRecord(group=group, step=step, num_restarts=num_restarts, is_undo=is_undo):
                self._absent.discard(GroupId(group))
                if num_restarts > self._num_restarts:  # the first report of this restart or undo
                    self._num_restarts = num_restarts
                    self._counts["fault/restarts"] += not is_undo
                    self._goodput.on_entry("fence" if is_undo else "restart")
                    self._void = self._attempt if is_undo else self._void
                    self._goodput.on_restart(self._next_step - step)
                    self._next_step = step
            case reports.RunPaused(shards=shards) if shards:
                self._goodput.on_entry("resume")
            case reports.StoreMeasured(space=space):
                self._store = {"spare/store_bytes": space.used_bytes}
                if space.limit_bytes is not None:
                    self._store["spare/store_limit_bytes"] = space.limit_bytes
            case reports.EvaluationDecided(attempt=attempt) if attempt > self._evaluated_by:
                self._evaluated_by = attempt
                self._goodput.on_entry("evaluated")
                self._write(_of_evaluation(event))
            case reports.StepCommitted(step=step):
                self._keep_recoveries(event.recoveries)
                of_group = {key: value for key, value in event.update.values.items() if key in MEMORY}
                self._memory[GroupId(event.update.group)] = of_group
                if step >= self._next_step and event.update.attempt > self._void:  # else a report comes late
                    self._next_step, self._attempt = step + 1, event.update.attempt
                    self._goodput.on_commit(self._clock(), event.update.step_s, self._num_ranks(event))
                    self._write({"step": step, **self._of_step(event)})

    def _num_ranks(self, event: reports.StepCommitted) -> int:
        return self._run.num_ranks(event.num_alive, event.num_missing_stages)

    def close(self) -> None:
        """Closes the sinks. OSError: the disk has not accepted everything."""
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    def _write(self, values: Mapping[str, Value]) -> None:
        for sink in self._sinks:
            sink.write(values)

    def _of_step(self, event: reports.StepCommitted) -> dict[str, Value]:
        update = event.update
        values: dict[str, Value] = {
            "train/loss": update.loss,
            "train/grad_norm": update.grad_norm,
            "train/learning_rate": update.learning_rate,
            **metrics_of(update),
            **self._of_fullest(),
            "train/tokens": tokens_before(self._config, update.step + 1),
            "spare/groups_alive": event.num_alive,
            "spare/makespan": update.makespan,
            "spare/epoch": event.epoch,
            "spare/microbatches_recomputed": event.num_recomputed,
            "perf/step_s": update.step_s,
            "perf/goodput": round(self._goodput.goodput, 6),
            **{f"perf/lost_{name}_s": round(spent_s, 6) for name, spent_s in self._goodput.lost_s.items()},
            **self._counts,
            **self._store,
            **self._of_recoveries(),
        }
        if self._config.data.access == "stacked":
            # Survivors that hold the shard with the fewest: so many losses can wipe the run out, one less cannot.
            values["spare/fewest_hosts"] = min(len(set(hosts) - self._absent) for hosts in self._placement.hosts)
        whole_s = update.step_s / self._run.size_of_step(update.step)
        values |= self._speed(whole_s, self._num_ranks(event))
        return values | {f"perf/{name}_s": round(spent_s, 6) for name, spent_s in split_of_step(event.split_s).items()}

    def _of_fullest(self) -> dict[str, Value]:
        """Memory of the fullest rank, by the last report of each group that takes part."""
        known = [values for group, values in self._memory.items() if group not in self._absent]
        found = {key: [values[key] for values in known if key in values] for key in MEMORY}
        return {key: max(of_groups) for key, of_groups in found.items() if of_groups}

    def _keep_recoveries(self, recoveries: Sequence[RecoveryRecord]) -> None:
        """Keeps each recovery as the first group reports it."""
        for record in recoveries:
            if (record.num_restarts, record.step) > self._last_recovery:
                self._last_recovery = record.num_restarts, record.step
                self._recoveries.append(record)

    def _of_recoveries(self) -> dict[str, Value]:
        recoveries, self._recoveries = self._recoveries, []
        parts = ("agree_s", "patch_s", "rebuild_s", "reduce_s")
        split = {part: sum(getattr(record, part) for record in recoveries) for part in parts if recoveries}
        return {f"fault/recovery_{part}": round(spent_s, 6) for part, spent_s in split.items()}

    def _speed(self, step_s: float, num_ranks: int) -> dict[str, Value]:
        figures = {
            "perf/tokens_per_s": (tokens_per_second(self._run, step_s), 3),
            "perf/tflops_per_rank": (tflops_per_rank(self._run, step_s, num_ranks), 6),
            "perf/mfu": (flops_utilization(self._run, step_s, num_ranks), 6),
        }
        return {name: round(value, digits) for name, (value, digits) in figures.items() if value is not None}


def split_of_step(split_s: Mapping[Operation, float]) -> dict[str, float]:
    """Seconds of a step by metric. What is missing was spent waiting for something else."""
    named = {
        "compute": (Operation.COMPUTE,),
        "transfer": (Operation.TRANSFER,),
        "reduce": (Operation.REDUCE,),
        "vote": (Operation.SETTLE, Operation.VOTE, Operation.AWAIT_ENTRY),
        "optimizer": (Operation.UPDATE,),
        "stall": (Operation.SAVE, Operation.JOIN, Operation.CHECK, Operation.STORAGE, Operation.PROFILE),
    }
    return {name: sum(split_s.get(operation, 0.0) for operation in parts) for name, parts in named.items()}


def _of_evaluation(event: reports.EvaluationDecided) -> dict[str, Value]:
    return {
        "step": event.step - 1,  # the last step before it
        "eval/loss": event.loss,
        **{f"eval/{name}/loss": loss for name, loss in event.losses.items()},
        "eval/spent_s": round(event.spent_s, 6),
    }


def _of_checkpoint(record: CheckpointRecord) -> dict[str, Value]:
    return {
        "step": record.step - 1,  # the last step that it contains
        "ckpt/outcome": record.outcome,
        "ckpt/num_bytes": record.num_bytes,
        "ckpt/stall_s": record.stall_s,
        "ckpt/write_s": record.write_s,
    }
