"""How many variants of a kernel Triton compiles: all before the first step, whatever a recovery adds or compares."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from spare_megatron.mcore import gradients
from spare_megatron.mcore.gradients import checksums, digests, fixed_point

CPU = torch.device("cpu")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.float64: "fp64"}

Signature = tuple[Any, ...]


class Constant:
    """`tl.constexpr`: of a parameter the type, of the module a value."""

    def __init__(self, value: int) -> None:
        self.value = value


class Kernel:
    """A function under `triton.jit`, which is never run: a launch only notes the variant that it needs."""

    def __init__(self, function: Callable[..., None], compiled: set[Signature], marks: dict[str, list[str]]) -> None:
        self._name = function.__name__
        self._parameters = inspect.signature(function).parameters
        self._unmarked = frozenset(self._parameters).difference(marks.get("do_not_specialize", ()))
        self._aligned = self._unmarked.difference(marks.get("do_not_specialize_on_alignment", ()))
        assert marks.keys() <= {"do_not_specialize", "do_not_specialize_on_alignment"}
        assert {name for names in marks.values() for name in names} <= self._parameters.keys()
        self._compiled = compiled

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, **constants: int) -> None:
            arguments = dict(zip(self._parameters, given, strict=False)) | constants
            assert arguments.keys() == self._parameters.keys()
            self._compiled.add((self._name, *(self.variant(name, value) for name, value in arguments.items())))

        return launch

    def variant(self, name: str, value: Any) -> Signature:
        """The type of an argument, and what Triton assumes of its value."""
        annotation = self._parameters[name].annotation
        if annotation is Constant:
            return "constexpr", value
        is_aligned = name in self._aligned
        if isinstance(value, Tensor):
            return f"*{TYPES[value.dtype]}", "D" if is_aligned and value.data_ptr() % 16 == 0 else ""
        if isinstance(value, float):
            return "fp32", ""
        if value == 1 and name in self._unmarked and annotation is inspect.Parameter.empty:
            return "constexpr", 1
        fits = -(2**31) <= value < 2**31
        kind = annotation if annotation is not inspect.Parameter.empty else "i32" if fits else "i64"
        return kind, "D" if is_aligned and value % 16 == 0 else ""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Signature]]:
    """The variants that are compiled, with a stand-in for Triton, which is not installed with torch for CPUs."""
    found: set[Signature] = set()

    def jit(function: Callable[..., None] | None = None, **marks: list[str]) -> Any:
        return Kernel(function, found, marks) if function else lambda function: Kernel(function, found, marks)

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(jit=jit, cdiv=lambda numerator, denominator: -(-numerator // denominator), language=language)
    vars(language).update(constexpr=Constant, int64="i64")
    name = "spare_megatron.mcore.gradients.kernels"
    for module in (triton, language):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name)
    yield found
    del sys.modules[name]
    del gradients.kernels


def test_nothing_is_compiled_for_the_gradients_of_a_patch(compiled: set[Signature]) -> None:
    """Buckets that are kept end at any element, so a patch adds the rest of a parameter: any size, at any address."""
    from spare_megatron.mcore.gradients import kernels

    kernels.check_fixed_point(CPU)
    of_gradients = [signature for signature in compiled if signature[0] == "_add_rounded"]
    assert len(of_gradients) == 8, "2 types of gradients, each aligned or not, and sums aligned or not"
    at_start = set(compiled)
    sums, largest = torch.zeros(5003, dtype=torch.int64), torch.zeros(3)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.zeros(5003, dtype=dtype)
        for first in (*range(64), 1023, 1024, 4987, 5002):
            for size in (5003 - first, 1, 16, 1024):
                place = sums[first:][:size], values[first:][:size], 2.0**31, largest[first % 3]
                kernels.add_rounded(*place, sums[first % 2], size - first)
    for size in (2**31 - 1, 2**31, 2**33):  # of embeddings, on a device that computes nothing
        huge = torch.empty(size, device="meta")
        into = torch.empty(size, dtype=torch.int64, device="meta")
        kernels.add_rounded(into, huge, 1.0, largest[0], sums[0], size)
    assert compiled == at_start


def test_nothing_is_compiled_for_the_buckets_that_are_staged_and_checked(compiled: set[Signature]) -> None:
    """Of any size, in sections that begin anywhere, with as much counted beside them as there are experts."""
    from spare_megatron.mcore.gradients import kernels

    kernels.check_fixed_point(CPU)
    names = [signature[0] for signature in compiled if signature[0] != "_add_rounded"]
    assert sorted(names) == ["_add_rows", "_add_rows", "_finish_checksum"], "with and without a copy, and digits"
    at_start = set(compiled)
    values = torch.zeros(5 * checksums.COLUMNS + 7, dtype=torch.int64)
    for first in range(5):
        for size in (0, 1, 16, checksums.COLUMNS, len(values) - first):
            section = values[first:][:size]
            for copy in (None, values[1:][:size], values[2:][:size]):
                for num_counted in (1, 3, 16, 2 * checksums.COLUMNS + 1):
                    kernels.TritonSectionSums(section, copy).checksum(values[first:][:num_counted])
    for size in (2**28, 2**31, 2**33):  # of rows that no block before has
        huge = torch.empty(size, dtype=torch.int64, device="meta")
        sections = kernels.TritonSectionSums.__new__(kernels.TritonSectionSums)
        sections._sums = torch.zeros(2, 2, checksums.COLUMNS, dtype=torch.int64)
        sections._add(huge, huge, size // checksums.COLUMNS)
    assert compiled == at_start


def test_nothing_is_compiled_for_the_digests_of_a_recovery(
    compiled: set[Signature], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spare_megatron.mcore.gradients import kernels

    compile_all = kernels.can_sum_blocks
    monkeypatch.setattr(digests, "_has_kernel", lambda _: compile_all(CPU, digests.BLOCK_WORDS))  # as on a GPU
    digests.prepare_digests(CPU)
    assert len(compiled) == 1, "a table has the addresses and sizes"
    at_start = set(compiled)
    words = torch.zeros(3 * digests.BLOCK_WORDS + 7, dtype=torch.int32)
    for first in range(6):
        for num_words in (digests.BLOCK_WORDS, 2 * digests.BLOCK_WORDS, len(words) - first, 5):
            digests.words_digest(words[first : first + num_words])
    for first in range(9):  # in bf16, and in bytes that begin in no word
        digests.words_digest(words.view(torch.bfloat16)[first:])
        digests.words_digest(words.view(torch.uint8)[first:])
    assert compiled == at_start


@pytest.mark.usefixtures("compiled")
def test_one_launch_takes_all_tensors_eight_blocks_to_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has address, words and first row of each program: of every tensor, those with an odd end in two parts."""
    from spare_megatron.mcore.gradients import kernels

    tables: list[Tensor] = []

    class Launches:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda table, *_, **__: tables.append(table[: grid[0]])

    monkeypatch.setattr(kernels, "_sum_blocks", Launches())
    monkeypatch.setattr(digests, "_has_kernel", lambda _: True)
    block = digests.BLOCK_WORDS
    whole, short = torch.zeros(17 * block, dtype=torch.int32), torch.zeros(block + 5)
    odd = torch.zeros(2 * block + 1, dtype=torch.bfloat16)
    digests.TensorsDigest([("whole", whole), ("empty", short[:0]), ("short", short), ("odd", odd)])
    (table,) = tables
    addresses = [whole.data_ptr() + 4 * 8 * block * number for number in range(3)] + [short.data_ptr(), odd.data_ptr()]
    assert table[:5, 0].tolist() == addresses
    assert table[:, 1].tolist() == [17 * block, 9 * block, block, block + 5, block, 1]
    assert table[:, 2].tolist() == [0, 8, 16, 17, 19, 20]


