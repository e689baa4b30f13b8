"""Checks a pass operation by operation, below autograd: products by their sums, all others by computing them twice, and
inputs by the checksums of the results that they are.

A product Y = A B is compared with its operands by Y r = A (B r) for a vector r of random signs (Huang and Abraham,
Algorithm-Based Fault Tolerance for Matrix Operations, IEEE Transactions on Computers C-33, 1984). docs/audits.md has
what no check sees.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.devices import gpu

ACCUMULATION = 6.0
"""Bound of the error of a row's sum, in roundings of the norm of the row of A times that of B. Rounding errors act as
independent random numbers (Higham and Mary, SIAM Journal on Scientific Computing 41, 2019); the factor is measured."""
GROWTH = 8.0
"""The same, plus the root of the number of terms, in roundings of the norm of the row of Y: as that root partial sums
err whose terms have one sign."""
OUTPUT = 4.0
"""The same for the rounding of Y to its format. An error is at most u |y|, and as a uniform one it has the variance of
(u y)^2 / 3; so with random signs their sum is larger with probability 2 exp(-24) at most (Hoeffding)."""

_PIECE = 1 << 24
"""Elements converted to another format at a time."""
_LEAST = 2.0**-62
"""The square of what is smaller is lost in fp32."""

_UnseenByModes = torch._C._DisableTorchDispatch
"""Computes without the modes below, which inject faults."""

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default: ("self", "mat2"),
    _aten.bmm.default: ("self", "mat2"),
    _aten.addmm.default: ("mat1", "mat2"),
    _aten.baddbmm.default: ("batch1", "batch2"),
}
"""Products, with the names of their factors."""
_ROUNDINGS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_OF_PRECISION = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}
"""Roundings in products of fp32, by torch's setting."""

_TWICE = "computed twice, it is different"
_TAKEN = "an input is not the result that was computed"


_Check = tuple[str, str, Sequence[Sequence[int]], Tensor, Tensor | None]
"""What is wrong, an operation, its shapes, and two checksums that have to be equal or an excess of at most 1."""


class _Record(NamedTuple):
    """Checksum of a storage that an operation has written. The reference keeps its address from being used again;
    another version of its tensors shows a write that was not seen.
    """

    checksum: Tensor
    version: int
    reference: StorageWeakRef


