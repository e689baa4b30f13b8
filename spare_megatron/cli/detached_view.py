"""Shows a run's progress from a thread of its own, so that a stalled output never delays the run."""

import contextlib
import queue
import threading
import time
from types import TracebackType
from typing import Any, Protocol, Self

CLOSE_TIMEOUT_S = 10.0
"""Longest wait at the end of a run for output not yet written."""

_MOST_WAITING = 4096
_REFRESH_S = 0.25


class View(Protocol):
    """Displays events; all calls come from one thread."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def on_event(self, event: Any) -> None:
        """Shows an event."""

    def refresh(self) -> None:
        """Shows what has changed; called several times a second."""


class DetachedView:
    """Runs a view in a thread of its own; drops events if the output, which outlasts errors, is far behind."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(queue.Full):  # the thread is blocked on its output
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)

    def on_event(self, event: Any) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(event)

    def _run(self) -> None:
        with self._view as view:
            self._show(view)

    def _show(self, view: View) -> None:
        next_s = 0.0
        while True:
            if time.monotonic() >= next_s:
                view.refresh()
                next_s = time.monotonic() + _REFRESH_S
            with contextlib.suppress(queue.Empty):
                event = self._waiting.get(timeout=max(0.0, next_s - time.monotonic()))
                if event is None:
                    return
                view.on_event(event)
