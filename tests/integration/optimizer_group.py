"""What a rank is asked to do to compare our optimizers with Megatron's own, which is built here from Megatron alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, Arrays
from tests.integration.stacked_groups import (
    build_groups,
    first_hosts,
    gather,
    make_up_gradients,
    replicated,
    stacked,
    values_by_name,
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Parameters after some steps, and the learning rate of each."""

    values: Arrays
    rates: list[float]


def train_three_ways(
    _: RunConfig, configs: Sequence[RunConfig], schedulers: Sequence[dict[str, Any]], num_steps: int
) -> list[tuple[Trained, Trained, Trained]]:
    """For each configuration, steps on made-up gradients with whole state, partitioned state, and Megatron alone.

    Args:
        schedulers: What Megatron's scheduler is given of each configuration's decay.
    """
    return [
        (
            _with_whole_state(replicated(config), num_steps),
            _with_partitions(replace(config, optimizer=replace(config.optimizer, sharding="stacked")), num_steps),
            _with_megatron(replicated(config), scheduler, num_steps),
        )
        for config, scheduler in zip(configs, schedulers, strict=True)
    ]


def _with_whole_state(config: RunConfig, num_steps: int) -> Trained:
    trainer = GroupTrainer(config, CPU)
    rates = []
    for step in range(num_steps):
        make_up_gradients(trainer.chunks, step)
        rates.append(trainer._optimizer.step()[1])
    return Trained(values=values_by_name(trainer), rates=rates)


def _with_partitions(config: RunConfig, num_steps: int) -> Trained:
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    rates = []
    for step in range(num_steps):
        found = set()
        for trainer in trainers:
            make_up_gradients(trainer.chunks, step)
            found.add(stacked(trainer).step()[1])
        rates += found
        gather(trainers, [row[0] for row in hosts])
    return Trained(values=values_by_name(trainers[0]), rates=rates)


def _with_megatron(config: RunConfig, scheduler: dict[str, Any], num_steps: int) -> Trained:
    trainer, settings = GroupTrainer(config, CPU), config.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.min_learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
        ),
        [chunk.module for chunk in trainer.chunks],
        use_gloo_process_groups=False,
        pg_collection=trainer.process_groups,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=num_steps,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        **scheduler,
    )
    rates = []
    for step in range(num_steps):
        make_up_gradients(trainer.chunks, step)
        rates.append(_rate_of(optimizer.param_groups))
        optimizer.step()
        schedule.step(increment=1)
    return Trained(values=values_by_name(trainer), rates=rates)


def _rate_of(groups: Iterator[dict[str, Any]]) -> float:
    (rate,) = {group["lr"] for group in groups}
    return float(rate)
