"""Checks drawn passes of a rank operation by operation, below autograd: products by their sums, all operations by
computing them twice, and inputs by the checksums of the results that they are.

A product Y = A B is compared with its operands by Y r = A (B r) for a vector r of random signs (Huang and Abraham,
Algorithm-Based Fault Tolerance for Matrix Operations, IEEE Transactions on Computers C-33, 1984). docs/audits.md has
what no check sees.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.audits.audits import is_checked
from spare_megatron.devices import gpu
from spare_megatron.mcore.model.compatibility import part_of_context_rank
from spare_megatron.mcore.model.model import Chunk, kernels_of, uses_transformer_engine
from spare_megatron.mcore.model.pipeline import Item
from spare_megatron.stacking.plans import Numbered

ACCUMULATION = 6.0
"""Bound of the error of a row's sum, in roundings of the norm of the row of A times that of B. Rounding errors act as
independent random numbers (Higham and Mary, SIAM Journal on Scientific Computing 41, 2019); the factor is measured."""
GROWTH = 8.0
"""The same, plus the root of the number of terms, in roundings of the norm of the row of Y: as that root partial sums
err whose terms have one sign."""
OUTPUT = 4.0
"""The same for the rounding of Y to its format. An error is at most u |y|, and as a uniform one it has the variance of
(u y)^2 / 3; so with random signs their sum is larger with probability 2 exp(-24) at most (Hoeffding)."""

_EXCESS = "{excess}"
_PIECE = 1 << 24
"""Elements converted to fp64 at a time."""
_UnseenByModes = torch._C._DisableTorchDispatch
"""Computes without the modes below, which inject faults."""
_aten = torch.ops.aten
_FACTORS = {
    _aten.mm.default: ("self", "mat2"),
    _aten.bmm.default: ("self", "mat2"),
    _aten.addmm.default: ("mat1", "mat2"),
    _aten.baddbmm.default: ("batch1", "batch2"),
}
"""Products, with the names of their factors."""
_PASSED = ("_unsafe_view", "_local_scalar_dense")
"""A view that does not say so, and what gives a number to the host."""
_ROUNDINGS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_OF_PRECISION = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}
"""Roundings in products of fp32, by torch's setting."""


class _Record(NamedTuple):
    """Checksum of a storage that an operation has written. The reference keeps its address from being used again;
    another version of its tensors shows a write that was not seen.
    """

    checksum: Tensor
    version: int
    reference: StorageWeakRef


