"""The faults of one rank, carried out at the chosen moment of the chosen step."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence

from spare_megatron.core.phases import Phase
from spare_megatron.faults.trace import Fault


class InjectedFault(RuntimeError):
    """An exception that was asked for in `faults.trace`."""


class Injector:
    """A probe that a rank calls at every moment it could be hit at.

    Attributes:
        phases: The phases at which something may happen; the others need not be probed.
    """

    def __init__(self, faults: Sequence[Fault], report: Callable[[Fault], None]) -> None:
        """Arms the faults.

        Args:
            faults: The faults of this rank and no other.
            report: Called just before a fault; must have stored what it was told when it returns.
        """
        self.phases = frozenset(fault.phase for fault in faults)
        self._pending = list(faults)
        self._report = report
        self._step = -1
        self._num_reached: Counter[Phase] = Counter()

    @property
    def step(self) -> int:
        """The step that the rank is in; -1 before the first."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if step != self._step:
            self._num_reached.clear()
        self._step = step

    def __call__(self, phase: Phase) -> None:
        """Carries out the fault of this moment, if there is one. Each is carried out at most once.

        Raises:
            InjectedFault: The fault is of the kind `raise`.
        """
        if phase not in self.phases:
            return
        self._num_reached[phase] += 1
        moment = (self._step, phase, self._num_reached[phase])
        for fault in [fault for fault in self._pending if (fault.step, fault.phase, fault.ordinal) == moment]:
            self._pending.remove(fault)
            self._report(fault)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise InjectedFault(f"{phase} of step {fault.step}, time {fault.ordinal}: faults.trace asked for it")