def test_variants_differ_as_in_triton() -> None:
    """The rules of this file against Triton's own, where that is installed; it needs no GPU for them."""
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds; its 286 MB are too much for the tests")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from spare_megatron.mcore.gradients import kernels

    backend = make_backend(GPUTarget("cuda", 90, 32))
    jitted = kernels._add_rounded
    bind = create_function_from_signature(jitted.signature, jitted.params, backend)
    marks = {
        "do_not_specialize": list(jitted.do_not_specialize),
        "do_not_specialize_on_alignment": list(jitted.do_not_specialize_on_alignment),
    }
    ours = Kernel(jitted.fn, set(), marks)
    assert list(map(str, ours._parameters)) == [parameter.name for parameter in jitted.params]
    pairs = set()
    sums, values = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
    for first in range(5):
        for dtype in (torch.float32, torch.bfloat16):
            for size in (1, 16, 17, 2**31):
                largest = torch.zeros(9, dtype=torch.int32)[first:]
                given = (
                    sums[first:],
                    values.to(dtype)[first:],
                    largest,
                    sums[first],
                    sums,
                    sums,
                    sums,
                    2.0,
                    first,
                    size,
                )
                theirs = tuple(map(str, bind(*given, 1024)[1]))
                pairs.add((theirs, tuple(map(str, map(ours.variant, ours._parameters, (*given, 1024))))))
    theirs_of, ours_of = (len({pair[side] for pair in pairs}) for side in range(2))
    assert (theirs_of, ours_of, len(pairs)) == (6, 6, 6), "one to one, and the size matters to neither"


def test_the_check_of_a_machine_compiles_every_variant_or_says_why_not(
    compiled: set[Signature], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that fails is the reason, not the first one alone."""
    from spare_megatron.mcore.gradients import kernels

    launched: list[Tensor] = []

    def add_rounded(_sums: Tensor, values: Tensor, *_: object) -> None:
        launched.append(values)
        if values.dtype == torch.bfloat16:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "add_rounded", add_rounded)
    with pytest.raises(ValueError, match=r"Failed to find C compiler; install a C compiler"):
        kernels.check_fixed_point(CPU)
    assert [values.dtype for values in launched] == [torch.float32] * 4 + [torch.bfloat16]
    assert fixed_point.choose_kernels(CPU) == (fixed_point.add_rounded, checksums.SectionSums)
