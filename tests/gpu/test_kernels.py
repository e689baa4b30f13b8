"""The Triton kernels against torch on the CPU, bit by bit: on a GPU, and in Triton's interpreter."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.search_path import with_checkout

NOT_HERE = "Triton comes with torch's CUDA builds; its 286 MB are too much for the other tests"
SCALES = (2.0**7, 2.0**31, 2.0**39)
INTERPRETER = pytest.param("cpu", id="interpreter")
GPU = pytest.param("cuda:0", id="gpu", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_kernels_compute_what_the_cpu_computes(device: str) -> None:
    """Fixed-point sums with the largest magnitude, what is taken from sections, whole steps, and a digest's blocks."""
    pytest.importorskip("triton", reason=NOT_HERE)
    # In a process of its own: Triton decides at its import whether it interprets.
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "PYTHONPATH": with_checkout(*map(Path, sys.path)),  # Triton may be beside the environment
    }
    done = subprocess.run(
        [sys.executable, __file__, device], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_a_machine_where_the_kernel_cannot_be_compiled_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=NOT_HERE)
    from spare_megatron.mcore.gradients import kernels

    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "add_rounded", fails)
    with pytest.raises(
        ValueError, match=r"find C compiler; install a C compiler and Python's headers .*reduce.mode=fast"
    ):
        kernels.check_fixed_point(torch.device("cpu"))


def compare_digests(device: str) -> int:
    """Of tensors of one launch, with the sums of torch. Returns the number of comparisons; raises AssertionError at the
    first difference.
    """
    from spare_megatron.mcore.gradients import digests

    generator, block_bytes = torch.Generator().manual_seed(7), 4 * digests.BLOCK_WORDS
    sizes = [1, 3, 4, 1000, 0, block_bytes - 1, block_bytes, block_bytes + 2, 9 * block_bytes + 5]
    data = [torch.randint(0, 256, (size + 9,), dtype=torch.uint8, generator=generator) for size in sizes]
    tensors = [values[offset:][:size] for values, size in zip(data, sizes, strict=True) for offset in (0, 7)]
    expected = [sums for tensor in tensors for sums in digests.block_sums(tensor)]
    expected_one = digests.words_digest(tensors[-1])
    there = [values.to(device)[offset:][:size] for values, size in zip(data, sizes, strict=True) for offset in (0, 7)]
    with mock.patch.object(digests, "_has_kernel", return_value=True):
        found = torch.cat(list(digests._sums_in_order(there)))
        found_one = digests.words_digest(there[-1])
    assert torch.equal(found.cpu(), torch.cat(expected))
    assert torch.equal(found_one.cpu(), expected_one)
    return len(tensors) + 1


def compare(device: str) -> int:
    """Returns the number of comparisons; raises AssertionError at the first difference."""
    from spare_megatron.mcore.gradients import checksums, fixed_point, kernels

    generator = torch.Generator().manual_seed(7)
    num_compared = 0
    for values in cases(generator):
        for scale in SCALES:
            before = torch.randint(-(2**60), 2**60, values.shape, generator=generator)
            largest = torch.tensor(3.0)
            summed, expected = before.to(device), before.clone()
            found, expected_largest = largest.to(device), largest.clone()
            added, expected_added = largest.to(device).long(), largest.long()
            place = 1027 * num_compared + (checksums.ROWS - 9) * checksums.COLUMNS
            kernels.add_rounded(summed, values.to(device), scale, found, added, place)
            fixed_point.add_rounded(expected, values, scale, expected_largest, expected_added, place)
            fits = values.float().abs() * scale <= 2.0**62  # what does not is flagged, and its sum void
            assert torch.equal(summed.cpu()[fits], expected[fits]), (values.dtype, values.shape, scale)
            assert torch.equal(found.cpu().nan_to_num(nan=-1.0), expected_largest.nan_to_num(nan=-1.0))
            assert not bool(fits.all()) or torch.equal(added.cpu(), expected_added), (values.shape, scale, place)
            num_compared += 1
    return num_compared


