"""Flipped bits, against the bytes that NumPy sees, and faults of a trainer, against its operations computed again."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.faults.kinds import KINDS as KINDS_OF_FAULTS
from spare_megatron.faults.points import Fault, FaultKind, FaultPoint
from spare_megatron.mcore.corruption import flip_bit, site_of
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.stacking.layout import GroupId
from tests.integration.corruption_group import Found, steps_with
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

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


BETWEEN_OPERATIONS = {
    "activation_flip": 13,
    "stuck_bit": 13,
    "drift": None,
    "data_flip": 3,
    "bit_flip": 13,
    "param_flip": 13,
}
"""Kinds that strike memory, with a bit."""
NUM_TOKENS = 32
"""Of a microbatch."""


def _faults() -> Iterator[Fault]:
    for kind, row in KINDS_OF_FAULTS.items():
        for phase in row.phases if row.in_operations else ():
            for ordinal in (1, 2, 3):
                yield _fault(kind, phase, 13, ordinal)
    for kind, bit in BETWEEN_OPERATIONS.items():
        yield _fault(kind, FaultPoint.FORWARD, bit)
    yield _fault("bit_flip", FaultPoint.BACKWARD, 13)


def _fault(kind: str, phase: FaultPoint, bit: int | None, ordinal: int = 1) -> Fault:
    return Fault(step=1, group=GroupId(0), rank=0, phase=phase, kind=FaultKind(kind), ordinal=ordinal, bit=bit)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_faults_of_operations_show_in_these_and_faults_of_memory_between_them(text_corpus: Path, mode: str) -> None:
    """Of the model, with its attention kernels, in both passes; all but one of them change the sums."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), mode=mode)
    prepare_index(config)
    faults = list(_faults())
    [[calm, *found]] = run_group(steps_with, config, [None, *faults])
    assert not calm.wrong
    for fault, one in zip(faults, found, strict=True):
        _check(fault, one)
    assert sum(not np.array_equal(one.sums, calm.sums) for one in found) >= len(found) - 1


def _check(fault: Fault, found: Found) -> None:
    if fault.kind in BETWEEN_OPERATIONS:
        assert not found.wrong, fault
        return
    (is_product, site), _ = site_of(fault)
    is_single = KINDS_OF_FAULTS[fault.kind].duration == "lasts"
    assert len(found.wrong) == 1 if is_single else found.wrong, fault
    for name, is_backward, shape in found.wrong:
        assert ((name == "mm"), is_backward) == (is_product, fault.phase is FaultPoint.BACKWARD)
        weights = {(96, 32), (32, 32), (128, 32), (32, 128), (256, 32)}
        assert site != "weights" or shape in weights
        assert site != "inputs" or not is_product or shape[0] == NUM_TOKENS