class PassChecks(TorchDispatchMode):
    """The checks that a rank makes of its own passes, and what they have found in a step. They change no number."""

    supports_higher_order_operators = True

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """Raises ValueError if passes are to be checked whose operations are not torch's."""
        super().__init__()
        is_cpu, self._share = device.type == "cpu", config.audit.products
        if self._share > 0.0 and uses_transformer_engine(config, device):
            raise ValueError(
                f"audit.products={self._share}, but the layers are those of transformer-engine, whose operations are "
                f"not torch's and cannot be checked; remove it, or set model.transformer_impl=local"
            )
        self._seed = config.train.seed
        self._repeats = torch.are_deterministic_algorithms_enabled() or (is_cpu and torch.get_num_threads() == 1)
        """Whether kernels repeat their results bitwise."""
        has_fusions = not is_cpu and kernels_of(config, device)["fusions"] != "none"
        self._keeps_records = not (has_fusions or config.program.file)
        """Whether nothing but operations of torch writes tensors."""
        self._step, self._where, self._found = 0, "", ""
        self._read: dict[str, Tensor] = {}
        self._records: dict[int, _Record] = {}
        self._numbers = count()
        self._checks: list[tuple[int, str, Tensor]] = []
        """What is wrong, in words, if an excess is not below 1. It may be a truth value: whether checksums differ."""
        self._settled: list[tuple[list[tuple[int, str]], Tensor]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled function stays one: its parts may round otherwise

    def begin_step(self, step: int) -> None:
        """Forgets what was found in the step before."""
        self._step, self._found = step, ""
        for kept in (self._records, self._checks, self._settled):
            kept.clear()

    def found(self) -> str:
        """The first thing that is wrong since `begin_step`, in words; empty if nothing is. Waits for the device."""
        self._settle()
        wrong = [
            (number, message.replace(_EXCESS, f"{excess:.3g}"))
            for numbered, excesses in self._settled
            for (number, message), excess in zip(numbered, excesses.tolist(), strict=True)
            if not excess < 1
        ]
        self._settled.clear()
        self._found = self._found or min(wrong, default=(0, ""))[1]
        return self._found

    def around(
        self, chunk: Chunk, item: Item, which: Literal["forward", "backward"]
    ) -> AbstractContextManager[object] | None:
        """Where a pass runs whose operations are checked, if it is drawn."""
        if item.is_padding or not is_checked(self._share, self._seed, self._step, item.microbatch.number):
            return None
        return self.checking(f"{which} pass of {_named(item.microbatch)} at stage {chunk.stage}")

    @contextmanager
    def checking(self, where: str) -> Iterator[None]:
        """Checks the operations in this context, a pass that `where` names."""
        self._where = where
        with self:
            yield
        self._settle()
        for key in [key for key, record in self._records.items() if record.reference.expired()]:
            del self._records[key]

    def on_read(self, batch: Mapping[str, Tensor], context_parallel: ProcessGroup) -> None:
        """What was read of a microbatch, of which `on_batch` gets the part that a model takes in."""
        if self._share > 0.0:
            part = part_of_context_rank(dict(batch), context_parallel)
            self._read = {name: checksum(tensor) for name, tensor in part.items()}

    def on_batch(self, batch: Mapping[str, Tensor], microbatch: Numbered) -> None:
        """Compares what a model takes in with what was read."""
        with _UnseenByModes():
            for name in sorted(batch.keys() & self._read.keys()):
                known = self._read[name].to(batch[name].device, non_blocking=True)
                differs, where = known != checksum(batch[name]), f"batch of {_named(microbatch)}"
                self._expect(name, "it is not what was read", differs, batch[name], where=where)

    def _settle(self) -> None:
        """Makes one tensor of the checks of a pass on each device, of either type."""
        of_kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Tensor]]] = {}
        for check in self._checks:
            of_kinds.setdefault((check[2].device, check[2].dtype), []).append(check)
        with _UnseenByModes():
            for checks in of_kinds.values():
                self._settled.append(([one[:2] for one in checks], torch.stack([excess for *_, excess in checks])))
        self._checks.clear()

    def _expect(self, name: str, wrong: str, excess: Tensor, *tensors: Tensor, where: str = "") -> None:
        shapes = " by ".join(str(list(one.shape)) for one in tensors)
        message = f"{name} of {shapes} in the {where or self._where}: {wrong}"
        self._checks.append((next(self._numbers), message, excess))

    # --------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if types or not isinstance(func, torch._ops.OpOverload) or _traits_of(func).is_passed:
            return func(*args, **options)  # what a higher-order operation calls comes by itself
        traits, taken = _traits_of(func), _tensors((*args, *options.values()))
        keys = {_key(tensor) for tensor in taken}
        crosses = traits.may_cross and (options.get("device") or len({one.device for one in taken}) > 1)
        if traits.is_foreign or crosses:
            for key in keys:
                self._records.pop(key, None)
            return func(*args, **options)
        given = {**dict(zip(traits.names, args, strict=False)), **options}
        written = {id(one): one for one in _tensors([given.get(name) for name in traits.written])}
        is_product = func in _FACTORS and bool(taken) and taken[0].dtype in _ROUNDINGS
        repeats = self._repeats and traits.is_repeatable(given) and _can_copy(written, taken)
        with _UnseenByModes():
            if written:
                self._verify(traits.name, taken)
            copies = {number: tensor.clone() for number, tensor in written.items() if repeats}
        output, again = func(*args, **options), None
        if repeats:
            copied = {name: copies.get(id(one), one) for name, one in options.items()}
            again = func(*(copies.get(id(one), one) for one in args), **copied)
        with _UnseenByModes():
            if not written:
                self._verify(traits.name, taken)  # after it was read
            made = [*written.values()] or _tensors(output)
            if is_product and made[0].numel():
                left, right = (given[name] for name in _FACTORS[func])
                excess = _excess_of(made[0], left, right, None if "self" in _FACTORS[func] else given)
                wrong = f"its sums differ by {_EXCESS} times what rounding explains"
                self._expect(traits.name, wrong, excess, left, right)
            others = [*copies.values()] or _tensors(again)
            if traits.is_random:  # beside the first result of attention, state of generators need not be written
                del others[1:]
            for tensor, other in zip_longest(made, others):
                is_new = self._keeps_records and _is_whole(tensor) and _key(tensor) not in keys
                is_kept = _key(tensor) in self._records if written else is_new
                self._on_result(traits, tensor, other, is_kept=is_kept)
        return output

    def _verify(self, name: str, taken: Iterable[Tensor]) -> None:
        """Compares what an operation takes with the results that it was, where those are known."""
        for tensor in taken:
            record = self._records.get(_key(tensor))
            if record is not None and record.version == tensor._version:
                differs = record.checksum != _checksum_of_storage(tensor)
                self._expect(name, "an input is not the result that was computed", differs, tensor)
            elif record is not None:
                del self._records[_key(tensor)]

    def _on_result(self, traits: "_Traits", result: Tensor, again: Tensor | None, *, is_kept: bool) -> None:
        """Compares a result with what the operation has made `again`; records its checksum if it `is_kept`."""
        if again is None and not is_kept:
            return
        known = _checksum_of_storage(result) if traits.written else checksum(result)
        if again is not None:
            self._expect(traits.name, "computed twice, it is different", known != checksum(again), result)
        if is_kept:  # autograd counts a write when the operation returns
            version = result._version + bool(traits.written)
            self._records[_key(result)] = _Record(known, version, StorageWeakRef(result.untyped_storage()))


