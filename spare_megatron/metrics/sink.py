"""What takes the numbers of a run, and how one that may be slow or fail is kept from the run."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

Value = float | int | str
"""A number; or a word, which only the file of JSON lines takes."""

CLOSE_TIMEOUT_S = 30.0
"""Longest wait at the end of a run for a sink that has not taken everything yet."""

REST_S = 2.0
"""How long a sink that has taken all there was rests. What came meanwhile it takes at once: so each step costs half of
what it costs alone, where threads and processes wake up for it."""

_MOST_WAITING = 4096


class Sink(Protocol):
    """Takes the numbers of steps."""

    def write(self, values: Mapping[str, Value]) -> None:
        """Takes the values of one step; `step` is among them. A step that is computed again comes again."""

    def close(self) -> None:
        """Lets what was taken be seen by others."""


class DetachedSink:
    """A sink with a thread of its own: it never keeps its caller waiting, and its errors are told, not raised.

    Args:
        name: For people.
        open_sink: Opens it, in the thread.
        on_failure: Told once, in that thread, why it takes nothing any more.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], on_failure: Callable[[str], None]) -> None:
        self._name = name
        self._open_sink = open_sink
        self._on_failure = on_failure
        self._waiting: queue.Queue[Mapping[str, Value] | None] = queue.Queue(_MOST_WAITING)
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, values: Mapping[str, Value]) -> None:
        try:
            self._waiting.put_nowait(values)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        ends_at_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread is alive
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(max(0.0, ends_at_s - time.monotonic()))
        if self._thread.is_alive():
            self._on_failure(f"{self._name} has not taken everything within {CLOSE_TIMEOUT_S:g} s and is left behind")
        if self._num_dropped:
            self._on_failure(f"{self._name} was too slow for {self._num_dropped} steps, which it lacks")

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            while (values := self._waiting.get()) is not None:
                sink.write(values)
                if self._waiting.empty():
                    self._closing.wait(REST_S)
            sink.close()
        except Exception as error:  # noqa: BLE001  (whatever it is, it must not end the run)
            self._on_failure(f"{self._name} takes no more metrics: {type(error).__name__}: {error}")
            while self._waiting.get() is not None:
                pass
