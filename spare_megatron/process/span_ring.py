"""A rank's spans, in memory shared with its supervisor, and the time of its passes, which alone shows a slow rank."""

import contextlib
import ctypes
import struct
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Generic, Protocol, TypeVar

from spare_megatron.core.machines.failure_detector import OPERATIONS, Operation
from spare_megatron.journal.spans import RECOVERY_NAMES, RecoveryStage, Span
from spare_megatron.stacking.plans import Microbatch

Mark = TypeVar("Mark")

_MOST_MEDIANS = 2.0


class PassTimes(Generic[Mark]):
    """Adds up the passes of a step, without the reading of data. `mark` returns a mark in what the device computes,
    `between_s` the seconds between two past marks. `stretch` gets the seconds of each pass and may sleep, as a part of
    the pass.
    """

    def __init__(self, mark: Callable[[], Mark], between_s: Callable[[Mark, Mark], float]) -> None:
        self._mark = mark
        self._between_s = between_s
        self._began: Mark | None = None
        self._passes: dict[bool, list[list[tuple[Mark, Mark]]]] = {True: [], False: []}  # by whether it is forward
        self._pieces: list[tuple[Mark, Mark]] = []  # of the last pass, which reading data divides
        self.num_forward = 0
        """Forward passes of the step so far, one for each chunk of the model that a microbatch passes here."""
        self.reading_s = 0.0
        """Seconds that passes of the step were interrupted to read data."""
        self.stretch: Callable[[float], None] | None = None

    def begin_step(self) -> None:
        self._began = None
        for passes in self._passes.values():
            passes.clear()
        self.num_forward = 0
        self.reading_s = 0.0

    @property
    def is_in_pass(self) -> bool:
        return self._began is not None

    def start_pass(self, *, is_forward: bool = False) -> None:
        self._pieces = []
        self._passes[is_forward].append(self._pieces)
        self._began = self._mark()

    def resume_pass(self) -> None:
        """Goes on with the pass that ended last."""
        self._began = self._mark()

    def end_pass(self) -> None:
        """Ends the pass, also one that raised."""
        if self._began is not None:
            if self.stretch is not None:
                self.stretch(self._between_s(self._began, self._mark()))
            self._pieces.append((self._began, self._mark()))
            self._began = None

    def total_s(self) -> float:
        return sum(sum(self._seconds(is_forward)) for is_forward in (True, False))

    def usual_s(self) -> float:
        """As `total_s`, but no pass counts as more than `_MOST_MEDIANS` times the median of its direction."""
        total_s = 0.0
        for is_forward in (True, False):
            found = self._seconds(is_forward)
            most_s = _MOST_MEDIANS * median(found) if found else 0.0
            total_s += sum(min(spent_s, most_s) for spent_s in found)
        return total_s

    def _seconds(self, is_forward: bool) -> list[float]:
        passes = self._passes[is_forward]
        return [sum(self._between_s(began, ended) for began, ended in pieces) for pieces in passes]


NUM_SPANS = 4096
"""Capacity of a rank's ring, some dozens of steps."""


FORWARD = "forward"

BACKWARD = "backward"

NAMES = (*map(str, OPERATIONS), FORWARD, BACKWARD, *RECOVERY_NAMES.values())


_CODES = {name: code for code, name in enumerate(NAMES)}

_OPERATION_CODES = {operation: _CODES[str(operation)] for operation in OPERATIONS}


class _Slot(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_int32),
        ("shard", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("began_s", ctypes.c_double),
        ("ended_s", ctypes.c_double),
    )


_SLOT = struct.Struct("=iiiidd")

assert _SLOT.size == ctypes.sizeof(_Slot)


class Ring(ctypes.Structure):
    """The shared memory, written by the rank alone."""

    _fields_ = (("num_spans", ctypes.c_uint64), ("slots", _Slot * NUM_SPANS))


def read_spans(ring: Ring, first: int) -> tuple[list[Span], int]:
    """The spans from number `first` on that are not overwritten, and the number of the next span."""
    end = ring.num_spans
    numbers = range(max(first, end - NUM_SPANS), end)
    found = []
    for number in numbers:
        slot = ring.slots[number % NUM_SPANS]
        found.append(Span(NAMES[slot.name], slot.step, slot.began_s, slot.ended_s, slot.shard, slot.index))
    overwritten = max(0, ring.num_spans - NUM_SPANS + 1 - numbers.start)
    return found[overwritten:], end


