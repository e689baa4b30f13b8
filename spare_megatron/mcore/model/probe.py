"""The probe interface: a rank reports its fault points, pending operations and progress to it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.stacking.plans import Microbatch


class Probe(Protocol):
    """Receives a rank's reports. A call that injects a fault may not return."""

    @property
    def phases(self) -> frozenset[FaultPoint]:
        """The fault points to report; hooks that cost time are installed only for these."""

    def __call__(self, phase: FaultPoint, /) -> None:
        """The rank has reached a fault point."""

    def begin_passes(self, num_microbatches: int, /) -> None:
        """The rank starts to compute that many microbatches of a step, perhaps none; audits come on top."""

    def progress(self) -> None:
        """The pending operation has advanced, for example by a layer."""

    def during(self, operation: Operation, /, *, in_backward: bool = False) -> AbstractContextManager[None]:
        """In this context the operation is pending. `in_backward`: it interrupts a backward pass that then goes on."""

    def forward(self, microbatch: Microbatch, /) -> AbstractContextManager[None]:
        """In this context a microbatch's forward pass through a chunk runs."""

    def backward(self, microbatch: Microbatch, /) -> None:
        """A microbatch's backward pass through a chunk starts."""


class SilentProbe:
    """A probe that ignores all reports."""

    phases: frozenset[FaultPoint] = frozenset()

    def __call__(self, phase: FaultPoint, /) -> None:
        pass

    def begin_passes(self, num_microbatches: int, /) -> None:
        pass

    def progress(self) -> None:
        pass

    def during(
        self,
        operation: Operation,  # noqa: ARG002 - the protocol's
        /,
        *,
        in_backward: bool = False,  # noqa: ARG002 - the protocol's
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, microbatch: Microbatch, /) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        return nullcontext()

    def backward(self, microbatch: Microbatch, /) -> None:
        pass
