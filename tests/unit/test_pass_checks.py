"""Checks of operations: products by their sums, others by computing them twice, and memory between them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from spare_megatron.config.schema import AuditConfig, RunConfig
from spare_megatron.mcore import pass_checks
from spare_megatron.mcore.model.pipeline import Item
from spare_megatron.mcore.pass_checks import ACCUMULATION, GROWTH, OUTPUT, PassChecks, checksum
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch, Numbered

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Fault(TorchDispatchMode):
    """Changes the result of the operation of this name, its `time`-th, or what it is given; counts what it strikes."""

    def __init__(self, name: str, spoil: Callable[[Tensor], object], *, of_input: bool = False, time: int = 1) -> None:
        super().__init__()
        self._name, self._spoil, self._of_input, self._left = name, spoil, of_input, time

    @property
    def has_struck(self) -> bool:
        return self._left <= 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        is_it = func.overloadpacket.__name__ == self._name
        self._left -= is_it
        strikes = is_it and self._left == 0
        if strikes and self._of_input:
            self._spoil(args[0])
        result = func(*args, **(kwargs or {}))
        if strikes and not self._of_input:
            self._spoil(result[0] if isinstance(result, tuple) else result)
        return result


def flip(bit: int, place: int = 0) -> Callable[[Tensor], None]:
    def spoil(tensor: Tensor) -> None:
        words = tensor.view(-1).view(WORDS[tensor.dtype])
        num_bits = 8 * tensor.element_size()
        words[place] ^= -(1 << bit) if bit == num_bits - 1 else 1 << bit

    return spoil


def new_checks() -> PassChecks:
    torch.set_num_threads(1)  # so that kernels repeat their results
    return PassChecks(RunConfig(), torch.device("cpu"))


def found_in(
    compute: Callable[[], object], below: AbstractContextManager[object] | None = None, checks: Any = None
) -> str:
    checks = checks or new_checks()
    with below or nullcontext(), checks.checking("forward pass"):
        compute()
    found: str = checks.found()
    return found


# ------------------------------------------------------------------------------------------------------------- products

SHAPES = [(5, 7, 9), (32, 64, 96), (64, 16, 33), (16, 300, 8)]


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_flips_above_twice_the_bound_are_found_in_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    num_rows, num_terms, num_columns = shape
    left = torch.randn(num_rows, num_terms, generator=generator).to(dtype)
    right = torch.randn(num_columns, num_terms, generator=generator).to(dtype).t()
    a, b = left.double().numpy(), right.double().numpy()
    right_size = np.linalg.norm(b)
    product = (left @ right).clone()
    rounding = torch.finfo(dtype).eps / 2 * OUTPUT if dtype is not torch.float32 else 0.0
    num_above = num_found = num_flips = 0
    places = torch.randperm(product.numel(), generator=generator)[:12].tolist()
    for place in places:
        row, value = place // num_columns, product.view(-1)[place].double().item()
        bound = 2.0**-24 * ACCUMULATION * np.linalg.norm(a[row]) * right_size
        bound += (2.0**-24 * (GROWTH + num_terms**0.5) + rounding) * np.linalg.norm(product[row].double().numpy())
        for bit in range(8 * dtype.itemsize):
            spoiled = product.clone()
            flip(bit, place)(spoiled)
            change = abs(spoiled.view(-1)[place].double().item() - value)
            fault = Fault("mm", flip(bit, place))
            found = found_in(lambda: left @ right, fault)
            assert fault.has_struck
            is_above = not change <= 2.2 * bound  # also if it is no number
            assert found or not is_above, f"bit {bit} of {value}, {change} where {bound} is possible"
            num_above, num_found, num_flips = num_above + is_above, num_found + bool(found), num_flips + 1
    assert num_found >= num_above >= num_flips // 8
    if dtype is torch.float32:
        assert num_found >= 0.65 * num_flips


def test_a_finding_names_the_product_and_the_pass() -> None:
    left, right = torch.randn(32, 64), torch.randn(64, 96)
    found = found_in(lambda: left @ right, Fault("mm", flip(30, 3000)))
    assert found.startswith("mm of [32, 64] by [64, 96] in the forward pass: its sums differ by ")


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "mm": lambda a, b, _: a[0] @ b[0],
    "bmm": lambda a, b, _: a @ b,
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=3.0),
    "addmm, of what is added": lambda a, b, _: torch.addmm(a[0], a[0], b[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, alpha=-2.0),
}


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_kind_of_product_is_checked_without_false_alarm(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    for number in range(20):
        given = [torch.randn(3, 24, 24, generator=generator) ** (1 + number % 3) for _ in range(3)]
        factors = [one.to(dtype) for one in given]
        compute = partial(PRODUCTS[name], *factors)
        assert not found_in(compute)
        operation = name.partition(",")[0]
        fault = Fault(operation, lambda product: product.view(-1)[7].add_(4 * product.abs().max()))
        assert operation in found_in(compute, fault)
        assert fault.has_struck


def test_factors_that_are_not_finite_or_overflow_are_no_finding() -> None:
    large, small = torch.full((4, 4), 1e30), torch.full((4, 4), 1e-30)
    special = torch.eye(4)
    special[0, 0], special[1, 1] = torch.inf, torch.nan
    for left, right in ((large, large), (small, small), (special, large), (large, special), (large, small)):
        assert not found_in(partial(torch.mm, left, right))
    for value in (torch.inf, torch.nan):
        fault = Fault("mm", partial(torch.Tensor.fill_, value=value))
        assert found_in(partial(torch.mm, torch.eye(4), small), fault)


def test_large_matrices_are_summed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, column = torch.randn(2, 13, 40), torch.randn(40, 1, dtype=torch.float64)
    expected = matrix.double() @ column, matrix.double().square().sum(-1).sqrt()
    monkeypatch.setattr(pass_checks, "_PIECE", 100)
    sums, norms = pass_checks._sums_and_norms(matrix, column)
    torch.testing.assert_close((sums, norms), (expected[0].squeeze(-1), expected[1]), rtol=1e-12, atol=1e-12)


def test_empty_products_are_no_finding() -> None:
    assert not found_in(lambda: (torch.empty(0, 4) @ torch.ones(4, 3), torch.empty(4, 0) @ torch.empty(0, 3)))


# ----------------------------------------------------------------------------------------------------- other operations

OTHERS: dict[str, Callable[[Tensor], object]] = {
    "gelu": torch.nn.functional.gelu,
    "native_layer_norm": lambda values: torch.nn.functional.layer_norm(values, (16,)),
    "_softmax": lambda values: values.softmax(-1),
    "sum": lambda values: values.sum(0),
    "cat": lambda values: torch.cat([values, values]),
    "exp": torch.exp,
    "mul_": lambda values: (values + 1).mul_(2.0),
    "_scaled_dot_product_flash_attention_for_cpu": lambda values: torch.nn.functional.scaled_dot_product_attention(
        *[values.view(1, 2, 8, 8)] * 3, is_causal=True
    ),
}


@pytest.mark.parametrize("bit", [0, 12, 30, 31])
@pytest.mark.parametrize("name", OTHERS)
def test_an_operation_that_differs_when_computed_twice_is_found(name: str, bit: int) -> None:
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    assert not found_in(lambda: OTHERS[name](values))
    for time in (1, 2):
        fault = Fault(name, flip(bit, 5), time=time)
        found = found_in(lambda: OTHERS[name](values), fault)
        assert fault.has_struck
        assert found.startswith(f"{name} of [")
        assert found.endswith("in the forward pass: computed twice, it is different")


@pytest.mark.parametrize("time", [1, 2])
def test_the_lowest_bit_of_a_product_is_found_where_it_does_not_come_twice(time: int) -> None:
    left, right = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    fault = Fault("mm", flip(0, 5), time=time)
    assert found_in(lambda: left @ right, fault).endswith("in the forward pass: computed twice, it is different")
    assert fault.has_struck


def test_random_numbers_are_drawn_once() -> None:
    values = torch.ones(64, 64)

    def compute() -> Tensor:
        torch.manual_seed(4)
        return torch.nn.functional.dropout(values, 0.5) + torch.rand(64, 64)

    expected, found = compute(), []
    assert not found_in(lambda: found.append(compute()))
    assert torch.equal(found[0], expected)


# ------------------------------------------------------------------------------------------------------------- memory


def test_what_is_taken_in_is_what_was_put_out() -> None:
    values = torch.randn(8, 16)

    def compute() -> None:
        first = values + 1.0
        (first.view(16, 8) * 2.0).sum()

    for bit in range(32):
        fault = Fault("mul", flip(bit, 7), of_input=True)
        found = found_in(compute, fault)
        assert fault.has_struck
        assert found == "mul of [16, 8] in the forward pass: an input is not the result that was computed"


def test_what_is_saved_is_compared_when_the_backward_pass_takes_it() -> None:
    checks, weight, kept = new_checks(), torch.randn(16, 16, requires_grad=True), []
    with checks.checking("forward pass"):
        hidden = weight.exp()
        kept.append(hidden.detach())
        total = hidden.square().sum()
    assert not checks.found()
    kept[0].numpy()[3, 3] += 1.0  # as memory changes: unseen
    with checks.checking("backward pass"):
        total.backward()
    assert "in the backward pass: an input is not the result that was computed" in checks.found()


def test_writes_by_operations_in_or_outside_a_pass_are_no_finding() -> None:
    checks, total = new_checks(), torch.zeros(16)
    with checks.checking("forward pass"):
        first = torch.randn(16) + 0.0
        first.mul_(2.0)
        first[3:5] = 7.0
        torch.add(first, 1.0, out=first)
        total += first
    first.add_(1.0)
    total.add_(1.0)
    with checks.checking("backward pass"):
        total += first * first
        first.data.mul_(3.0)
        total += first
    assert not checks.found()


def test_a_write_in_place_is_known_to_the_next_operation() -> None:
    def compute() -> None:
        first = torch.ones(16) + 0.0
        first.mul_(2.0)
        first.exp()

    fault = Fault("exp", flip(3), of_input=True)
    assert "an input is not the result" in found_in(compute, fault)
    assert fault.has_struck


def test_memory_that_is_used_again_is_no_finding() -> None:
    checks = new_checks()
    for number in range(50):
        with checks.checking("forward pass"):
            first = torch.full((1024,), float(number)) + 1.0
        del first
        outside = torch.empty(1024)  # where the sum was, if memory is used again
        outside.numpy()[:] = number
        with checks.checking("backward pass"):
            outside * 2.0
    assert not checks.found()


def test_memory_that_others_fill_is_no_finding() -> None:
    def compute() -> None:
        filled = torch.empty(64)
        filled.numpy()[:] = 1.0
        zeros = torch.zeros_like(filled)
        zeros * 2.0
        zeros.numpy()[:] = 2.0
        zeros * filled

    assert not found_in(compute)


# --------------------------------------------------------------------------------------------------------- whole passes


def _trained(checks: PassChecks | None, *, recomputes: bool) -> list[Tensor]:
    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-3)
    for _ in range(60):
        values = torch.randn(2, 16, 32, requires_grad=True)
        with checks.checking("pass") if checks else torch.enable_grad():
            output = checkpoint(layer, values, use_reentrant=True) if recomputes else layer(values)
            output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in layer.parameters()]


@pytest.mark.parametrize("recomputes", [False, True])
def test_checks_change_nothing_and_find_nothing(recomputes: bool) -> None:
    checks = new_checks()
    with_checks = _trained(checks, recomputes=recomputes)
    assert not checks.found()
    assert all(map(torch.equal, with_checks, _trained(None, recomputes=recomputes)))


def test_a_compiled_function_stays_one() -> None:
    compiled = torch.compile(lambda values: (values * 3.0).exp(), backend="eager")
    values = torch.randn(16)
    checks = new_checks()
    with checks.checking("pass"):
        result = compiled(values)
    assert torch.equal(result, (values * 3.0).exp())
    assert not checks.found()


@pytest.mark.parametrize("num_values", [0, 1, 2, 3, 1000, 1001])
def test_a_checksum_is_that_of_the_bytes(num_values: int) -> None:
    values = torch.randn(num_values, 3).to(torch.bfloat16)
    words = values.contiguous().view(torch.uint8).numpy().tobytes()
    kind = next(kind for kind in (np.int64, np.int32, np.int8) if len(words) % np.dtype(kind).itemsize == 0)
    expected = int(np.frombuffer(words, kind).sum(dtype=np.int64)) if words else 0
    assert int(checksum(values)) == int(checksum(torch.cat([values, values])[:num_values])) == expected


def test_findings_are_forgotten_with_the_step() -> None:
    checks = new_checks()
    assert found_in(lambda: torch.ones(4, 4) @ torch.ones(4, 4), Fault("mm", flip(30)), checks)
    checks.begin_step(2)
    assert not checks.found()


def test_layers_whose_operations_are_not_torchs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_checks, "uses_transformer_engine", lambda *_: True)
    config = RunConfig(audit=AuditConfig(products=0.5))
    with pytest.raises(ValueError, match=r"products=0\.5, but the layers are those of transformer-engine"):
        PassChecks(config, torch.device("cpu"))
    checks = PassChecks(RunConfig(), torch.device("cpu"))
    items = [Item(Numbered(Microbatch(ShardId(0), 0), number)) for number in range(2000)]
    chunk: Any = None
    assert not any(checks.around(chunk, item, "forward") for item in items)
