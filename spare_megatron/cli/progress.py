"""What `spare train` shows: a live view on a terminal, plain lines elsewhere, and the table at the end."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spare_megatron.cli.standing_view import view_of
from spare_megatron.config.schema import RunConfig
from spare_megatron.journal.events import and_others
from spare_megatron.journal.follow import Follower
from spare_megatron.journal.quantities import format_bytes, format_duration
from spare_megatron.journal.records import CheckpointRecord
from spare_megatron.journal.recoveries import Recovery
from spare_megatron.journal.standing import SavePlan
from spare_megatron.journal.summary import NOT_RUN, Summary
from spare_megatron.runtime.process.reports import (
    CheckpointRejected,
    CheckpointTold,
    GroupLost,
    GroupRejoined,
    GroupRestarted,
    MetricsLost,
    RanksReady,
    RecordsHeld,
    RecordsLost,
    RunEvent,
    RunStopped,
    Starting,
    StepCommitted,
    StoreAwaited,
    StoreAway,
    StoreBack,
    StoreMeasured,
)

_PLAIN_INTERVAL_S = 2.0
"""Without a terminal, seconds between lines about steps; events are told at once."""


_MOST_REASONS = 10
"""Of a verdict that is not `valid`: a journal that lacks its end has one for each step and group."""


class RunProgress:
    """Follows a run's events. Use as a context manager around the run."""

    def __init__(self, config: RunConfig, console: Console, run_dir: Path) -> None:
        self._config = config
        self._console = console
        self._follower = Follower(run_dir)
        self._absent: dict[int, str] = {}  # groups that take no part, and what is known of them
        self._last: StepCommitted | None = None
        self._is_store_away = self._is_store_short = False
        self._last_event = "starting"
        self._next_line_at_s = 0.0
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def take(self, event: RunEvent) -> None:
        """Shows an event."""
        match event:
            case Starting(what=what):
                self._tell(f"starting: {what}")
            case RanksReady(group=group) if group in self._absent:
                if self._absent[group] != "coming back":  # each of its nodes says so
                    self._tell(f"group {group} is up again and waits for the end of a step")
                self._absent[group] = "coming back"
            case RanksReady():
                self._last_event = "all ranks start with the same parameters"
            case GroupRejoined(member=member, step=step):
                self._absent.pop(member.group, None)
                self._tell(f"group {member.group} rejoined, and takes part from step {step + 1} on")
            case GroupRestarted(member=member, step=step, source=source, rejected=rejected):
                self._absent.pop(member.group, None)
                self._last = None
                for text in rejected:
                    self._tell(text, is_repeatable=False)
                where = f"the checkpoint after {step} steps" if step else "the beginning, there is no checkpoint"
                if source == "memory":
                    where = f"the snapshot after {step} steps"
                self._tell(f"training starts again from {where}", is_repeatable=False)
            case StepCommitted():
                self._committed(event)
            case CheckpointTold(record=record):
                self._tell(_describe_save(record))
            case CheckpointRejected(reason=reason):
                self._tell(f"checkpoint rejected: {reason}; trying the one before")
            case MetricsLost(reason=reason):
                self._tell(f"{reason}; metrics.jsonl has all of them, and training goes on")
            case RecordsHeld() | RecordsLost():
                self._tell(self._describe_records(event))
            case GroupLost(group=group, rank=rank, cause=cause, traceback=text, is_given_up=is_given_up):
                self._absent[group] = "given up" if is_given_up else "lost"
                end = f"; given up after spare.rejoins={self._config.spare.rejoins}" if is_given_up else ""
                self._tell(f"group {group} lost: rank {rank}: {cause}; the others go on{end}")
                if text:
                    self._console.print(Text(text.rstrip()))
            case StoreAwaited() | StoreAway() | StoreBack() | StoreMeasured():
                self._store_told(event)
            case RunStopped(step=step, reason=reason):
                self._tell(f"stopped after {step} committed steps: {reason}", is_repeatable=False)

    def _describe_records(self, event: RecordsHeld | RecordsLost) -> str:
        if isinstance(event, RecordsLost):
            files = and_others(event.paths[0], len(event.paths) - 1)
            return (
                f"the last {format_bytes(event.num_bytes)} of {files} are lost: {event.reason}; the proof and the "
                f"metrics of these steps are incomplete, the training and its checkpoints are not"
            )
        if not event.reason:
            return "the storage takes the files of the run again; nothing that was written down is lost"
        return (
            f"warning: the storage takes no more of {event.path} (--run-dir): {event.reason}; journal and metrics stay "
            f"in memory, and are lost if there is no room when the run ends: make room there. Training goes on"
        )

    def _store_told(self, event: StoreAwaited | StoreAway | StoreBack | StoreMeasured) -> None:
        match event:
            case StoreAwaited(endpoints=endpoints, reason=reason, limit_s=limit_s):
                self._tell(
                    f"warning: etcd at {', '.join(endpoints)} (control.endpoints) does not answer: {reason}; it is "
                    f"waited for when all else is ready, control.store_timeout_s={limit_s:g} s at most"
                )
            case StoreAway(limit_s=limit_s) if not self._is_store_away:  # each node says so
                self._is_store_away = True
                self._tell(f"the control store does not answer; training pauses for it, {limit_s:g} s at most")
            case StoreBack(away_s=away_s) if self._is_store_away:
                self._is_store_away = False
                self._tell(f"the control store answers again after {away_s:.1f} s")
            case StoreMeasured(shortage=shortage):
                if shortage and not self._is_store_short:
                    self._tell(f"warning: {shortage}")
                self._is_store_short = bool(shortage)

    def _committed(self, event: StepCommitted) -> None:
        if self._last is not None and event.step <= self._last.step:
            return
        self._last = event
        is_end = event.step + 1 == self._config.train.steps
        if not self._console.is_terminal and (time.monotonic() >= self._next_line_at_s or is_end):
            self._next_line_at_s = time.monotonic() + _PLAIN_INTERVAL_S
            self._console.print(self._describe_step(event), highlight=False)

    def _describe_step(self, event: StepCommitted) -> str:
        return (
            f"step {event.step + 1}/{self._config.train.steps}  loss {event.loss:.4f}  "
            f"groups {event.num_alive}/{self._config.layout.num_groups}  "
            f"load {event.makespan} microbatches  {format_duration(event.step_s)}"
        )

    def _tell(self, text: str, *, is_repeatable: bool = True) -> None:
        if not is_repeatable and text == self._last_event:
            return
        self._last_event = text
        self._console.print(text, highlight=False)

    def _render(self) -> RenderableType:
        checkpoint = self._config.checkpoint
        plan = SavePlan(interval_s=checkpoint.interval_s or 0.0, interval_steps=checkpoint.interval_steps or 0)
        return view_of(self._follower.poll(), plan, time.time(), note=self._last_event)


