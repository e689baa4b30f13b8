"""Gradients as integers: their scale, and how they are added to integer sums on a device."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spare_megatron.devices import gpu
from spare_megatron.mcore.gradients.checksums import SectionSums

_LARGEST_PER_TOKEN_BITS = 12
"""Fixed point holds a mean gradient per token of up to 2^12 in every element of a microbatch, and such a loss."""


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


def add_rounded(sums: Tensor, values: Tensor, scale: float, largest: Tensor) -> None:
    """Adds values, times `scale` and rounded half to even, to integer sums; raises `largest` to their magnitude, or
    NaN.
    """
    scaled = values.detach().float() * scale
    # One pass for both extremes, which both propagate NaN; an infinity norm would take twenty times as long.
    lowest, highest = torch.aminmax(scaled)
    torch.maximum(largest, torch.maximum(-lowest, highest), out=largest)
    sums += scaled.round_().to(torch.int64)


def choose_kernels(device: torch.device) -> tuple[Callable[[Tensor, Tensor, float, Tensor], None], type[SectionSums]]:
    """What adds to integer sums on this device, and what reads them."""
    if device.type != gpu.TYPE:
        return add_rounded, SectionSums
    from spare_megatron.mcore.gradients import kernels

    kernels.check_fixed_point(device)
    return kernels.add_rounded, kernels.TritonSectionSums
