"""What a run shows while it goes on: a terminal that stalls, a full disk or a closed pipe does it no harm."""

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Protocol, Self

from rich.console import Console

CLOSE_TIMEOUT_S = 10.0
"""Longest wait at the end of a run for an output that has not taken everything yet."""

_MOST_WAITING = 4096
_REFRESH_S = 0.25
_UNBROKEN_WIDTH = 1 << 20
"""Characters; more than any line has."""


class View(Protocol):
    """Shows events; all of it in one thread."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(self, event: Any) -> None:
        """Shows an event."""

    def refresh(self) -> None:
        """Shows what has changed meanwhile; called several times a second."""


class RunConsole(Console):
    """Where a run or what was computed is shown.

    Without a terminal, lines and tables are as wide as their text: nothing is wrapped or cut to 80 columns. COLUMNS
    still sets a width. A pipe whose reader has left is an error like a full disk; rich would throw away what goes to
    stdout, whichever stream it is that is closed, and end the program.
    """

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, force_terminal: bool | None = None
    ) -> None:
        super().__init__(file=file, stderr=stderr, force_terminal=force_terminal)
        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _UNBROKEN_WIDTH

    def on_broken_pipe(self) -> None:
        """Raises the error again."""
        raise BrokenPipeError(errno.EPIPE, "its reader has left")


class DetachedView:
    """A view with a thread of its own: it never keeps its caller waiting, and what it cannot show is shown nowhere.

    Args:
        view: The view.
        console: Where it shows.
    """

    def __init__(self, view: View, console: Console) -> None:
        self._view = view
        self._console = console
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(queue.Full):  # then the thread waits for its output
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)

    def take(self, event: Any) -> None:
        """Has an event shown, unless the output is far behind."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(event)

    def _run(self) -> None:
        with outlasting_output(self._console.file), self._view as view:
            self._show(view)
            return
        while self._waiting.get() is not None:
            pass

    def _show(self, view: View) -> None:
        """Until the end of the run."""
        next_s = 0.0
        while True:
            if time.monotonic() >= next_s:
                view.refresh()
                next_s = time.monotonic() + _REFRESH_S
            with contextlib.suppress(queue.Empty):
                event = self._waiting.get(timeout=max(0.0, next_s - time.monotonic()))
                if event is None:
                    return
                view.take(event)


@contextlib.contextmanager
def outlasting_output(stream: IO[str]) -> Iterator[None]:
    """Around what is shown: if the stream takes nothing any more, nothing is shown there from then on, and that is all.

    What waits in its buffer is gone, too, or it would be an error again when the program ends.
    """
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
