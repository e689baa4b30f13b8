"""Sums the blocks of a digest on a GPU in one pass over their bytes; bitwise `digests.block_sums`.

Import only with a GPU: Triton comes with torch's CUDA builds alone.
"""
# ruff: noqa: ANN001, ANN202  (Triton reads annotations of kernels as its own types)

import subprocess
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 1024
"""Words that a program of the kernel multiplies at a time."""


def sum_blocks(words: Tensor, multipliers: Tensor) -> Tensor:
    """The sums of whole blocks: [blocks, 2], in int64. `words` are int32 [blocks, words of a block], contiguous.

    `multipliers` are int64 [2, words of a block]. Never waits for the device.
    """
    num_blocks, block_words = words.shape
    sums = torch.empty(num_blocks, 2, dtype=torch.int64, device=words.device)
    _sum_blocks[(num_blocks,)](words, multipliers, sums, BLOCK_WORDS=block_words, PIECE=_PIECE)
    return sums


@cache
def is_usable(device: torch.device) -> bool:
    """Whether the kernel compiles here: it needs a C compiler and Python's headers. Tried once."""
    try:
        sum_blocks(
            torch.zeros(1, _PIECE, dtype=torch.int32, device=device),
            torch.ones(2, _PIECE, dtype=torch.int64, device=device),
        )
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return False
    return True


@triton.jit
def _sum_blocks(words, multipliers, sums, BLOCK_WORDS: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    first = tl.zeros((PIECE,), dtype=tl.int64)
    second = tl.zeros((PIECE,), dtype=tl.int64)
    for start in range(0, BLOCK_WORDS, PIECE):
        places = start + tl.arange(0, PIECE)
        here = tl.load(words + block * BLOCK_WORDS + places).to(tl.int64)
        first += here * tl.load(multipliers + places)
        second += here * tl.load(multipliers + BLOCK_WORDS + places)
    tl.store(sums + 2 * block, tl.sum(first, axis=0))
    tl.store(sums + 2 * block + 1, tl.sum(second, axis=0))
