"""bf16 training beside plain Megatron, with the norms that it clips by handed over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer import optimizer as megatron_optimizer

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.optimizer import stacked_optimizer
from spare_megatron.mcore.optimizer.parameters import named_parameters
from spare_megatron.tools.bench.plain_megatron import train_steps
from tests.integration.mcore_group import CPU, Arrays
from tests.integration.stacked_groups import (
    build_groups,
    divide_world,
    first_hosts,
    gather,
    summed,
    updated,
    values_by_name,
)


def train_plain_with_norms(config: RunConfig, num_steps: int, is_sharded: bool) -> tuple[Arrays, list[float]]:
    """Parameters of this rank after some steps of plain Megatron, and the norm of each step.

    Args:
        is_sharded: With Megatron's DistributedOptimizer.
    """
    divide_world(config)
    norms: list[float] = []
    with _norms_by(megatron_optimizer, lambda norm: norms.append(norm) or norm):
        steps = train_steps(config, CPU, is_sharded=is_sharded)
        for _ in range(num_steps):
            chunk = next(steps)
    if is_sharded:
        chunk.module.start_param_sync(force_sync=True)
    return {named.name: named.parameter.detach().float().numpy() for named in named_parameters([chunk])}, norms


def train_stacked_with_norms(
    config: RunConfig, num_steps: int, handed_over: Sequence[float] | None
) -> tuple[Arrays, list[float]]:
    """Parameters of this rank after some steps of groups with stacked state, and the norm of each step.

    Args:
        handed_over: What the gradients are clipped by instead of their own norms.
    """
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    norms: list[float] = []
    for step in range(num_steps):
        total, loss = summed(trainers, config, step)
        own: list[float] = []

        def norm_of(norm: float, step: int = step, own: list[float] = own) -> float:
            own.append(norm)
            return norm if handed_over is None else handed_over[step]

        with _norms_by(stacked_optimizer, norm_of):
            for trainer in trainers:
                updated(trainer, total, loss)
        assert len(set(own)) == 1, "all groups clip alike"
        norms.append(own[0])
        gather(trainers, [row[0] for row in hosts])
    return values_by_name(trainers[0]), norms


@contextmanager
def _norms_by(module: Any, replace: Callable[[float], float]) -> Iterator[None]:
    """Inside the block, the norms that a module has Megatron compute go through a function."""
    compute = module.get_grad_norm_fp32
    module.get_grad_norm_fp32 = lambda *gradients, **groups: replace(compute(*gradients, **groups))
    try:
        yield
    finally:
        module.get_grad_norm_fp32 = compute
