"""Adds gradients to fixed-point sums on a GPU, in one pass over both; bitwise `fixed_point.add_rounded`.

Import only with a GPU: Triton comes with torch's CUDA builds alone.
"""
# ruff: noqa: ANN001, ANN202  (Triton reads annotations of kernels as its own types)

import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def add_rounded(sums: Tensor, values: Tensor, scale: float, largest: Tensor) -> None:
    """As `fixed_point.add_rounded`, for contiguous tensors of equal size; never waits for the device."""
    num_blocks = triton.cdiv(values.numel(), _BLOCK)
    _add_rounded[(num_blocks,)](sums, values.detach(), largest.view(torch.int32), scale, values.numel(), BLOCK=_BLOCK)


def check(device: torch.device) -> None:
    """Runs the kernel once. Raises ValueError if it cannot be compiled here."""
    try:
        nothing = torch.zeros(_BLOCK, dtype=torch.int64, device=device)
        add_rounded(nothing, nothing.float(), 1.0, torch.zeros((), device=device))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"reduce.mode=reproducible compiles a kernel where there is a GPU, and that failed: {error}; install a C "
            f"compiler and Python's headers (gcc, python3-dev), set CC to another compiler, or choose reduce.mode=fast"
        ) from error


@triton.jit
def _add_rounded(sums, values, largest_bits, scale, num_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
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
