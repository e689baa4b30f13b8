"""Flipped bits, against the bytes that NumPy sees."""

import numpy as np
import pytest
import torch

from spare_megatron.mcore.corruption import flip_bit

KINDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.int64: np.uint64}


@pytest.mark.parametrize("dtype", KINDS)
def test_one_bit_of_one_element_is_inverted(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    original = torch.randn(3, 5, generator=generator)
    original = (original * 1000).to(dtype) if dtype is torch.int64 else original.to(dtype)
    num_bits = 8 * original.element_size()
    for bit in range(num_bits):
        flipped = original.clone()
        flip_bit([flipped, original], bit)
        before, after = (np.frombuffer(_bytes(values), KINDS[dtype]) for values in (original, flipped))
        [changed] = np.flatnonzero(before != after)
        assert before[changed] ^ after[changed] == KINDS[dtype](1) << KINDS[dtype](bit)
        clear = (before >> KINDS[dtype](bit)) & KINDS[dtype](1) == 0
        if clear.any():
            sizes = np.where(clear, original.abs().double().numpy().ravel(), -1.0)
            assert sizes[changed] == sizes.max()


def test_the_default_bit_makes_a_number_huge() -> None:
    values = torch.tensor([0.0, 0.5, -0.25])
    flip_bit([values], None)
    assert values.tolist() == [0.0, 0.5 * 2.0**128, -0.25]


def _bytes(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()
