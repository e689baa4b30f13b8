"""The kernels for GPUs, in Triton: fixed-point sums and digests in one pass over memory, bitwise as on CPUs.

Import only with a GPU: Triton comes with torch's CUDA builds alone.
"""
# ruff: noqa: ANN001, ANN202  (Triton reads annotations of kernels as its own types)

import subprocess
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements that a program of a kernel takes at a time."""
_ROWS, _PIECE = 8, 256
"""Blocks of a digest that a program takes, and words of each at a time: its sums fit into registers."""

_OFFSETS = (0, 1)
"""Of the first element from an address that a multiple of 16 bytes divides. Triton compiles a variant for each, as only
aligned loads are wide; which of them a patch needs depends on where the kept buckets end.
"""

_NOT_COMPILED = (OSError, RuntimeError, subprocess.SubprocessError)
"""What Triton raises without a C compiler or Python's headers."""


def add_rounded(sums: Tensor, values: Tensor, scale: float, largest: Tensor) -> None:
    """`fixed_point.add_rounded` for contiguous tensors of equal size; never waits for the device."""
    num_blocks = triton.cdiv(values.numel(), _BLOCK)
    _add_rounded[(num_blocks,)](sums, values.detach(), largest.view(torch.int32), scale, values.numel(), BLOCK=_BLOCK)


def check_fixed_point(device: torch.device) -> None:
    """Compiles all variants of the kernel. Raises ValueError if that is not possible here."""
    try:
        sums, largest = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((), device=device)
        for dtype, first, other in product((torch.float32, torch.bfloat16), _OFFSETS, _OFFSETS):
            values = torch.zeros(2, dtype=dtype, device=device)
            add_rounded(sums[first : first + 1], values[other : other + 1], 1.0, largest)
    except _NOT_COMPILED as error:
        raise ValueError(
            f"reduce.mode=reproducible compiles a kernel where there is a GPU, and that failed: {error}; install a C "
            f"compiler and Python's headers (gcc, python3-dev), set CC to another compiler, or choose reduce.mode=fast"
        ) from error


# The number of elements differs between patches: without these marks Triton would compile variants for 1, for multiples
# of 16, and for 2^31 and more.
@triton.jit(do_not_specialize=["num_elements"], do_not_specialize_on_alignment=["largest_bits"])
def _add_rounded(sums, values, largest_bits, scale, num_elements: tl.int64, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < num_elements
    scaled = tl.load(values + places, mask=is_inside, other=0.0).to(tl.float32) * scale

    # Magnitudes of floats are in the order of their bits, and NaN comes after infinity.
    bits = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_here = tl.max(bits, axis=0)
    # It only grows: a value that another block has raised meanwhile costs a needless attempt.
    tl.atomic_max(largest_bits, largest_here, mask=largest_here > tl.load(largest_bits))

    # From 2^23 on floats are whole. Below, this addition leaves no bits for the fraction and rounds half to even; fused
    # with the product, too, as scaling by a power of two is exact.
    whole = tl.where(scaled < 0.0, -8388608.0, 8388608.0)
    rounded = tl.where(tl.abs(scaled) < 8388608.0, (scaled + whole) - whole, scaled)
    before = tl.load(sums + places, mask=is_inside, other=0)
    tl.store(sums + places, before + rounded.to(tl.int64), mask=is_inside)


def sum_blocks(tensors: Sequence[Tensor], multipliers: Tensor) -> Tensor:
    """Both sums of each block of all tensors, in order, a row each: [blocks, 2], in int64. They are int32, contiguous
    and on one device; `multipliers` are int64 [2, words of a block]. One launch, which never waits for the device.
    """
    block_words, entries, num_blocks = multipliers.shape[1], [np.empty((0, 3), np.int64)], 0
    for words in tensors:
        starts = np.arange(0, words.numel(), _ROWS * block_words)
        addresses, rows = words.data_ptr() + 4 * starts, num_blocks + starts // block_words
        entries.append(np.stack([addresses, words.numel() - starts, rows], axis=1))
        num_blocks += triton.cdiv(words.numel(), block_words)
    found = np.concatenate(entries)
    table = torch.empty(found.shape, dtype=torch.int64, pin_memory=multipliers.device.type != "cpu")
    table.copy_(torch.from_numpy(found))
    sums = torch.empty(num_blocks, 2, dtype=torch.int64, device=multipliers.device)
    if len(found):
        on_device = table.to(multipliers.device, non_blocking=True)
        _sum_blocks[(len(found),)](on_device, multipliers, sums, BLOCK_WORDS=block_words, ROWS=_ROWS, PIECE=_PIECE)
    return sums


@cache
def can_sum_blocks(device: torch.device, block_words: int) -> bool:
    """Whether the kernel compiles here, which needs a C compiler and Python's headers: compiles it, once."""
    try:
        multipliers = torch.ones(2, block_words, dtype=torch.int64, device=device)
        sum_blocks([torch.zeros(1, dtype=torch.int32, device=device)], multipliers)
    except _NOT_COMPILED:
        return False
    return True


# A program takes some blocks of one tensor: an entry of the table has their address, the words from there to the end of
# the tensor, and the row of its first sums. Multipliers are read once for all of its blocks.
@triton.jit
def _sum_blocks(table, multipliers, sums, BLOCK_WORDS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    entry = table + 3 * tl.program_id(0)
    words = tl.load(entry).to(tl.pointer_type(tl.int32))
    num_words = tl.load(entry + 1)
    starts = tl.arange(0, ROWS).to(tl.int64) * BLOCK_WORDS
    first = tl.zeros((ROWS, PIECE), dtype=tl.int64)
    second = tl.zeros((ROWS, PIECE), dtype=tl.int64)
    for start in range(0, BLOCK_WORDS, PIECE):
        columns = start + tl.arange(0, PIECE)
        places = starts[:, None] + columns[None, :]
        here = tl.load(words + places, mask=places < num_words, other=0).to(tl.int64)
        first += here * tl.load(multipliers + columns)[None, :]
        second += here * tl.load(multipliers + BLOCK_WORDS + columns)[None, :]
    into = sums + 2 * (tl.load(entry + 2) + tl.arange(0, ROWS))
    tl.store(into, tl.sum(first, axis=1), mask=starts < num_words)
    tl.store(into + 1, tl.sum(second, axis=1), mask=starts < num_words)