class Ranges(Protocol):
    """Receives the spans of a rank's main thread as they begin and end, the one that began last first."""

    def push(self, name: str, /) -> None:
        """A span begins."""

    def pop(self) -> None:
        """The span that began last ends."""


def name_of_pass(kind: str, microbatch: Microbatch) -> str:
    return f"{kind} of shard {microbatch.shard}, microbatch {microbatch.index}"


class SpanRecorder:
    """The rank's end of the ring, for its main thread. Spans may nest; recovery stages overlap with others. Megatron's
    schedule only shows a backward pass's start: its span ends when the main thread turns to something else. `ranges`
    gets all spans but recovery stages; set it between two spans.
    """

    def __init__(self, ring: Ring, passes: PassTimes) -> None:
        self._ring = ring
        self.passes = passes
        self.ranges: Ranges | None = None
        self._slots = memoryview(ring.slots).cast("B")
        self._backward: tuple[Microbatch, float] | None = None
        self.step = -1

    @contextlib.contextmanager
    def during(self, operation: Operation, *, in_backward: bool = False) -> Iterator[None]:
        interrupted = self._backward
        began_s = self._turn()
        is_reading = operation is Operation.STORAGE and self.passes.is_in_pass
        if is_reading:
            self.passes.end_pass()
        if self.ranges is not None:
            self.ranges.push(operation)
        try:
            yield
        finally:
            if is_reading:
                self.passes.reading_s += time.monotonic() - began_s
                self.passes.resume_pass()
            self._add(_OPERATION_CODES[operation], began_s, self._turn(), None)
            if self.ranges is not None:
                self.ranges.pop()
            if in_backward and interrupted is not None:
                self._resume_backward(interrupted[0])

    @contextlib.contextmanager
    def forward(self, microbatch: Microbatch) -> Iterator[None]:
        began_s = self._turn()
        if self.ranges is not None:
            self.ranges.push(name_of_pass(FORWARD, microbatch))
        self.passes.num_forward += 1
        self.passes.start_pass(is_forward=True)
        try:
            yield
        finally:
            self.passes.end_pass()
            self._add(_CODES[FORWARD], began_s, self._turn(), microbatch)
            if self.ranges is not None:
                self.ranges.pop()

    def backward(self, microbatch: Microbatch) -> None:
        now_s = self._turn()
        self.passes.start_pass()
        self._show_backward(microbatch, now_s)

    def _resume_backward(self, microbatch: Microbatch) -> None:
        """Goes on with a pass that something else has interrupted: it stays one pass."""
        self.passes.resume_pass()
        self._show_backward(microbatch, time.monotonic())

    def _show_backward(self, microbatch: Microbatch, began_s: float) -> None:
        self._backward = (microbatch, began_s)
        if self.ranges is not None:
            self.ranges.push(name_of_pass(BACKWARD, microbatch))

    def recovered(self, stage: RecoveryStage, began_s: float, ended_s: float) -> None:
        """Records a span of a recovery stage, in seconds of the monotonic clock."""
        self._add(_CODES[RECOVERY_NAMES[stage]], began_s, ended_s, None)

    def _turn(self) -> float:
        """Ends the backward pass that is under way, if any; returns the time."""
        if self._backward is None:
            return time.monotonic()
        microbatch, began_s = self._backward
        self._backward = None
        self.passes.end_pass()
        now_s = time.monotonic()
        self._add(_CODES[BACKWARD], began_s, now_s, microbatch)
        if self.ranges is not None:
            self.ranges.pop()
        return now_s

    def _add(self, code: int, began_s: float, ended_s: float, microbatch: Microbatch | None) -> None:
        number = self._ring.num_spans
        shard, index = (-1, -1) if microbatch is None else microbatch
        # In one call: field by field it takes several times as long.
        at = number % NUM_SPANS * _SLOT.size
        _SLOT.pack_into(self._slots, at, code, shard, index, self.step, began_s, ended_s)
        self._ring.num_spans = number + 1