def _describe_save(record: CheckpointRecord) -> str:
    where = f"checkpoint after {record.step} steps"
    if record.outcome != "saved":
        return f"{where} {record.outcome}: {record.reason}; the earlier ones are untouched, and training goes on"
    figures = f"{format_bytes(record.num_bytes)} by group {record.group} in {format_duration(record.write_s)}"
    end = f"; {record.reason}" if record.reason else ""
    return f"{where} saved: {figures}, {format_duration(record.stall_s)} of it without training{end}"


def print_summary(summary: Summary, run_dir: Path, console: Console) -> None:
    """The table at the end of a run."""
    table = Table(title="run", show_header=False, box=box.SIMPLE)
    for name, value in _figures(summary, run_dir):
        table.add_row(name, value)
    console.print(table)
    if summary.recoveries:
        console.print(_recovery_table(summary.recoveries))
    for reason in summary.reasons[:_MOST_REASONS]:
        console.print(Text(reason))
    if len(summary.reasons) > _MOST_REASONS:
        console.print(Text(f"and {len(summary.reasons) - _MOST_REASONS} more: spare check {run_dir}"))


def _figures(summary: Summary, run_dir: Path) -> Iterator[tuple[str, str]]:
    yield "outcome", summary.outcome + (f": {summary.outcome_reason}" if summary.outcome_reason else "")
    yield "steps committed", str(summary.steps_committed)
    counts = {
        "restarts from a checkpoint": summary.restarts,
        "steps lost": summary.steps_lost,
        "groups lost": summary.groups_lost,
        "groups rejoined": summary.groups_rejoined,
        "microbatches recomputed": summary.microbatches_recomputed,
    }
    yield from ((name, str(count)) for name, count in counts.items() if count is not None)
    if summary.verdict != NOT_RUN:
        yield "final loss", "none" if summary.final_loss is None else f"{summary.final_loss:.4f}"
    yield "spare check", summary.verdict
    yield "run directory", str(run_dir)


def _recovery_table(recoveries: tuple[Recovery, ...]) -> Table:
    stages = ("detect", "agree", "rebuild", "patch", "reduce", "total")
    table = Table(
        title="recovery of each loss: ms, and microbatches computed again", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for name in ("step", "group", "during", *stages, "again"):
        table.add_column(name, justify="right", no_wrap=True)
    for recovery in recoveries:
        spent = [f"{getattr(recovery, f'{stage}_s') * 1e3:.0f}" for stage in stages]
        lost = ", ".join(str(group) for group in recovery.lost)
        table.add_row(str(recovery.step), lost, recovery.phase or "-", *spent, str(recovery.num_patched))
    return table
