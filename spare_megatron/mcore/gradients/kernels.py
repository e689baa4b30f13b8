"""The kernels for GPUs, in Triton: fixed-point sums, what is taken from staged buckets, and digests, each in one pass
over memory, bitwise as on CPUs.

Import only with a GPU: Triton comes with torch's CUDA builds alone.
"""
# ruff: noqa: ANN001, ANN202, N803  (Triton reads annotations of kernels as its own types, and `constexpr` are constants)

import subprocess
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from spare_megatron.mcore.gradients import checksums

_BLOCK = 1024
"""Elements that a program of a kernel takes at a time."""
_ROWS, _PIECE = 8, 256
"""Blocks of a digest that a program takes, and words of each at a time: its sums fit into registers."""
_COLUMNS, _BLOCK_ROWS, _PRIME = map(tl.constexpr, (checksums.COLUMNS, checksums.ROWS, checksums.PRIME))
_STRIP, _HEIGHT, _WIDTH = map(tl.constexpr, (32, 2, 256))
"""Rows of a checksum that a program takes, rows and columns of them at a time: sums of columns fit into registers, and
one addition to memory replaces those of 32 rows (48 registers on sm_90).
"""

_OFFSETS = (0, 1)
"""Of the first element from an address that a multiple of 16 bytes divides. Triton compiles a variant for each, as only
aligned loads are wide; which of them a patch needs depends on where the kept buckets end.
"""

_NOT_COMPILED = (OSError, RuntimeError, subprocess.SubprocessError)
"""What Triton raises without a C compiler or Python's headers."""


def add_rounded(sums: Tensor, values: Tensor, scale: float, largest: Tensor, added: Tensor, place: int) -> None:
    """`fixed_point.add_rounded` for contiguous tensors of equal size; never waits for the device."""
    of, size = checksums.weights_on(sums.device), values.numel()
    given = sums, values.detach(), largest.view(torch.int32), added, of.rows, of.wrapping_columns, of.wrapping_blocks
    _add_rounded[(triton.cdiv(size, _BLOCK),)](*given, scale, place, size, BLOCK=_BLOCK)


def check_fixed_point(device: torch.device) -> None:
    """Compiles all variants of the kernels of integer sums. Raises ValueError if that is not possible here."""
    try:
        sums, largest = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((), device=device)
        for dtype, first, other in product((torch.float32, torch.bfloat16), _OFFSETS, _OFFSETS):
            values = torch.zeros(2, dtype=dtype, device=device)
            add_rounded(sums[first : first + 1], values[other : other + 1], 1.0, largest, sums[first], 0)
        TritonSectionSums(sums[:1], sums[1:]).checksum(sums)
    except _NOT_COMPILED as error:
        raise ValueError(
            f"reduce.mode=reproducible compiles kernels where there is a GPU, and that failed: {error}; install a C "
            f"compiler and Python's headers (gcc, python3-dev), set CC to another compiler, or choose reduce.mode=fast"
        ) from error


