"""Output of `spare train`: a live view on a terminal, plain lines elsewhere, and a table at the end. A thread shows it,
so that a stalled output never delays the run.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from spare_megatron.cli.check import way_back
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.run_view import STEP_LINE_INTERVAL_S, NewLines, figures_of, view_of
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.output import real_paths
from spare_megatron.formats.quantities import format_bytes, format_duration
from spare_megatron.journal.event_texts import (
    and_others,
    text_of_culprit,
    text_of_entry,
    text_of_evaluation,
    text_of_loss,
    text_of_pause,
)
from spare_megatron.journal.proofs.audit_history import text_of_spoiled, text_of_undone
from spare_megatron.journal.records import CulpritRecord, RestartRecord
from spare_megatron.journal.state.follow import Follower
from spare_megatron.journal.state.overview import UNPROVEN, overview_of
from spare_megatron.journal.state.recoveries import Recovery
from spare_megatron.journal.state.run_state import RunState, SavePlan
from spare_megatron.journal.state.summary import NOT_RUN, Summary
from spare_megatron.machine.lock import held_path
from spare_megatron.process import reports

_BEHIND_S = 10.0
"""Delay after which a reported step missing from the journal counts as late: its storage may be full."""

CLOSE_TIMEOUT_S = 10.0
"""Longest wait at the end of a run for output not yet written."""
_MOST_WAITING = 4096
_REFRESH_S = 0.25
_MEASURED_STEPS = 8
"""Steps to measure before their pace says how long the run will take."""
_LONG_S = 3600.0
_MOST_REASONS = 10
"""Reasons to list if the verdict is not `valid`; a truncated journal yields one for each step and group."""


class RunProgress:
    """Shows a run from its journal and from events that no journal has, each once; a context manager around the run. On
    a terminal, lines scroll above a live view. While the journal is behind, events are shown as reported.
    """

    def __init__(self, config: RunConfig, console: RunConsole, run_dir: Path) -> None:
        checkpoint = config.checkpoint
        self._plan = SavePlan(interval_s=checkpoint.interval_s or 0.0, interval_steps=checkpoint.interval_steps or 0)
        self._warns_of_time = not checkpoint.is_wanted
        self._console = console
        self._follower = Follower(run_dir)
        self._held = contextlib.ExitStack()  # the run's directory, wherever it is moved
        self._lines = NewLines(has_steps=not console.is_terminal)
        self._absent: set[int] = set()  # lost groups that are not up again
        self._is_store_away = self._is_store_short = False
        self._wiped_out_at: int | None = None
        self._awaited: tuple[int, ...] = ()  # shards without a host
        self._reported: tuple[int, float] | None = None  # a step missing from the journal, and when it was reported
        self._next_at_s = self._next_poll_s = 0.0
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._show_view = self._shown.enter_context(self._console.live())
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                self._next_poll_s = 0.0
                self.refresh()
        finally:
            self._shown.close()
            self._held.close()

    def refresh(self) -> None:
        """Shows what is new in the journal; without a terminal, only after an event or two seconds."""
        now_s = time.time()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = 0.0 if self._console.is_terminal else now_s + STEP_LINE_INTERVAL_S
        run_state = self._follow()
        self._warn_of_time(run_state, now_s)
        if self._console.is_terminal and run_state.run is not None:
            overview = overview_of(run_state, now_s, UNPROVEN, window_s=math.inf)
            self._show_view(view_of(run_state, self._plan, overview, has_events=False))

    def _warn_of_time(self, run_state: RunState, now_s: float) -> None:
        """Warns once that a run which takes no checkpoint before its end has long to go, by its measured steps."""
        if not self._warns_of_time or run_state.folding is None or len(run_state.folding.commits) < _MEASURED_STEPS:
            return
        left_s = run_state.left_s(now_s) or 0.0
        if left_s > _LONG_S:
            self._warns_of_time = False
            self._show(
                f"warning: {format_duration(round(left_s))} are left, and no checkpoint is taken until then, unless "
                f"the run is asked to end (SIGTERM); set checkpoint.cadence=optimal, or checkpoint.interval_steps"
            )

    def on_event(self, event: reports.RunEvent) -> None:
        """Shows an event unless the journal has it."""
        if not isinstance(event, reports.StepCommitted):
            self._next_poll_s = 0.0
        match event:
            case reports.Message(text=text):
                self._show(text)
            case reports.RunDirectoryOpened(path=path):
                self._follower = Follower(self._held.enter_context(held_path(path)))
            case reports.RunDirectoryMoved(path=path, former=former):
                self._show(f"{former}, the directory of the run, is now {path}: the run goes on there")
            case reports.EndAsked(by=by, limit_s=limit_s):
                self._show(describe_request(by, limit_s))
            case reports.RanksReady(group=group) if group in self._absent:
                self._absent.discard(group)  # each node of the group reports it
                self._show(f"group {group} is up again and waits for the end of a step")
            case reports.StepCommitted():
                self._committed(event)
            case reports.GroupRejoined(member=member, step=step):
                self._show_unrecorded(text_of_entry({"entry": "commit", "step": step - 1}, {member.group}))
            case RestartRecord():
                self._wiped_out_at = self._reported = None
            case reports.RecordsHeld() | reports.RecordsLost():
                self._show(self._describe_records(event))
            case reports.GroupLost(record=record, traceback=text):
                self._absent.add(record.group)
                self._show_unrecorded(text_of_loss(record, is_known=False))
                if text:
                    self._show(f"group {record.group} rank {record.rank} raised:\n{text.rstrip()}")
            case CulpritRecord() as record:
                self._show_unrecorded(text_of_culprit(record))
            case reports.StoreAway() | reports.StoreBack() | reports.StoreMeasured():
                self._show_store(event)
            case reports.RunPaused(step=step, shards=shards) if shards != self._awaited:
                self._awaited = shards  # each group reports it
                if shards:
                    self._show_unrecorded(text_of_pause(step, shards))
            case reports.RunStopped(step=step, reason=reason, is_final=False) if step != self._wiped_out_at:
                self._wiped_out_at = step  # each group reports it
                self._show(f"wiped out after {step} committed steps: {reason}")

    def _describe_records(self, event: reports.RecordsHeld | reports.RecordsLost) -> str:
        if isinstance(event, reports.RecordsLost):
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

    def _show_store(self, event: reports.StoreAway | reports.StoreBack | reports.StoreMeasured) -> None:
        match event:
            case reports.StoreAway(limit_s=limit_s) if not self._is_store_away:  # each node reports it
                self._is_store_away = True
                self._show(f"the control store does not answer; training pauses for it, {limit_s:g} s at most")
            case reports.StoreBack(away_s=away_s) if self._is_store_away:
                self._is_store_away = False
                self._show(f"the control store answers again after {away_s:.1f} s")
            case reports.StoreMeasured(shortage=shortage):
                if shortage and not self._is_store_short:
                    self._show(f"warning: {shortage}")
                self._is_store_short = bool(shortage)

    def _committed(self, event: reports.StepCommitted) -> None:
        newest, now_s = self._follower.run_state.newest, time.time()
        if self._reported is None or (newest is not None and newest.step >= self._reported[0]):
            self._reported = event.step, now_s
        if now_s < self._next_at_s or not self._is_behind(now_s) or (run := self._follower.run_state.run) is None:
            return
        self._next_at_s = now_s + STEP_LINE_INTERVAL_S
        self._show("  ".join(figures_of(run, event.update, event.num_alive, event.num_missing_stages)))

    def _is_behind(self, now_s: float) -> bool:
        if self._reported is None or now_s - self._reported[1] < _BEHIND_S:
            return False
        newest = self._follow().newest
        return newest is None or newest.step < self._reported[0]

    def _show_unrecorded(self, text: str) -> None:
        if self._is_behind(time.time()) and text not in self._lines.unrecorded:
            self._lines.unrecorded.add(text)
            self._show(text)

    def _follow(self) -> RunState:
        run_state = self._follower.run_state
        with contextlib.suppress(OSError):  # from the journal's storage: the next poll retries
            self._follower.poll()
        self._print(*self._lines.poll(run_state, time.time()))
        return run_state

    def _show(self, text: str) -> None:
        self._follow()  # shows the events that the text may refer to first
        self._print(*(self._lines.stamped(line, time.time()) for line in text.expandtabs().split("\n")))

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.line(real_paths(line))


def describe_request(by: str, limit_s: float | None) -> str:
    """A line about a request to end the run."""
    text = f"{by}: the run ends after the step under way, with a checkpoint if more were to come"
    if limit_s is None:
        return text
    return f"{text}; a second signal ends it at once, as does the end of control.end_grace_s={limit_s:g}"


def print_summary(summary: Summary, run_dir: Path, console: RunConsole) -> None:
    tables = [Table(title="run", rows=list(_figures(summary, run_dir)))]
    if summary.recoveries:
        tables.append(_recovery_table(summary.recoveries))
    console.tables(*tables)
    for undone in summary.undone:
        console.line(text_of_undone(undone))
    if summary.spoiled is not None:
        console.line(text_of_spoiled(summary.spoiled))
        console.line(way_back(summary.spoiled, run_dir))
    for reason in summary.reasons[:_MOST_REASONS]:
        console.line(reason)
    if len(summary.reasons) > _MOST_REASONS:
        console.line(f"and {len(summary.reasons) - _MOST_REASONS} more: spare check {run_dir}")


def _figures(summary: Summary, run_dir: Path) -> Iterator[tuple[str, str]]:
    yield "outcome", summary.outcome + (f": {summary.outcome_reason}" if summary.outcome_reason else "")
    yield "steps committed", str(summary.steps_committed)
    counts = {
        "restarts from a checkpoint": summary.restarts,
        "steps lost": summary.steps_lost,
        "groups lost": summary.groups_lost,
        "groups rejoined": summary.groups_rejoined,
        "microbatches computed again": summary.microbatches_recomputed,
    }
    yield from ((name, str(count)) for name, count in counts.items() if count is not None)
    if summary.verdict != NOT_RUN:
        yield "final loss", "none" if summary.final_loss is None else f"{summary.final_loss:.4f}"
    yield from ((f"loss of {name}", text_of_evaluation(last)) for name, last in summary.eval.items())
    yield "spare check", summary.verdict
    yield "run directory", str(run_dir)


def _recovery_table(recoveries: tuple[Recovery, ...]) -> Table:
    stages = ("detect", "agree", "rebuild", "patch", "reduce", "total")
    rows = []
    for recovery in recoveries:
        spent = [f"{getattr(recovery, f'{stage}_s') * 1e3:.0f}" for stage in stages]
        lost = ", ".join(str(group) for group in recovery.lost)
        rows.append((str(recovery.step), lost, recovery.phase or "-", *spent, str(recovery.num_patched)))
    title = "recovery of each loss: ms, and microbatches computed again"
    return Table(title=title, columns=("step", "group", "during", *stages, "again"), rows=rows, has_numbers=True)


class DetachedView:
    """Runs a view in a thread of its own; drops events if the output, which outlasts errors, is far behind."""

    def __init__(self, view: RunProgress) -> None:
        self._view = view
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Full):  # the thread is blocked on its output
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)

    def on_event(self, event: Any) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(event)

    def _run(self) -> None:
        next_s = 0.0
        with self._view as view:
            while True:
                if time.monotonic() >= next_s:
                    view.refresh()
                    next_s = time.monotonic() + _REFRESH_S
                with contextlib.suppress(queue.Empty):
                    event = self._waiting.get(timeout=max(0.0, next_s - time.monotonic()))
                    if event is None:
                        return
                    view.on_event(event)
