"""A task for ranks in tests of faults in numbers: they compute a step with one, and watch their operations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.points import Fault, FaultPoint
from spare_megatron.mcore.corruption import CORRUPTIONS, OperationFaults
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, staged, work_of

_WORK = work_of((0, 0), (0, 1), (1, 0))
_MOMENT = 2
"""The microbatch in whose passes a fault strikes."""


class Found(NamedTuple):
    """What a rank has seen of a step.

    Attributes:
        wrong: Operations whose result is not that of their inputs: name, whether backward, shape.
        sums: As they are staged.
    """

    wrong: list[tuple[str, bool, tuple[int, ...]]]
    sums: np.ndarray


class _Watched(OperationFaults):
    """Computes each operation a second time, without faults."""

    def __init__(self, trainer: GroupTrainer) -> None:
        super().__init__(trainer)
        self.wrong: list[tuple[str, bool, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named, name = named or {}, function.overloadpacket.__name__
        result = super().__torch_dispatch__(function, types, arguments, named)
        is_once = name.endswith("_") or "out" in named or name.startswith(("empty", "send", "recv"))
        if not is_once and (first := _first(result)) is not None:
            again = _first(function(*arguments, **named))
            if again is not None and not torch.equal(first, again):
                self.wrong.append((name, torch._C._current_graph_task_id() != -1, tuple(first.shape)))
        return result


def _first(result: Any) -> Tensor | None:
    first = result[0] if isinstance(result, tuple | list) and result else result
    return first if isinstance(first, Tensor) else None


class _Striking(SilentProbe):
    """Strikes with a fault when its moment is reached."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault, self._num_reached = fault, 0
        self.phases: frozenset[FaultPoint] = frozenset() if fault is None else frozenset({fault.phase})
        self.trainer: GroupTrainer | None = None

    def __call__(self, phase: FaultPoint, /) -> None:
        if self._fault is None or phase is not self._fault.phase:
            return
        self._num_reached += 1
        if self._num_reached == _MOMENT:
            assert self.trainer is not None, "it is there before its first pass"
            CORRUPTIONS[self._fault.kind](self.trainer, self._fault, None)


def steps_with(config: RunConfig, faults: Sequence[Fault | None]) -> list[Found]:
    """What a new trainer sees of its first step with each of the faults."""
    found = []
    for fault in faults:
        probe = _Striking(fault)
        trainer = probe.trainer = GroupTrainer(config, CPU, probe)
        trainer.injector = watch = _Watched(trainer)
        trainer.begin_step(0)
        trainer.compute(_WORK)
        found.append(Found(watch.wrong, staged(trainer).numpy()))
    return found
