"""The program of `benchmarks/slow_group.py`: passes that sleep.

A sleep stands for the passes of a microbatch on a device of its own, which two processors could not show for eight
groups at once. The variable SLOW_GROUP_SLEEP_S has its seconds.
"""

import os
import time

import torch

from spare_megatron import Batch, RunConfig, StepContext, Terms, gpt_forward_step


class Noise:
    """Random tokens, made from the number of the sample."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self._length, self._vocab_size = length, vocab_size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        line = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        positions = torch.arange(self._length)
        return {"tokens": line[:-1], "labels": line[1:], "position_ids": positions}


def datasets_provider(config: RunConfig) -> Noise:
    return Noise(config.model.seq_length, config.model.vocab_size)


def forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[torch.Tensor, Terms]:
    time.sleep(float(os.environ["SLOW_GROUP_SLEEP_S"]))
    return gpt_forward_step(batch, model, context)
