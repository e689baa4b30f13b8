"""A probe is told what a rank is about: the moments that a fault can be aimed at, and that it gets on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.stacking.plans import Microbatch


class Probe(Protocol):
    """What it does when it is told, dying included, is its own affair."""

    @property
    def phases(self) -> frozenset[FaultPoint]:
        """The moments it wants. Hooks that cost something are installed for these alone."""

    def __call__(self, phase: FaultPoint, /) -> None:
        """A moment of `core.fault_points`."""

    def progress(self) -> None:
        """The rank has got on with the pending operation: a layer is done."""

    def during(self, operation: Operation, /) -> AbstractContextManager[None]:
        """Inside the block this operation is pending."""

    def forward(self, microbatch: Microbatch, /) -> AbstractContextManager[None]:
        """The block is the forward pass of a microbatch through a chunk."""

    def backward(self, microbatch: Microbatch, /) -> None:
        """The backward pass of a microbatch through a chunk begins."""


class SilentProbe:
    """A probe that asks for nothing and does nothing."""

    phases: frozenset[FaultPoint] = frozenset()

    def __call__(self, phase: FaultPoint, /) -> None:
        """Nothing."""

    def progress(self) -> None:
        """Nothing."""

    def during(self, operation: Operation, /) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Nothing."""
        return nullcontext()

    def forward(self, microbatch: Microbatch, /) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Nothing."""
        return nullcontext()

    def backward(self, microbatch: Microbatch, /) -> None:
        """Nothing."""
