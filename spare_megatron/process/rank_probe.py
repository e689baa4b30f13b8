"""A rank's probe: at the instrumented points of a step it injects faults and updates the heartbeat page."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.injection import Injector
from spare_megatron.faults.points import FaultPoint
from spare_megatron.process.heartbeats import HeartbeatWriter
from spare_megatron.store.interface import StoreLost

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
