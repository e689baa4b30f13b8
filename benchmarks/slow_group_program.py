"""The program of `benchmarks/slow_group.py`: passes that sleep.

A sleep stands for the passes of a microbatch on a device of its own, which two processors could not show for eight
groups at once. The variable SLOW_GROUP_SLEEP_S has its seconds. SLOW_GROUP_BLOCK, if it is set, is a number of steps:
in blocks of so many no pace is measured, votes have none and nothing is counted, by turns with blocks as in every run.
"""

import os
import time

import torch

from spare_megatron import Batch, RunConfig, StepContext, Terms, gpt_forward_step
from spare_megatron.process.rank_probe import RankProbe

step_under_way = 0


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
    global step_under_way
    step_under_way = context.step
    time.sleep(float(os.environ["SLOW_GROUP_SLEEP_S"]))
    return gpt_forward_step(batch, model, context)


def measure_by_turns(block: int) -> None:
    usual = RankProbe.pace_s

    def pace_s(probe: RankProbe, num_chunks: int) -> float:
        return usual(probe, num_chunks) if is_measured(step_under_way, block) else 0.0

    RankProbe.pace_s = pace_s  # type: ignore[assignment, method-assign]


def is_measured(step: int, block: int) -> bool:
    return step // block % 2 == 1


if block_of_steps := int(os.environ.get("SLOW_GROUP_BLOCK", "0")):
    measure_by_turns(block_of_steps)