def _named(microbatch: Numbered) -> str:
    return f"microbatch {microbatch.unit.index} of shard {microbatch.unit.shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What is known of an operation by its schema and tags. `is_passed`: it computes nothing; `is_foreign`: it is not
    torch's own, such as a collective, and may write what it takes at any time; `may_cross`: it may copy to another
    device, which need not have ended when it returns.
    """

    name: str
    names: Sequence[str]
    written: Sequence[str]
    is_passed: bool
    is_foreign: bool
    is_random: bool
    is_reproducible: bool
    may_cross: bool

    def is_repeatable(self, given: Mapping[str, Any]) -> bool:
        """Whether it makes the same again, as attention does without dropout."""
        if self.is_random:
            return "dropout_p" in self.names and not given.get("dropout_p")
        return self.is_reproducible


@cache
def _traits_of(func: torch._ops.OpOverload) -> _Traits:
    arguments, tags, name = func._schema.arguments, func.tags, func.overloadpacket.__name__
    names = [argument.name for argument in arguments]
    written = [one for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    makes_constants = "pin_memory" in names and "non_blocking" not in names
    is_view = not written and any(one.alias_info is not None for one in func._schema.returns)
    return _Traits(
        name=name,
        names=names,
        written=[one.name for one in written],
        is_passed=makes_constants or is_view or torch.Tag.inplace_view in tags or name in _PASSED,
        is_foreign=func.namespace != "aten"
        or torch.Tag.maybe_aliasing_or_mutating in tags
        or any(str(one.type) not in ("Tensor", "Optional[Tensor]") for one in written)
        or name in ("set_", "resize_", "resize_as_")
        or not any("Tensor" in str(one.type) for one in func._schema.returns),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_reproducible=torch.Tag.nondeterministic_bitwise not in tags,
        may_cross="non_blocking" in names,
    )


def _can_copy(written: Mapping[int, Tensor], taken: Sequence[Tensor]) -> bool:
    """Whether an operation can be repeated on copies of what it writes: of whole tensors, unless it takes other parts
    of these. Parts of larger ones are, above all, local sums.
    """
    keys = {_key(tensor) for tensor in written.values()}
    is_alone = len({id(one) for one in taken if _key(one) in keys}) == len(keys)
    return is_alone and all(map(_is_whole, written.values()))


# ------------------------------------------------------------------------------------------------ tensors and products


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values] if values.layout is torch.strided else []
    return [tensor for one in values for tensor in _tensors(one)] if isinstance(values, list | tuple) else []


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def checksum(tensor: Tensor) -> Tensor:
    """Sum mod 2^64 of a tensor's bytes as whole numbers: a flipped bit always changes it."""
    with _UnseenByModes():
        return _checksum_of_storage(
            tensor if _is_whole(tensor) else tensor.clone(memory_format=torch.contiguous_format)
        )


def _checksum_of_storage(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    dtype = torch.int64 if num_bytes % 8 == 0 else torch.int32 if num_bytes % 4 == 0 else torch.int8
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (num_bytes // dtype.itemsize,)).sum()


def _excess_of(product: Tensor, left: Tensor, right: Tensor, added: Mapping[str, Any] | None) -> Tensor:
    """The largest quotient of the error of a row's sum and its bound: 1, more, or no number is wrong. `added`: the
    arguments of a product to which something is added.
    """
    num_terms, num_columns = right.shape[-2:]
    signs = _signs(num_columns, product.device)
    of_right, norms_of_right = _sums_and_norms(right, signs)
    expected, size = _sums_and_norms(left, of_right.unsqueeze(-1))
    size = size * torch.linalg.vector_norm(norms_of_right, dim=-1, keepdim=True)
    if added is not None:  # beta self + alpha A B
        alpha, beta = added.get("alpha", 1), added.get("beta", 1)
        expected, size = alpha * expected, abs(alpha) * size
        if beta:
            of_added, norms_of_added = _sums_and_norms(added["self"].expand(product.shape), signs)
            expected, size = expected + beta * of_added, size + abs(beta) * norms_of_added
    sums, norms = _sums_and_norms(product, signs)
    norms = torch.fmin(norms, size)  # a wrong element does not raise the bound
    formats, unit = torch.finfo(product.dtype), _unit(product)
    rounding = OUTPUT * formats.eps / 2 if formats.bits < 32 else 0.0
    least = num_columns * (num_terms * 2.0**-126 + formats.smallest_normal * formats.eps)
    bound = ACCUMULATION * unit * size + ((GROWTH + num_terms**0.5) * unit + rounding) * norms + least
    # Where the factors are not finite, or the product may overflow, no result is wrong.
    return torch.where(size < formats.max, (sums - expected).abs() / bound, 0.0).amax()


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


def _sums_and_norms(matrix: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's product with a column and its Euclidean norm, in fp64, of a piece at a time."""
    if matrix.numel() > _PIECE and matrix.shape[-2] > 1:
        parts = matrix.split(max(1, _PIECE * matrix.shape[-2] // matrix.numel()), dim=-2)
        sums, norms = zip(*(_sums_and_norms(part, column) for part in parts), strict=True)
        return torch.cat(sums, dim=-1), torch.cat(norms, dim=-1)
    rows = matrix.double()
    return (rows @ column).squeeze(-1), torch.linalg.vector_norm(rows, dim=-1)
