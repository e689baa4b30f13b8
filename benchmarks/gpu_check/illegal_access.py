"""The program of a run in which group 1 accesses memory that is not there, in one step of its first incarnation.

On a CPU it raises the error that CUDA would report.
"""

import os
import re
from pathlib import Path

import torch

from spare_megatron import Batch, StepContext, Terms, gpt_forward_step

STEP = 6
_GROUP, _ADDRESS = "group-0001-rank-0", 16


def forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[torch.Tensor, Terms]:
    if context.step == STEP and re.search(_GROUP, Path(os.readlink("/proc/self/fd/2")).name):  # the log of the rank
        _access(context.device)
    return gpt_forward_step(batch, model, context)


def _access(device: torch.device) -> None:
    if device.type == "cpu":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    from spare_megatron.mcore.gradients import kernels

    block_words = 1024
    table = torch.tensor([[_ADDRESS, block_words, 0]], device=device)
    multipliers, sums = (torch.ones(2, block_words, dtype=torch.int64, device=device) for _ in range(2))
    kernels._sum_blocks[(1,)](table, multipliers, sums, BLOCK_WORDS=block_words, ROWS=8, PIECE=256)
    torch.cuda.synchronize(device)
