"""Carries out the faults of one rank, each at its phase and step."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spare_megatron.faults.points import PHASES_BETWEEN_STEPS, PHASES_OF_A_MICROBATCH, Fault, FaultPoint

_FOR_GOOD_S = 1e6
_LONGEST_SLEEP_S = 0.05
"""So often a slow rank shows progress: slow is not lost."""

Slowable = Literal["slow", "slow_data"]
"""Kinds that stretch what a rank does itself: its passes, or its reading of data."""


class InjectedFault(RuntimeError):
    """The exception of a fault of kind `raise`."""


@dataclass(frozen=True, slots=True)
class _Slowness:
    factor: float
    until_s: float


class Injector:
    """Carries out faults; a rank calls it at every phase in `phases`, and may skip the others."""

    def __init__(
        self, faults: Sequence[Fault], report: Callable[[Fault], None], request: Callable[[Fault], None]
    ) -> None:
        """Arms the faults of this rank. `report` is called just before a fault, and must have stored it when it
        returns, as the process may die. `request` is called for a fault that a rank cannot inflict on itself; it
        returns once the fault has struck and, if it stops this process, has passed.
        """
        self.phases = frozenset(fault.phase for fault in faults)
        self._pending = list(faults)
        self._report = report
        self._request = request
        self._delay: tuple[int, FaultPoint, float] | None = None
        self.can_slow = frozenset(fault.kind for fault in faults).intersection(get_args(Slowable))
        """Kinds of which `stretch` must be called."""
        self._slowness: dict[str, _Slowness] = {}
        self._step = -1
        self._num_reached: Counter[FaultPoint] = Counter()
        self._last: dict[FaultPoint, int] = {}
        """Phase of a microbatch -> the last time in this step that it is sure to be reached."""

    @property
    def step(self) -> int:
        """Step the rank is in; -1 before the first."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if step != self._step:
            self._num_reached.clear()
            self._last.clear()
        self._step = step

    def begin_passes(self, num_microbatches: int) -> None:
        """Call before that many microbatches of a step are computed. A fault at a later one of the step strikes at the
        last of these, since work is dealt by pace, which no trace foresees; if there are none it strikes now.
        """
        self._last = {phase: self._num_reached[phase] + num_microbatches for phase in PHASES_OF_A_MICROBATCH}
        for phase in sorted(self.phases & PHASES_OF_A_MICROBATCH):
            if not self._last[phase]:
                self._strike([fault for fault in self._pending if (fault.step, fault.phase) == (self._step, phase)])

    def __call__(self, phase: FaultPoint) -> None:
        """Carries out the faults due at this phase, each at most once; raises InjectedFault for the kind `raise`."""
        if phase not in self.phases:
            return
        if self._delay is not None and self._delay[:2] == (self._step, phase):
            time.sleep(self._delay[2])
        self._num_reached[phase] += 1
        self._strike([fault for fault in self._pending if self._is_reached(fault, phase)])

    def _strike(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._pending.remove(fault)
            self._report(fault)
            self._carry_out(fault)

    def stretch(self, kind: Slowable, seconds: float, progress: Callable[[], None]) -> None:
        """Makes what took `seconds` take the factor of the fault that slows it, if one does. Calls `progress` often."""
        slowness = self._slowness.get(kind)
        if slowness is None or time.monotonic() >= slowness.until_s:
            return
        left_s = (slowness.factor - 1.0) * seconds
        while left_s > 0.0:
            began_s = time.monotonic()
            time.sleep(min(left_s, _LONGEST_SLEEP_S))
            left_s -= time.monotonic() - began_s  # a sleep may be longer than asked for
            progress()

    def _is_reached(self, fault: Fault, phase: FaultPoint) -> bool:
        if fault.phase is not phase:
            return False
        # Restarts, writes and copies take several steps, so these phases may be reached late.
        if phase in PHASES_BETWEEN_STEPS or phase is FaultPoint.REPAIR:
            return fault.step <= self._step
        ordinal = min(fault.ordinal, self._last.get(phase, fault.ordinal))
        return (fault.step, ordinal) == (self._step, self._num_reached[phase])

    def _carry_out(self, fault: Fault) -> None:
        if fault.kind in HANDLERS:
            HANDLERS[fault.kind](self, fault)
        else:
            self._request(fault)

    def delay(self, fault: Fault) -> None:
        self._delay = (fault.step, fault.phase, fault.seconds or 0.0)

    def slow(self, fault: Fault) -> None:
        until_s = time.monotonic() + _lasts_s(fault)
        self._slowness[fault.kind] = _Slowness(fault.factor or 1.0, until_s)


def _lasts_s(fault: Fault) -> float:
    return _FOR_GOOD_S if fault.seconds is None else fault.seconds


def _raise(_: Injector, fault: Fault) -> None:
    raise InjectedFault(f"{fault.phase} of step {fault.step}, time {fault.ordinal}: faults.trace asked for it")


def _set_wall_clock_ahead(seconds: float) -> None:
    """Shifts `time.time` of this process alone: other processes share the machine's clock."""
    clock = time.time
    time.time = lambda: clock() + seconds


def fill_disk(fd: int, seconds: float | None) -> None:
    """Makes every write to the descriptor fail with a full disk, for some seconds or for good."""
    real = os.dup(fd)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), fd)
    if seconds is not None:
        timer = threading.Timer(seconds, os.dup2, (real, fd))
        timer.daemon = True
        timer.start()


HANDLERS: dict[str, Callable[[Injector, Fault], None]] = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "hang": lambda _, fault: time.sleep(_lasts_s(fault)),
    "delay": Injector.delay,
    "slow": Injector.slow,
    "slow_data": Injector.slow,
    "clock_jump": lambda _, fault: _set_wall_clock_ahead(fault.seconds or 0.0),
}
"""What a rank does to itself without its training state. It requests the other kinds."""

JOURNAL_HANDLERS: dict[str, Callable[[int, float | None], None]] = {"disk_full": fill_disk}
"""What a rank does to the file descriptor of its journal."""