def cases(generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Values of all magnitudes, ties among them, in sizes that fill blocks and that do not."""
    for size in (1, 5, 1024, 1025, 5003):
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield (torch.randn(size, generator=generator) * 2.0**-8).to(dtype)
        exponents = torch.randint(-149, 20, (size,), generator=generator).double()
        yield (signs * (1.0 + torch.rand(size, generator=generator)) * 2.0**exponents).float()
        for scale in SCALES:
            yield signs * (torch.randint(0, 2**22, (size,), generator=generator) + 0.5) / scale  # ties
            yield signs * torch.randint(2**22, 2**24, (size,), generator=generator) / (2.0 * scale)
    tail = torch.randn(3000, generator=generator)
    for value in (math.nan, -math.nan, math.inf, -math.inf, 3e38, -0.0, 1e-45):
        for place in (0, 1500, 2999):
            yield tail.index_fill(0, torch.tensor(place), value)


def compare_sections(device: str) -> int:
    """Copies, squares and checksums of sections that fill rows, strips and blocks and that do not."""
    from spare_megatron.mcore.gradients import checksums, kernels

    generator, row = torch.Generator().manual_seed(7), checksums.COLUMNS
    sizes = [0, 1, 255, row - 1, row, row + 1, 31 * row + 7, 32 * row]
    cases = [(size, offset, num) for size in sizes for offset, num in ((0, 3), (1, 2 * row + 5))]
    for size, offset, num in cases:
        values, counted = drawn(size + offset, generator)[offset:], drawn(num, generator)
        copy = torch.full((size + 2,), 7).to(device)
        section = kernels.TritonSectionSums(values.to(device), copy[1:-1])
        expected = checksums.SectionSums(values)
        assert copy.tolist() == [7, *values.tolist(), 7], (size, offset)
        assert torch.allclose(section.squares().cpu(), expected.squares(), rtol=1e-5), (size, offset)
        assert torch.equal(section.checksum(counted.to(device)).cpu(), expected.checksum(counted)), (size, offset, num)
    counted, missing = drawn(2 * row + 5, generator), torch.zeros((checksums.ROWS - 1) * row, dtype=torch.int64)
    two_blocks = kernels.TritonSectionSums(missing[:0].to(device))
    two_blocks._num_rows = checksums.ROWS - 1  # of zeros, which the interpreter would add for a minute
    found = two_blocks.checksum(counted.to(device))
    assert torch.equal(found.cpu(), checksums.checksum([missing, counted]))
    beyond_fp32 = torch.full((40,), 2**62)
    for section in (checksums.SectionSums(beyond_fp32), kernels.TritonSectionSums(beyond_fp32.to(device))):
        assert math.isinf(section.squares())
    lowest = torch.full((33 * row,), -(2**63))
    for values in (lowest, ~lowest):
        found = kernels.TritonSectionSums(values.to(device)).checksum(values[:3].to(device))
        assert torch.equal(found.cpu(), checksums.checksum([values, values[:3]]))
    return len(cases) + 3


def drawn(size: int, generator: torch.Generator) -> torch.Tensor:
    """Integers of all magnitudes up to 2^62."""
    values = torch.randint(-(2**62), 2**62, (size,), generator=generator)
    return values >> torch.randint(0, 62, (size,), generator=generator)


def compare_steps(device: str) -> int:
    """Buckets of several microbatches as they are staged, judged and checked, and values that do not fit."""
    from spare_megatron.mcore.gradients import gradients, kernels
    from tests.unit.test_staged_gradients import FIXED, NUM_ELEMENTS, make_sums

    limit, largest = 3e5, FIXED.largest / FIXED.scale
    generator = torch.Generator().manual_seed(7)
    cases = [[torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(num)] for num in (1, 3)]
    for value in (0.999 * limit, 1.001 * limit, largest, 1.001 * largest, math.nan, math.inf, -math.inf):
        cases.append([*cases[1], torch.zeros(NUM_ELEMENTS).index_fill(0, torch.tensor(5), value)])
    chosen = kernels.add_rounded, kernels.TritonSectionSums
    with mock.patch.object(gradients, "choose_kernels", return_value=chosen):  # as on a GPU
        found_sums = make_sums("reproducible", device)
    both = (make_sums("reproducible"), "cpu"), (found_sums, device)
    num_unsound = []
    for microbatches in cases:
        staged, norms = [], []
        for sums, place in both:
            sums.reset()
            for gradient in microbatches:
                sums._add_gradients(0, gradient.to(place))
                sums.add_count(1)
            staged.append([sums.stage(bucket, sums.new_staging(), limit) for bucket in range(len(sums.buckets))])
            norms.append(sums.norms())
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        for bucket, (expected, found) in enumerate(zip(*staged, strict=True)):
            num_unsound.append(int(expected[-3]))
            assert torch.equal(expected[-3:], found[-3:].cpu()), "flagged alike"
            if num_unsound[-1]:
                continue  # what it holds is void
            assert torch.equal(expected, found.cpu())
            found_sums.check(bucket, found)
            found_sums.check_staged(bucket, found)
            assert (found_sums.wrong_sums(), found_sums.wrong_numbers()) == ((), "")
            found[1] ^= 1
            found_sums.check(bucket, found)
            assert found_sums.wrong_sums() == (bucket,)
    assert num_unsound == 3 * 3 * [0] + [0, 1, 0] * 2 + 4 * 3 * [1], "one of a norm, all of a value that does not fit"
    return len(num_unsound)


if __name__ == "__main__":
    compared = [compare, compare_sections, compare_steps, compare_digests]
    print(sum(compare_one(sys.argv[1]) for compare_one in compared))
