"""A rank's heartbeat page, shared with its supervisor, and its probe, which updates the page at the instrumented points
of a step and injects faults there. Each aligned field has one writer, so reads need no lock.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.context import BaseContext

from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL, OPERATIONS, Operation, Pulse
from spare_megatron.faults.injection import Injector
from spare_megatron.faults.points import FaultPoint
from spare_megatron.process.span_ring import PassTimes, Ring, SpanRecorder
from spare_megatron.store.interface import StoreLost

_MOST_PAUSE_S = 0.5
_POLL_S = 0.001
_DECAY = 0.98
"""Factor on a slowest time for each later operation of its kind, so that outliers fade in some hundred operations."""


class HeartbeatPage(ctypes.Structure):
    """The shared memory. The rank writes all fields except `end_asked` and `leave_asked`, which its supervisor writes:
    `end_asked` is 1 if the run is to end with the step under way, and 2 once that has taken too long. Until
    `pause_until_s`, which an examination writes, the rank begins no step.

    The totals from `num_steps` to `spent_s` cover committed steps, and move when one is. `waits` is moved by another
    thread than the rest, while the main thread may be blocked by other groups.
    """

    _fields_ = (
        ("beats", ctypes.c_uint64),
        ("progress", ctypes.c_uint64),
        ("waits", ctypes.c_uint64),
        ("operation", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("progress_at_s", ctypes.c_double),
        ("slowest_s", ctypes.c_double * len(OPERATIONS)),
        ("num_steps", ctypes.c_uint64),
        ("num_passes", ctypes.c_uint64),
        ("pass_s", ctypes.c_double),
        ("reading_s", ctypes.c_double),
        ("spent_s", ctypes.c_double * len(OPERATIONS)),
        ("end_asked", ctypes.c_uint64),
        ("leave_asked", ctypes.c_uint64),
        ("pause_until_s", ctypes.c_double),
        ("is_paused", ctypes.c_uint64),
        ("ring", Ring),
    )


def new_page(context: BaseContext) -> HeartbeatPage:
    """A page in memory shared with the processes that are started from this context."""
    page: HeartbeatPage = context.RawValue(HeartbeatPage)
    page.step = -1
    return page


def read_page(page: HeartbeatPage, starved_s: float) -> Pulse:
    """What the page shows now, fields up to microseconds apart; `starved_s` is what `Starvation` reports."""
    index = page.operation
    return Pulse(
        beats=page.beats,
        progress=page.progress,
        waits=page.waits,
        operation=OPERATIONS[index],
        step=page.step,
        progress_at_s=page.progress_at_s,
        slowest_s=page.slowest_s[index],
        starved_s=starved_s,
    )


@contextlib.contextmanager
def between_steps(page: HeartbeatPage, limit_s: float) -> Iterator[int]:
    """Runs the block while the rank waits between two steps, and yields the last one; the rank goes on after `limit_s`
    at the latest. If it ends no step within that time, the block runs at once, with -1.
    """
    page.pause_until_s = waits_until_s = time.monotonic() + limit_s
    try:
        while not page.is_paused and time.monotonic() < waits_until_s:
            time.sleep(_POLL_S)
        is_paused = bool(page.is_paused)
        page.pause_until_s = time.monotonic() + limit_s if is_paused else 0.0
        yield page.step if is_paused else -1
    finally:
        page.pause_until_s = 0.0


class HeartbeatWriter:
    """The rank's end of the page, and its recorder of spans."""

    def __init__(self, page: HeartbeatPage, passes: PassTimes) -> None:
        self._page = page
        self.spans = SpanRecorder(page.ring, passes)
        self._thread = threading.get_ident()
        self._index = 0
        self._at_s = time.monotonic()
        self._waits = 0  # as of then
        self._num_steps = 0
        self._spent_s = [0.0] * len(OPERATIONS)

    @property
    def is_cut_off(self) -> bool:
        """Whether the rank is to abandon the step under way and save its own state."""
        return bool(self._page.end_asked > 1)

    def start_beating(self, interval_s: float, on_cut_off: Callable[[], None]) -> None:
        """Counts beats from a daemon thread until the process ends, and calls back at each while `is_cut_off`."""
        pause_s = min(interval_s / BEATS_PER_INTERVAL, _MOST_PAUSE_S)
        threading.Thread(target=self._beat, args=(pause_s, on_cut_off), daemon=True).start()

    def begin_step(self, step: int) -> None:
        """Attributes what follows to this step. The first step warms up and does not count among the slowest times."""
        self._page.step = self.spans.step = step
        self.spans.passes.begin_step()
        self._num_steps += 1

    def progress(self) -> None:
        self._note(self._index)

    def wait_for_groups(self) -> None:
        """Shows that the device waits for other groups. Called by one thread other than the main one."""
        self._page.waits += 1

    def leave(self) -> None:
        """Marks the process as ending: it may be silent for the time of a first operation before it counts as lost."""
        self._note(OPERATIONS.index(Operation.END))

    @contextlib.contextmanager
    def during(self, operation: Operation, *, in_backward: bool = False) -> Iterator[None]:
        """Marks the operation as pending inside the block; restores the previous one, and a backward pass, after it."""
        before = self._index
        self._note(OPERATIONS.index(operation))
        # COMPUTE is what lies between the spans.
        is_span = operation is not Operation.COMPUTE
        span = self.spans.during(operation, in_backward=in_backward) if is_span else contextlib.nullcontext()
        try:
            with span:
                yield
        finally:
            self._note(before)

    def pause(self, leave_device: Callable[[], None]) -> None:
        """Between two steps: waits while an examination asks for the device, unless the run is to end."""
        page = self._page
        if time.monotonic() < page.pause_until_s:
            with self.during(Operation.STORAGE):
                leave_device()
                page.is_paused = 1
                while time.monotonic() < page.pause_until_s and not page.end_asked:
                    time.sleep(_POLL_S)
                page.is_paused = 0

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Marks storage as pending inside the block, if the calling thread is the main one."""
        is_main = threading.get_ident() == self._thread
        return self.during(Operation.STORAGE) if is_main else contextlib.nullcontext()

    def take_split(self) -> dict[Operation, float]:
        """Seconds that the main thread has spent in each operation since the last call, nested operations excluded."""
        self._note(self._index)
        split = {operation: spent_s for operation, spent_s in zip(OPERATIONS, self._spent_s, strict=True) if spent_s}
        self._spent_s = [0.0] * len(OPERATIONS)
        return split

    def end_step(self) -> dict[Operation, float]:
        """Adds the committed step to the totals of the page. Returns as `take_split`."""
        split, page, passes = self.take_split(), self._page, self.spans.passes
        for operation, spent_s in split.items():
            page.spent_s[OPERATIONS.index(operation)] += spent_s
        page.pass_s += passes.total_s()
        page.reading_s += passes.reading_s
        page.num_passes += passes.num_forward
        page.num_steps += 1
        return split

    def _note(self, index: int) -> None:
        now_s = time.monotonic()
        self._spent_s[self._index] += now_s - self._at_s
        if self._num_steps > 1 and self._waits == self._page.waits:
            slowest_s = self._page.slowest_s
            slowest_s[self._index] = max(now_s - self._at_s, slowest_s[self._index] * _DECAY)
        self._index, self._at_s, self._waits = index, now_s, self._page.waits
        self._page.operation, self._page.progress_at_s = index, now_s
        self._page.progress += 1

    def _beat(self, pause_s: float, on_cut_off: Callable[[], None]) -> None:
        while True:
            self._page.beats += 1
            if self.is_cut_off:
                on_cut_off()
            time.sleep(pause_s)


CUT_OFF = "the run is to end, and its step has taken too long for that"
"""Why a rank goes on without the store, as if it had lost it: it saves its state alone."""


class RankProbe:
    """The probe of one rank; a `mcore.model.probe.Probe`. What no fault strikes goes to its `heartbeat` at once."""

    def __init__(self, injector: Injector, heartbeat: HeartbeatWriter) -> None:
        self._injector = injector
        self.heartbeat = heartbeat
        self.progress = heartbeat.progress
        self.forward, self.backward = heartbeat.spans.forward, heartbeat.spans.backward
        if "slow" in injector.can_slow:
            heartbeat.spans.passes.stretch = lambda seconds: injector.stretch("slow", seconds, heartbeat.progress)

    @property
    def phases(self) -> frozenset[FaultPoint]:
        return self._injector.phases

    def __call__(self, phase: FaultPoint) -> None:
        """Injects faults. Raises StoreLost before a microbatch if the rank is to give the step up."""
        if phase is FaultPoint.FORWARD and self.heartbeat.is_cut_off:
            raise StoreLost(CUT_OFF)
        self._injector(phase)

    def begin_passes(self, num_microbatches: int) -> None:
        self._injector.begin_passes(num_microbatches)

    def begin_step(self, step: int) -> None:
        self._injector.step = step
        self.heartbeat.begin_step(step)

    def between_steps(self, step: int, phase: FaultPoint) -> None:
        """Injects faults at a point between two steps, of which `step` is the next."""
        self._injector.step = step
        self._injector(phase)

    def during(self, operation: Operation, *, in_backward: bool = False) -> AbstractContextManager[None]:
        pending = self.heartbeat.during(operation, in_backward=in_backward)
        is_data = operation is Operation.STORAGE and "slow_data" in self._injector.can_slow
        return self._slow_data(pending) if is_data else pending

    @contextlib.contextmanager
    def _slow_data(self, pending: AbstractContextManager[None]) -> Iterator[None]:
        with pending:
            began_s = time.monotonic()
            yield
            self._injector.stretch("slow_data", time.monotonic() - began_s, self.heartbeat.progress)

    def pace_s(self, num_chunks: int) -> float:
        """Seconds per microbatch of the step so far, single long passes cut; 0 without any. Waits for a GPU."""
        passes = self.heartbeat.spans.passes
        return passes.usual_s() * num_chunks / passes.num_forward if passes.num_forward else 0.0