# The number of elements differs between patches: without these marks Triton would compile variants for 1, for multiples
# of 16, and for 2^31 and more.
@triton.jit(do_not_specialize=["place", "size"], do_not_specialize_on_alignment=["largest", "added"])
def _add_rounded(  # type: ignore[no-untyped-def]
    sums, values, largest, added, rows, columns, blocks, scale, place: tl.int64, size: tl.int64, BLOCK: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < size
    scaled = tl.load(values + places, mask=is_inside, other=0.0).to(tl.float32) * scale

    # Magnitudes of floats are in the order of their bits, and NaN comes after infinity.
    bits = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_here = tl.max(bits, axis=0)
    # It only grows: a value that another block has raised meanwhile costs a needless attempt.
    tl.atomic_max(largest, largest_here, mask=largest_here > tl.load(largest))

    # From 2^23 on floats are whole. Below, this addition leaves no bits for the fraction and rounds half to even; fused
    # with the product, too, as scaling by a power of two is exact.
    shift = tl.where(scaled < 0.0, -8388608.0, 8388608.0)
    rounded = tl.where(tl.abs(scaled) < 8388608.0, (scaled + shift) - shift, scaled)
    before = tl.load(sums + places, mask=is_inside, other=0)
    whole = rounded.to(tl.int64)
    tl.store(sums + places, before + whole, mask=is_inside)

    # What is added, by its weights in the section; zeros beyond the end.
    row = (place + places) // _COLUMNS
    weights = tl.load(rows + row % _BLOCK_ROWS) * tl.load(blocks + row // _BLOCK_ROWS)
    tl.atomic_add(added, tl.sum(whole * weights * tl.load(columns + (place + places) % _COLUMNS), axis=0))


class TritonSectionSums(checksums.SectionSums):
    """A section that is read once for its copy, its squares and its checksum; never waits for the device."""

    def __init__(self, values: Tensor, copy: Tensor | None = None) -> None:
        self._num_rows = triton.cdiv(values.numel(), checksums.COLUMNS)
        # Beside it, what is counted has few rows.
        self._sums = values.new_zeros(self._num_rows // checksums.ROWS + 2, 2, checksums.COLUMNS)
        self._squares = self._add(values, copy, 0)

    def squares(self) -> Tensor:
        return self._squares.sum().float().double()

    def checksum(self, counted: Tensor) -> Tensor:
        self._add(counted, None, self._num_rows)
        digits = counted.new_empty(checksums.NUM_DIGITS)
        num_rows = self._num_rows + triton.cdiv(counted.numel(), checksums.COLUMNS)
        weights = checksums.weights_on(counted.device)[1:]
        _finish_checksum[(1,)](self._sums, *weights, digits, triton.cdiv(num_rows, checksums.ROWS))
        return digits

    def _add(self, values: Tensor, copy: Tensor | None, first_row: int) -> Tensor:
        """Adds the rows of `values` from a row on to the sums of columns. Returns the squares of each program."""
        end_row, strip = first_row + triton.cdiv(values.numel(), checksums.COLUMNS), _STRIP.value
        num_programs = (triton.cdiv(end_row, strip) - first_row // strip) * (checksums.COLUMNS // _WIDTH.value)
        squares = torch.empty(num_programs, dtype=torch.float64, device=values.device)
        place = values, values if copy is None else copy, checksums.weights_on(values.device).rows, self._sums, squares
        _add_rows[(num_programs,)](*place, values.numel(), first_row, COPIES=copy is not None)
        return squares


# A program takes a slice of the columns in a strip of rows. Integers are added in any order, squares by program.
@triton.jit(do_not_specialize=["size", "first_row"], do_not_specialize_on_alignment=["values", "copies"])
def _add_rows(values, copies, weights, sums, squares, size: tl.int64, first_row: tl.int64, COPIES: tl.constexpr):  # type: ignore[no-untyped-def]
    program, num_slices = tl.program_id(0), _COLUMNS // _WIDTH
    columns = program % num_slices * _WIDTH + tl.arange(0, _WIDTH)
    start = (first_row // _STRIP + program // num_slices) * _STRIP
    low = tl.zeros((_HEIGHT, _WIDTH), dtype=tl.int64)
    high = tl.zeros((_HEIGHT, _WIDTH), dtype=tl.int64)
    squared = tl.zeros((_HEIGHT, _WIDTH), dtype=tl.float64)
    for offset in range(0, _STRIP, _HEIGHT):
        rows = start + offset + tl.arange(0, _HEIGHT)
        places = (rows - first_row)[:, None] * _COLUMNS + columns[None, :]
        is_inside = (places >= 0) & (places < size)
        here = tl.load(values + places, mask=is_inside, other=0)
        if COPIES:
            tl.store(copies + places, here, mask=is_inside)
        of_rows = tl.load(weights + rows % _BLOCK_ROWS)[:, None]
        low += here * of_rows
        high += (here >> 32) * of_rows
        squared += here.to(tl.float64) * here.to(tl.float64)
    into = sums + start // _BLOCK_ROWS * (2 * _COLUMNS) + columns
    tl.atomic_add(into, tl.sum(low, axis=0))
    tl.atomic_add(into + _COLUMNS, tl.sum(high, axis=0))
    tl.store(squares + program, tl.sum(tl.sum(squared, axis=1)))


# As `checksums.checksum` goes on from the sums of columns.
@triton.jit(do_not_specialize=["num_blocks"])
def _finish_checksum(  # type: ignore[no-untyped-def]
    sums, columns, wrapping_columns, blocks, wrapping_blocks, digits, num_blocks: tl.int64
):
    places = tl.arange(0, _COLUMNS)
    weights, wrapping_weights = tl.load(columns + places), tl.load(wrapping_columns + places)
    first = tl.full((), 0, dtype=tl.int64)
    second = tl.full((), 0, dtype=tl.int64)
    for block in range(num_blocks):
        wrapping = tl.load(sums + 2 * block * _COLUMNS + places)
        high = tl.load(sums + (2 * block + 1) * _COLUMNS + places)
        low = wrapping - (high << 32)
        of_columns = _residue((low & _PRIME) + ((low >> 61) & 7) + _rotated(_residue(high), 32))
        products = _product(of_columns, weights)
        of_block = _residue(_rotated(tl.sum(products >> 31), 31) + tl.sum(products & 0x7FFFFFFF))
        first = _residue(first + _product(of_block, tl.load(blocks + block)))
        second += tl.sum(wrapping * wrapping_weights) * tl.load(wrapping_blocks + block)
    tl.store(digits, first >> 31)
    tl.store(digits + 1, first & 0x7FFFFFFF)
    tl.store(digits + 2, second)


@triton.jit
def _product(values, weights):  # type: ignore[no-untyped-def]
    low = values * weights
    return _residue((low & _PRIME) + (((low >> 61) & 7) | (tl.umulhi(values, weights) << 3)))


@triton.jit
def _rotated(values, num_bits: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((values << num_bits) & _PRIME) | (values >> (61 - num_bits))


# Modulo 2^61 - 1, for either sign: bits beyond the 61st count once.
@triton.jit
def _residue(values):  # type: ignore[no-untyped-def]
    folded = (values & _PRIME) + (values >> 61)
    folded = tl.where(folded < 0, folded + _PRIME, folded)
    return tl.where(folded >= _PRIME, folded - _PRIME, folded)


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
def _sum_blocks(table, multipliers, sums, BLOCK_WORDS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
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
