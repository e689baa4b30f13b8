"""A rank's beacon: a page of memory that it shares with its supervisor, and a thread that beats in it.

Each field has one writer and is aligned, so that it is read whole without a lock.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import BaseContext

from spare_megatron.core.failure_detector import BEATS_PER_INTERVAL, OPERATIONS, Operation, Pulse
from spare_megatron.process.span_ring import PassTimes, Ring, SpanRecorder

_DECAY = 0.98
"""What is left of a slowest time after another operation of its kind: slow ones are forgotten in some hundred."""


class HeartbeatPage(ctypes.Structure):
    """The shared memory. Written by the rank alone, but for `end_asked`, which is its supervisor's."""

    _fields_ = (
        ("beats", ctypes.c_uint64),
        ("progress", ctypes.c_uint64),
        ("operation", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("progress_at_s", ctypes.c_double),
        ("slowest_s", ctypes.c_double * len(OPERATIONS)),
        ("end_asked", ctypes.c_uint64),
        ("ring", Ring),
    )


def new_page(context: BaseContext) -> HeartbeatPage:
    """A page in memory that processes started from this context share."""
    page: HeartbeatPage = context.RawValue(HeartbeatPage)
    page.step = -1
    return page


def read_page(page: HeartbeatPage, starved_s: float) -> Pulse:
    """What the rank shows now. Fields may be some microseconds apart.

    Args:
        page: Its page.
        starved_s: What `starvation` says of it.
    """
    index = page.operation
    return Pulse(
        beats=page.beats,
        progress=page.progress,
        operation=OPERATIONS[index],
        step=page.step,
        progress_at_s=page.progress_at_s,
        slowest_s=page.slowest_s[index],
        starved_s=starved_s,
    )


class HeartbeatWriter:
    """The writing end."""

    def __init__(self, page: HeartbeatPage, passes: PassTimes) -> None:
        self._page = page
        self.spans = SpanRecorder(page.ring, passes)
        self._thread = threading.get_ident()
        self._index = 0
        self._at_s = time.monotonic()
        self._num_steps = 0
        self._spent_s = [0.0] * len(OPERATIONS)

    def start_beating(self, interval_s: float) -> None:
        """Beats from a thread of its own until the process ends."""
        threading.Thread(target=self._beat, args=(interval_s / BEATS_PER_INTERVAL,), daemon=True).start()

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step. The first step warms everything up, and is no measure of the others."""
        self._page.step = self.spans.step = step
        self.spans.passes.begin_step()
        self._num_steps += 1

    def progress(self) -> None:
        """The main thread has got on with the pending operation."""
        self._note(self._index)

    def leave(self) -> None:
        """From here on the process ends, and its silence means nothing."""
        self._note(OPERATIONS.index(Operation.END))

    @contextlib.contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        """The operation is pending inside the block; what was pending before is so again after it."""
        before = self._index
        self._note(OPERATIONS.index(operation))
        # What has no name of its own is what lies between the spans.
        span = contextlib.nullcontext() if operation is Operation.COMPUTE else self.spans.during(operation)
        try:
            with span:
                yield
        finally:
            self._note(before)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Storage is pending inside the block, if it is the main thread that writes there."""
        is_main = threading.get_ident() == self._thread
        return self.during(Operation.STORAGE) if is_main else contextlib.nullcontext()

    def take_split(self) -> dict[Operation, float]:
        """Seconds that the main thread has spent in each operation since this was last asked, without those inside."""
        self._note(self._index)
        split = {operation: spent_s for operation, spent_s in zip(OPERATIONS, self._spent_s, strict=True) if spent_s}
        self._spent_s = [0.0] * len(OPERATIONS)
        return split

    def _note(self, index: int) -> None:
        now_s = time.monotonic()
        self._spent_s[self._index] += now_s - self._at_s
        if self._num_steps > 1:
            slowest_s = self._page.slowest_s
            slowest_s[self._index] = max(now_s - self._at_s, slowest_s[self._index] * _DECAY)
        self._index, self._at_s = index, now_s
        self._page.operation, self._page.progress_at_s = index, now_s
        self._page.progress += 1

    def _beat(self, pause_s: float) -> None:
        while True:
            self._page.beats += 1
            time.sleep(pause_s)
