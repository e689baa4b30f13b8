"""Runs the user's command for each event of the run, in a thread: training never waits for it."""

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spare_megatron.formats.output import real_paths
from spare_megatron.journal.records import CulpritRecord, ExaminationRecord, RestartRecord
from spare_megatron.process.reports import GroupLost, GroupRejoined, MachineQuarantined, Message, RunEvent

_MOST_WAITING = 1000
_TIMEOUT_S = 60.0
"""Longest time that one call may take before it is killed."""
_CLOSE_TIMEOUT_S = 10.0
"""How long the end of the run waits for the command."""


class EventCommand:
    """Calls `command` with one event after the other as JSON on its standard input; reports each failure once."""

    def __init__(
        self,
        command: Sequence[str],
        run_dir: Path,
        on_failure: Callable[[Message], None],
        *,
        timeout_s: float = _TIMEOUT_S,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._command = command
        self._run_dir = run_dir
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._close_timeout_s = close_timeout_s
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        self._num_dropped = 0
        self._num_restarts = 0  # and undos, each of which all groups report
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="event-command", daemon=True)
        self._thread.start()

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, RestartRecord):
            is_known, self._num_restarts = event.num_restarts <= self._num_restarts, event.num_restarts
            if is_known:
                return
        for fields in fields_of(event):
            self.put(fields)

    def put(self, fields: Mapping[str, Any]) -> None:
        """Queues an event; drops it if a thousand are waiting."""
        text = json.dumps({**fields, "at_s": time.time(), "run_dir": real_paths(str(self._run_dir))})
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Waits a little for the events that are still to be handled, then kills the command."""
        ends_at_s = time.monotonic() + self._close_timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=self._close_timeout_s)
        self._thread.join(max(0.0, ends_at_s - time.monotonic()))
        if self._thread.is_alive():
            self._is_over = True
            if self._process is not None:
                self._process.kill()
            self._report(f"it has not taken all events within {self._close_timeout_s:g} s of the end")
        if self._num_dropped:
            self._report(f"it was too slow for {self._num_dropped} events, which it lacks")

    def _run(self) -> None:
        while not self._is_over and (text := self._waiting.get()) is not None:
            try:
                self._call(text)
            except (OSError, subprocess.SubprocessError) as error:
                self._report(str(error))

    def _call(self, text: str) -> None:
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            self._process = process
            try:
                output, _ = process.communicate(text, self._timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode and not self._is_over:
            last = output.strip().rpartition("\n")[2]
            self._report(f"it ended with exit code {process.returncode}" + (f": {last}" if last else ""))

    def _report(self, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            self._on_failure(Message(text=f"watch.on_event={self._command[0]}: {reason}; training goes on"))


def fields_of(event: RunEvent) -> Iterator[dict[str, Any]]:
    """The JSON object of an event that the command gets; none for others."""
    match event:
        case CulpritRecord() as record:
            yield {"event": "culprit", **asdict(record)}
        case GroupLost(record=record):
            yield {"event": "group_lost"} | {n: getattr(record, n) for n in ("group", "rank", "cause", "is_given_up")}
        case GroupRejoined(member=member, step=step):
            yield {"event": "group_rejoined", "group": member.group, "step": step}
        case RestartRecord(is_undo=True, step=step, rework_steps=num_steps):
            yield {"event": "undo", "step": step, "num_steps": num_steps}
        case MachineQuarantined(machine=machine, cause=cause, reason=reason):
            yield {"event": "quarantine", "machine": machine, "cause": cause, "reason": reason}
        case ExaminationRecord() as record:
            yield {
                "event": "examination",
                "machine": record.machine,
                "has_passed": not record.reason,
                "reason": record.reason,
                "wait_s": record.wait_s,
            }
