"""A probe that records its calls, for tests of their order."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.plans import Microbatch


class RecordingProbe:
    """Writes down when it is called and whether some and not all parameters have their gradient by then."""

    def __init__(self, phases: Mapping[FaultPoint, int] | frozenset[FaultPoint]) -> None:
        self.phases = frozenset(phases)
        self.calls: list[tuple[FaultPoint, bool]] = []
        self.trainer: GroupTrainer | None = None

    def begin_passes(self, _num_microbatches: int) -> None:
        pass

    def progress(self) -> None:
        pass

    def during(self, _operation: Operation, *, in_backward: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, _microbatch: Microbatch) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, _microbatch: Microbatch) -> None:
        pass

    def __call__(self, phase: FaultPoint) -> None:
        assert self.trainer is not None
        has_gradient = [bool(named.main_grad.any()) for named in self.trainer.parameters_named()]
        self.calls.append((phase, any(has_gradient) and not all(has_gradient)))
