"""What ranks do in tests of checked passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.points import Fault, FaultKind, FaultPoint
from spare_megatron.mcore.corruption import CORRUPTIONS
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId
from tests.integration.mcore_group import CPU, agreed_loss, all_work, reduce_alone


class Strike(NamedTuple):
    """An operation whose `time`-th call since the step began is struck: its result, or what it is given."""

    operation: str
    time: int
    of_input: bool = False


class Injector(TorchDispatchMode):
    """Flips the top bit of the exponent of one element; again and again if it lasts."""

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        self._strike, self.num_calls, self.num_changed = strike, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        operation, time, of_input = self._strike
        is_it = func.overloadpacket.__name__ == operation
        self.num_calls += is_it
        is_now = is_it and self.num_calls == time
        if is_now and of_input:
            self._change(next(one for one in args if isinstance(one, Tensor)))
        result = func(*args, **(kwargs or {}))
        if is_now and not of_input:
            self._change(result[0] if isinstance(result, tuple) else result)
        return result

    def _change(self, values: Tensor) -> None:
        flat = values.as_strided((values.numel(),), (1,), values.storage_offset()) if values.is_contiguous() else values
        place = tuple(0 for _ in flat.shape)
        before = float(flat[place])
        flat[place] = before + 1.0 + abs(before)
        self.num_changed += float(flat[place]) != before


def steps_of(config: RunConfig, num_steps: int) -> tuple[str, list[float], str]:
    """What a rank's checks have found in some steps of training, the losses and the digest of the parameters."""
    trainer, losses, found = GroupTrainer(config, CPU), [], ""
    for step in range(num_steps):
        trainer.begin_step(step)
        work = all_work(config, step)
        trainer.compute(work[1:], audited=work[1:2], audits=work[:1])
        trainer.compute(work[:1])
        found = found or trainer.checks.found()
        reduce_alone(trainer)
        loss = agreed_loss(trainer)
        losses.append(trainer.update(loss).loss)
    return found, losses, trainer.params_sha256()


def struck(config: RunConfig, strike: Strike, rank: int) -> tuple[int, str, str]:
    """How many numbers a fault on a rank has changed, what this rank has found, and what it has found a step later."""
    trainer = GroupTrainer(config, CPU)
    injector = Injector(strike)
    if torch.distributed.get_rank() == rank:
        trainer.injector = injector
    trainer.begin_step(0)
    trainer.compute(all_work(config)[:2])
    found = trainer.checks.found()
    trainer.injector = None
    trainer.begin_step(1)
    trainer.compute(all_work(config, 1)[:2])
    return injector.num_changed, found, trainer.checks.found()


def num_operations(config: RunConfig, share: float, operation: str) -> int:
    """How many operations of a name a step has: those of checks are not seen below them."""
    config = replace(config, audit=replace(config.audit, products=share))
    trainer = GroupTrainer(config, CPU)
    trainer.injector = injector = Injector(Strike(operation, 0))
    trainer.begin_step(0)
    trainer.compute(all_work(config)[:2])
    return injector.num_calls


def with_wrong_tokens(config: RunConfig, shares: Sequence[float]) -> list[str]:
    """What is found where a token is changed after it was read, for each share of passes that are checked."""
    found = []
    for share in shares:
        trainer = GroupTrainer(replace(config, audit=replace(config.audit, products=share)), CPU)
        strike: Callable[..., object] = CORRUPTIONS["data_flip"]
        trainer.begin_step(0)
        strike(
            trainer,
            Fault(step=0, group=GroupId(0), rank=0, phase=FaultPoint.FORWARD, kind=FaultKind("data_flip")),
            None,
        )
        trainer.compute(all_work(config)[:2])
        assert trainer.on_loaded is None or not trainer.chunks[0].is_first
        found.append(trainer.checks.found())
    return found
