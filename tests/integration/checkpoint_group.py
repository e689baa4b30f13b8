"""What the ranks of a group are asked to do with checkpoints: tasks of `mcore_group.run_group`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, agreed_loss, all_work, reduce_alone

Curve = list[tuple[float, float, float]]
"""Of each step the loss, the norm of the gradient and the learning rate."""


def train_and_save(config: RunConfig, folder: Path, before: int, after: int) -> tuple[Curve, dict[str, Any], Any]:
    """Trains, writes a checkpoint, trains on. Returns the curve of what came after, the final parameters, the files."""
    trainer = GroupTrainer(config, CPU)
    train(trainer, config, range(before))
    state = trainer.checkpoint_state()
    state.copy()
    # What is written must be what was copied, whatever the training does meanwhile.
    curve = train(trainer, config, range(before, before + after))
    files = state.write(folder, dist.new_group(backend="gloo"), lambda: None)
    return curve, parameters(trainer), files


def load_and_train(config: RunConfig, folder: Path, before: int, after: int) -> tuple[Curve, dict[str, Any]]:
    """Loads a checkpoint into a new model and trains on. Returns the curve and the final parameters."""
    trainer = GroupTrainer(config, CPU)
    trainer.load_checkpoint(folder)
    return train(trainer, config, range(before, before + after)), parameters(trainer)


def train(trainer: GroupTrainer, config: RunConfig, steps: range) -> Curve:
    """As the only group there is, which computes all shards."""
    curve = []
    for step in steps:
        trainer.begin_step(step)
        trainer.compute(all_work(config))
        reduce_alone(trainer)
        result = trainer.update(agreed_loss(trainer))
        curve.append((result.loss, result.grad_norm, result.learning_rate))
    return curve


def parameters(trainer: GroupTrainer) -> dict[str, tuple[np.ndarray, int | None]]:
    """Values by name, and the dimension along which they are divided over tensor-parallel ranks."""
    return {
        named.name: (named.parameter.detach().float().numpy(), named.partition_dim)
        for named in trainer.parameters_named()
    }
