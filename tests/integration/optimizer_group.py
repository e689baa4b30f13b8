"""What a rank is asked to do to compare our optimizers with Megatron's own, which is built here from Megatron alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from spare_megatron.config.schema import OptimizerConfig, RunConfig
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, Arrays
from tests.integration.stacked_groups import (
    build_groups,
    first_hosts,
    gather,
    make_up_gradients,
    stacked,
    values_by_name,
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Parameters after some steps, and the learning rate of each."""

    values: Arrays
    rates: list[float]


def train_three_ways(
    config: RunConfig, cases: Sequence[tuple[OptimizerConfig, dict[str, Any], bool]], num_steps: int
) -> list[tuple[Trained, Trained, Trained]]:
    """For each case, steps on made-up gradients with whole state, partitioned state, and Megatron alone.

    Args:
        cases: Settings, what Megatron's scheduler is given of their decay, and whether they have the test's rules.
    """
    found = []
    for settings, scheduler, has_rules in cases:
        whole = replace(config, optimizer=settings)
        partitioned = replace(config, optimizer=replace(settings, sharding="stacked"))
        megatron = _with_megatron(whole, scheduler, _rates_of_the_rules(settings) if has_rules else None, num_steps)
        found.append((_with_whole_state(whole, num_steps), _with_partitions(partitioned, num_steps), megatron))
    return found


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


def _rates_of_the_rules(settings: OptimizerConfig) -> dict[ParamKey, dict[str, float]]:
    """The test's rules for Megatron: disjoint, and with its exception of vectors."""

    def scaled(factor: float, lowest: float | None = None) -> dict[str, float]:
        lowest = factor if lowest is None else lowest
        limits = {"max_lr": settings.learning_rate * factor, "min_lr": settings.min_learning_rate * lowest}
        return limits | {"lr_mult": factor}  # it has a part in the order of groups, and so of the norm's sum

    def key(fits: Callable[[torch.nn.Parameter, str], bool]) -> ParamKey:
        return ParamKey(with_name_predicate=ParamWithNamePredicate(name=str(id(fits)), fn=fits))

    return {
        key(lambda one, name: "layers.1.mlp." in name and one.ndim > 1): scaled(0.5),
        key(lambda one, name: "layers.1.mlp." in name and one.ndim == 1): scaled(0.5) | {"wd_mult": 0.0},
        key(lambda one, name: "layers.0.mlp." in name and one.ndim > 1): scaled(0.0),
        key(lambda one, name: "layers.0.mlp." in name and one.ndim == 1): scaled(0.0) | {"wd_mult": 0.0},
        key(lambda _, name: "embedding." in name): scaled(0.25, 0.5) | {"wd_mult": 0.0},
        key(lambda _, name: name.endswith("layernorm.weight")): {"wd_mult": 2.0},
        key(lambda _, name: name.endswith(("layernorm.bias", "linear_qkv.bias"))): {"wd_mult": 0.0},
    }


def _with_megatron(
    config: RunConfig, scheduler: dict[str, Any], rules: dict[ParamKey, dict[str, float]] | None, num_steps: int
) -> Trained:
    trainer, settings = GroupTrainer(config, CPU), config.optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
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
        config_overrides=rules,
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
        rates.append(schedule.get_lr({}))
        optimizer.step()
        schedule.step(increment=1)
    return Trained(values=values_by_name(trainer), rates=rates)