class CheckedOperations(TorchDispatchMode):
    """What a rank's checks have found since `forget`; in `checking`, every operation is checked.

    `repeats`: kernels repeat their results bitwise. `keeps_records`: nothing but operations of torch writes tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, *, repeats: bool, keeps_records: bool) -> None:
        super().__init__()
        self._repeats, self._keeps_records = repeats, keeps_records
        self._records: dict[int, _Record] = {}
        self._checks: list[_Check] = []
        self._settled: list[tuple[str, list[_Check], Tensor]] = []
        self._found = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled function stays one: its parts may round otherwise

    def forget(self) -> None:
        self._found = ""
        for kept in (self._records, self._checks, self._settled):
            kept.clear()

    def found(self) -> str:
        """The first thing that is wrong since `forget`, in words; empty if nothing is. Waits for the device."""
        for where, checks, excesses in self._settled if not self._found else ():
            wrong = [
                (check, excess) for check, excess in zip(checks, excesses.tolist(), strict=True) if not excess <= 1
            ]
            if wrong and not self._found:
                (what, operation, shapes, *_), excess = wrong[0]
                of_sums = f"its sums differ by {excess:.3g} times what rounding explains"
                subject = f"{operation} of {' by '.join(str(list(shape)) for shape in shapes)}"
                self._found = f"{subject} in the {where}: {what or of_sums}"
        self._settled.clear()
        return self._found

    @contextmanager
    def checking(self, where: str) -> Iterator[None]:
        """Checks the operations in this context, a pass that `where` names."""
        with self:
            yield
        with _UnseenByModes():
            self._settle(where)
        for key in [key for key, record in self._records.items() if record.reference.expired()]:
            del self._records[key]

    def compare(self, where: str, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        """Compares tensors by name with the checksums that they have to have."""
        with _UnseenByModes():
            for name in sorted(given.keys() & expected.keys()):
                sums = expected[name].to(given[name].device, non_blocking=True), checksum(given[name])
                self._checks.append(("it is not what was read", name, (given[name].shape,), *sums))
            self._settle(where)

    def _settle(self, where: str) -> None:
        """Makes one tensor of the comparisons of a pass on each device."""
        all_checks, self._checks = self._checks, []
        for device in {check[3].device for check in all_checks}:
            checks = [check for check in all_checks if check[3].device == device]
            excesses = torch.zeros(len(checks), dtype=torch.float64, device=device)
            if products := [(index, one) for index, (*_, one, other) in enumerate(checks) if other is None]:
                indices, found = zip(*products, strict=True)
                excesses[[*indices]] = torch.stack(found)
            if pairs := [(index, one, other) for index, (*_, one, other) in enumerate(checks) if other is not None]:
                indices, ours, theirs = zip(*pairs, strict=True)
                excesses[[*indices]] = (torch.stack(ours) != torch.stack(theirs)).double() * 2
            self._settled.append((where, checks, excesses))
        if all(excesses.device.type == "cpu" for *_, excesses in self._settled):
            self.found()  # there is nothing to wait for

    # --------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        traits = _traits_of(func)
        if types or traits.is_passed:
            return func(*args, **options)
        taken = _tensors((*args, *options.values()))
        crosses = traits.may_cross and (options.get("device") or len({one.device for one in taken}) > 1)
        if traits.is_foreign or crosses:
            for tensor in taken:
                self._records.pop(_key(tensor), None)
            return func(*args, **options)
        if traits.written:
            return self._write(func, args, options, taken)
        output = func(*args, **options)
        made = _tensors((output,))
        factors = _PRODUCTS.get(func) if made and made[0].dtype in _ROUNDINGS else None
        repeats = factors is None and self._repeats and traits.is_repeatable(args, options)
        again = _tensors((func(*args, **options),)) if repeats else []
        with _UnseenByModes():
            for tensor in taken:  # after it was read
                self._verify(traits, tensor)
            if factors is not None and made[0].numel() and taken[-1].numel():
                given = {**dict(zip(traits.names, args, strict=False)), **options}
                shapes = [given[name].shape for name in factors]
                self._checks.append(("", traits.name, shapes, _excess_of(made[0], factors, given), None))
            sums = [checksum(tensor) for tensor in made]
            for tensor, known, other in zip(made[: traits.num_checked], sums, again, strict=False):
                self._checks.append((_TWICE, traits.name, (tensor.shape,), known, checksum(other)))
            keys = {_key(tensor) for tensor in taken}
            for tensor, known in zip(made, sums, strict=True) if self._keeps_records else ():
                if _is_whole(tensor) and _key(tensor) not in keys:
                    self._record(tensor, known, tensor._version)
        return output

    def _write(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], taken: Sequence[Tensor]) -> Any:
        """An operation that writes into some of what it takes. It is repeated on copies of whole tensors, unless it
        takes other parts of them: parts of larger ones are, above all, local sums.
        """
        traits = _traits_of(func)
        given = {**dict(zip(traits.names, args, strict=False)), **options}
        written = _tensors(given.get(name) for name in traits.written)
        ids, keys = {id(tensor) for tensor in written}, {_key(tensor) for tensor in written}
        is_alone = len(keys) == len(ids) and all(id(one) in ids or _key(one) not in keys for one in taken)
        repeats = self._repeats and is_alone and traits.is_repeatable(args, options) and all(map(_is_whole, written))
        with _UnseenByModes():
            for tensor in taken:
                self._verify(traits, tensor)
            copies = {id(tensor): tensor.clone() for tensor in written if repeats}
        output = func(*args, **options)
        if repeats:
            repeated = {name: copies.get(id(one), one) for name, one in options.items()}
            func(*(copies.get(id(one), one) for one in args), **repeated)
        with _UnseenByModes():
            for tensor in written:
                if repeats:
                    sums = checksum(tensor), checksum(copies[id(tensor)])
                    self._checks.append((_TWICE, traits.name, (tensor.shape,), *sums))
                if _key(tensor) in self._records:  # autograd counts the write when this returns
                    self._record(tensor, _checksum_of_storage(tensor), tensor._version + 1)
        return output

    def _record(self, tensor: Tensor, checksum: Tensor, version: int) -> None:
        storage = tensor.untyped_storage()
        self._records[storage._cdata] = _Record(checksum, version, StorageWeakRef(storage))

    def _verify(self, traits: "_Traits", tensor: Tensor) -> None:
        """Compares an input of an operation with the result that it was, where that is known."""
        record = self._records.get(_key(tensor))
        if record is not None and record.version == tensor._version:
            sums = record.checksum, _checksum_of_storage(tensor)
            self._checks.append((_TAKEN, traits.name, (tensor.shape,), *sums))
        elif record is not None:
            del self._records[_key(tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What is known of an operation by its schema and tags. `is_passed`: it computes nothing; `is_foreign`: it is not
    torch's own, such as a collective, and may write what it takes at any time.
    """

    name: str
    names: Sequence[str] = ()
    written: Sequence[str] = ()
    is_passed: bool = False
    is_foreign: bool = False
    is_random: bool = False
    is_reproducible: bool = True
    may_cross: bool = False
    """Whether it may copy to another device, which need not have ended when it returns."""

    @property
    def num_checked(self) -> int | None:
        """Results that are compared: beside the first of attention, state of generators need not be written."""
        return 1 if self.is_random else None

    def is_repeatable(self, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Whether it makes the same again, as attention does without dropout."""
        if not self.is_random:
            return self.is_reproducible
        given = {**dict(zip(self.names, args, strict=False)), **options}
        return "dropout_p" in self.names and not given.get("dropout_p")


@cache
def _traits_of(func: Any) -> _Traits:
    if not isinstance(func, torch._ops.OpOverload):
        return _Traits(name=str(func), is_passed=True)  # what a higher-order operation calls comes by itself
    arguments, tags, name = func._schema.arguments, func.tags, func.overloadpacket.__name__
    names = [argument.name for argument in arguments]
    written = [one for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    makes_constants = "pin_memory" in names and "non_blocking" not in names
    is_view = not written and any(one.alias_info is not None for one in func._schema.returns)
    is_foreign = (
        func.namespace != "aten"
        or torch.Tag.maybe_aliasing_or_mutating in tags
        or any(str(one.type) not in ("Tensor", "Optional[Tensor]") for one in written)
        or name in ("set_", "resize_", "resize_as_")
    )
    return _Traits(
        name=name,
        names=names,
        written=[one.name for one in written],
        is_passed=makes_constants or is_view or torch.Tag.inplace_view in tags or name in _PASSED,
        is_foreign=is_foreign or not any("Tensor" in str(one.type) for one in func._schema.returns),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_reproducible=torch.Tag.nondeterministic_bitwise not in tags,
        may_cross="non_blocking" in names,
    )


_PASSED = ("_unsafe_view", "_local_scalar_dense")
"""A view that does not say so, and what gives a number to the host."""


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


# ------------------------------------------------------------------------------------------------------------ checksums


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def checksum(tensor: Tensor) -> Tensor:
    """Sum mod 2^64 of a tensor's bytes as whole numbers: a flipped bit always changes it."""
    with _UnseenByModes():
        whole = tensor if _is_whole(tensor) else tensor.clone(memory_format=torch.contiguous_format)
        return _checksum_of_storage(whole)


def _checksum_of_storage(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    dtype = torch.int64 if num_bytes % 8 == 0 else torch.int32 if num_bytes % 4 == 0 else torch.int8
    words = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (num_bytes // dtype.itemsize,))
    return words.sum()


# ------------------------------------------------------------------------------------------------------------- products


def _excess_of(product: Tensor, factors: Sequence[str], given: Mapping[str, Any]) -> Tensor:
    """The largest quotient of the error of a row's sum and its bound: more than 1, or no number, is wrong. Both factors
    are among the arguments `given`.
    """
    left, right = (given[name] for name in factors)
    num_terms, num_columns = right.shape[-2:]
    signs = _signs(num_columns, product.device)
    expected = _times(left, _times(right, signs).unsqueeze(-1))
    of_right = _squares(right).sum(-1, keepdim=True).sqrt() + _LEAST * (num_terms * num_columns) ** 0.5
    size = (_squares(left).sqrt() + _LEAST * num_terms**0.5) * of_right
    if "self" not in factors:  # beta self + alpha A B
        alpha, beta, added = given.get("alpha", 1), given.get("beta", 1), given["self"].expand(product.shape)
        expected, size = alpha * expected, abs(alpha) * size
        if beta:
            expected, size = expected + beta * _times(added, signs), size + abs(beta) * _squares(added).sqrt()
    formats, unit = torch.finfo(product.dtype), _unit(product)
    of_rows = torch.fmin(_squares(product).sqrt(), size)  # a wrong element does not raise the bound
    rounding = OUTPUT * formats.eps / 2 if formats.bits < 32 else 0.0
    least = num_columns * (num_terms * 2.0**-126 + formats.smallest_normal * formats.eps)
    bound = ACCUMULATION * unit * size + ((GROWTH + num_terms**0.5) * unit + rounding) * of_rows + least
    excesses = (_times(product, signs if formats.bits == 32 else signs.float()) - expected).abs() / bound
    # Where the factors are not finite, or the product may overflow, no result is wrong.
    return torch.where(size < formats.max, excesses, 0.0).amax()


def _unit(product: Tensor) -> float:
    """The rounding of terms and partial sums of a product."""
    if product.dtype is torch.float32:
        return _OF_PRECISION[torch.get_float32_matmul_precision()]
    kind = "bf16" if product.dtype is torch.bfloat16 else "fp16"
    may_round = product.device.type != "cpu" and getattr(gpu.matmul, f"allow_{kind}_reduced_precision_reduction")
    return _ROUNDINGS[product.dtype if may_round else torch.float32]


@cache
def _signs(number: int, device: torch.device) -> Tensor:
    """A column of random signs, the same in every process; as many of each, so that what columns share cancels out."""
    signs = torch.randperm(number, generator=torch.Generator().manual_seed(number)).unsqueeze(-1) % 2 * 2 - 1
    return signs.to(device, torch.float64)


def _times(matrix: Tensor, column: Tensor) -> Tensor:
    """The product with a column, in its format."""
    return _by_rows(matrix, lambda rows: (rows.to(column.dtype) @ column).squeeze(-1))


def _squares(matrix: Tensor) -> Tensor:
    """The sum of the squares of each row, in fp32."""
    return _by_rows(matrix, lambda rows: torch.linalg.vecdot(rows.float(), rows.float()))


def _by_rows(matrix: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What is computed of each row, of a piece at a time."""
    if matrix.numel() <= _PIECE:
        return compute(matrix)
    rows = max(1, _PIECE * matrix.shape[-2] // matrix.numel())
    return torch.cat([compute(part) for part in matrix.split(rows, dim=-2)], dim=-1)
