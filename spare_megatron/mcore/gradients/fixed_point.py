"""Gradients as integers: their scale, and how they are added to integer sums on a device."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spare_megatron.devices import gpu
from spare_megatron.mcore.gradients.checksums import COLUMNS, ROWS, SectionSums, weights_on

_LARGEST_PER_TOKEN_BITS = 12
"""Fixed point holds a mean gradient per token of up to 2^12 in every element of a microbatch, and such a loss."""

_PIECE_ROWS = 64
"""Rows of a section that are added at a time: 1 MiB stays in the cache of a core. They divide a block."""

AddRounded = Callable[[Tensor, Tensor, float, Tensor, Tensor, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPoint:
    """How values become integers: the factor before rounding, and the largest scaled value of one microbatch."""

    scale: float
    largest: float


def fixed_point(num_tokens: int, num_microbatches: int) -> FixedPoint:
    """The finest fixed point in which the sum over a global batch cannot overflow.

    With T the tokens of a microbatch and B the microbatches of a global batch, each rounded up to a power of two,
    a microbatch may reach T x 2^12 in an element, and B of those must stay within 2^62 after scaling:
    scale = 2^62 / (B x T x 2^12). All are powers of two, so that scaling is exact and only the rounding is not.

    >>> fixed_point(128, 16).scale == 2.0**39
    True
    """
    tokens_power = 2.0 ** math.ceil(math.log2(num_tokens))
    largest = 2.0**62 / 2.0 ** math.ceil(math.log2(num_microbatches))
    return FixedPoint(scale=largest / (tokens_power * 2.0**_LARGEST_PER_TOKEN_BITS), largest=largest)


@np.errstate(all="ignore")  # what does not fit raises `largest`
def add_rounded(sums: Tensor, values: Tensor, scale: float, largest: Tensor, added: Tensor, place: int) -> None:
    """Adds values, times `scale` and rounded half to even, to integer sums; raises `largest` to their magnitude, or
    NaN. `added` grows by what they, from a place of a section on, add to the last number of its checksum.

    By NumPy, which starts an operation in a fraction of the time that torch takes.
    """
    weights = weights_on(sums.device)
    rows, blocks = weights.rows.numpy(), weights.wrapping_blocks.numpy()
    values_, sums_, largest_, added_ = values.detach().float().numpy(), sums.numpy(), largest.numpy(), added.numpy()
    start, size = 0, _PIECE_ROWS * COLUMNS
    while start < len(values_):
        row, column = divmod(place + start, COLUMNS)
        end = min(start + size - (place + start) % size, len(values_))
        scaled = values_[start:end] * np.float32(scale)
        for extreme in (np.maximum.reduce(scaled), -np.minimum.reduce(scaled)):  # which propagate NaN
            np.maximum(largest_, extreme, out=largest_)
        # The piece with zeros around it, as whole rows.
        whole = torch.empty(-(-(column + end - start) // COLUMNS), COLUMNS, dtype=torch.int64)
        flat = whole.numpy().reshape(-1)
        rounded = flat[column : column + end - start]
        flat[:column], flat[column + end - start :] = 0, 0
        rounded[:] = np.rint(scaled, out=scaled)
        sums_[start:end] += rounded
        of_rows = torch.mv(whole, weights.wrapping_columns).numpy()
        added_ += np.dot(of_rows, rows[row % ROWS :][: len(whole)]) * blocks[row // ROWS]
        start = end


def choose_kernels(device: torch.device) -> tuple[AddRounded, type[SectionSums]]:
    """What adds to integer sums on this device, and what reads them."""
    if device.type != gpu.TYPE:
        return add_rounded, SectionSums
    from spare_megatron.mcore.gradients import kernels

    kernels.check_fixed_point(device)
    return kernels.add_rounded, kernels.TritonSectionSums
