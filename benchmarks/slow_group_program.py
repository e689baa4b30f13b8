"""The program of `benchmarks/slow_group.py`: passes that sleep, longer in slow groups.

A sleep stands for the passes of a microbatch on a device of its own, which two processors could not show for eight
groups at once. The variable SLOW_GROUPS is JSON: {"sleep_s": SECONDS, "from": STEP, "factors": {GROUP: FACTOR}}.
"""

import json
import os
import re
import time
from functools import cache

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


@cache
def own_group() -> int:
    """The group of this process, by the name of its log."""
    found = re.search(r"group-(\d+)-rank", os.readlink("/proc/self/fd/2"))
    assert found is not None, "a rank writes to a log of its own"
    return int(found[1])


def forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[torch.Tensor, Terms]:
    slow = json.loads(os.environ["SLOW_GROUPS"])
    factor = slow["factors"].get(str(own_group()), 1.0) if context.step >= slow["from"] else 1.0
    time.sleep(slow["sleep_s"] * factor)
    return gpt_forward_step(batch, model, context)
