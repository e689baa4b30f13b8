"""The loss of a checkpoint on text held out from training, in one process."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.data import ValidationWindows
from spare_megatron.mcore.trainer import GroupTrainer


def held_out_loss(config: RunConfig, checkpoint: Path, num_windows: int) -> float:
    """Mean cross entropy per token over the first windows of `ValidationWindows`, on this machine's processors.

    Starts and ends a torch.distributed world of its own. Raises ValueError if fewer windows are held out.
    """
    windows = ValidationWindows(config)
    if len(windows) < num_windows:
        raise ValueError(
            f"data.split={config.data.split} holds {len(windows)} windows out, and {num_windows} are asked for"
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = replace(config, layout=LayoutConfig(num_groups=config.layout.num_groups))
        trainer = GroupTrainer(alone, torch.device("cpu"))
        trainer.load_checkpoint(checkpoint)
        model = trainer.chunks[0].module.module.eval()
        positions = torch.arange(config.model.seq_length)[None]
        total = 0.0
        with torch.no_grad():
            for number in range(num_windows):
                tokens = windows[number][None]
                total += model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).double().sum().item()
    finally:
        dist.destroy_process_group()
    return total / (num_windows * config.model.seq_length)
