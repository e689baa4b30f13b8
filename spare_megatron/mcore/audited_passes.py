"""Digests of audited microbatches: of their gradients, taken before any sum has them, and of what crosses the stages.

A digest is a sum of one nonlinear hash per word, mod 2^64, so that it is exact, does not depend on the order of the
terms, and is computed on the device. Equal bits give equal digests on every device; of different ones, other than made
for it, all but 2^-64 give different digests.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spare_megatron.core.audits.audits import Boundary
from spare_megatron.mcore.gradients.digests import words_of
from spare_megatron.mcore.gradients.flat_gradients import flat_parameters
from spare_megatron.mcore.held_slabs import HeldSlab
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.pipeline import Item
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.stacking.plans import Microbatch

_BLOCK_WORDS = 1 << 14
"""Words with a multiplier each; blocks differ by what is added to their sums."""
_CPU_PIECE_BLOCKS = 4
"""Blocks hashed at a time on a CPU: they stay in the cache of a core."""
_DEVICE_PIECE_BLOCKS = 128
"""The same elsewhere."""

_MIX = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
_LOW_HALF = (1 << 32) - 1

Ints = TypeVar("Ints", npt.NDArray[np.int64], Tensor)
"""Whole numbers of NumPy or torch, whose operators are the same."""

_Place = tuple[str, int]
"""Kind and stage of a boundary."""


def digest64(tensor: Tensor, salt: int = 0) -> Tensor:
    """Digest of a tensor's bytes as an int64 on its device. Other salts give unrelated digests."""
    words = words_of(tensor.detach().contiguous().view(-1).view(torch.uint8))
    if tensor.device.type == "cpu":  # NumPy starts an operation in a tenth of the time that torch takes
        found = _mixed_blocks(words.numpy(), _multipliers(), _CPU_PIECE_BLOCKS, np.concatenate, np.arange, salt)
        return torch.from_numpy(found.sum(keepdims=True)).view(()) + salt
    multipliers = _multipliers_on(tensor.device)

    def count(first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=tensor.device)

    return _mixed_blocks(words, multipliers, _DEVICE_PIECE_BLOCKS, torch.cat, count, salt).sum() + salt


def _mixed_blocks(
    words: Ints,
    multipliers: Ints,
    piece_blocks: int,
    joined: Callable[[list[Ints]], Ints],
    count: Callable[[int, int], Ints],
    salt: int,
) -> Ints:
    """An int64 for each block of int32 words, by its place and the salt; `joined`, `count`: concatenation and arange of
    the library.
    """
    sums: list[Ints] = []
    for start in range(0, len(words), piece_blocks * _BLOCK_WORDS):
        part = words[start : start + piece_blocks * _BLOCK_WORDS]
        whole = len(part) - len(part) % _BLOCK_WORDS
        if whole:
            sums.append(_hashed(part[:whole].reshape(-1, _BLOCK_WORDS), multipliers).sum(1))
        if whole < len(part):
            sums.append(_hashed(part[whole:].reshape(1, -1), multipliers[: len(part) - whole]).sum(1))
    of_blocks = joined(sums) if sums else count(0, 0)
    return _mixed((of_blocks + count(1, len(of_blocks) + 1) * _MIX) ^ salt)


def _hashed(words: Ints, multipliers: Ints) -> Ints:
    """Each word by a hash that is not linear in it, in int64: few passes, since this is what digests cost."""
    products = words * multipliers  # int32 times int64
    high = products >> 32
    high &= _LOW_HALF  # the shift of a signed number has to lose the sign
    products ^= high
    return products


def _mixed(values: Ints) -> Ints:
    """A bijection of int64 that is not linear, thoroughly mixed."""
    values = (values ^ ((values >> 32) & _LOW_HALF)) * _MIX
    return values ^ ((values >> 32) & _LOW_HALF)


@cache
def _multipliers() -> npt.NDArray[np.int64]:
    """Odd numbers from a fixed seed, one per word of a block."""
    odd = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, _BLOCK_WORDS, dtype=np.uint64) | np.uint64(1)
    return odd.view(np.int64)


@cache
def _multipliers_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_multipliers()).to(device)


class AuditedPasses:
    """Takes the digests of a rank's audited microbatches while the schedule runs them. Gradients of those of other
    groups (`Item.is_audit`) are zeros once the digest is taken.
    """

    def __init__(self, slabs: Sequence[HeldSlab], groups: GroupCollection) -> None:
        self._slabs = slabs
        self._first_chunk = slabs[0].chunks[0]
        lanes_of_unit, ranks_of_lane = groups.ep.size(), groups.tp.size() * groups.cp.size()
        self._offset = groups.lanes.rank() // lanes_of_unit * lanes_of_unit * ranks_of_lane
        self._is_first = not (groups.pp.rank() or groups.cp.rank() or groups.tp.rank())  # of its lane
        self._parameters = [flat for slab in slabs for flat in flat_parameters(slab.chunks)]
        chunks = [(slab, chunk) for slab in slabs for chunk in slab.chunks]
        self._positions = {chunk.stage: slab.position - self._offset for slab, chunk in chunks}
        self._stages = {
            parameter: chunk.stage
            for _, chunk in chunks
            for parameter in chunk.module.parameters()
            if parameter.requires_grad
        }
        self._found: dict[Microbatch, dict[_Place, Tensor]] = {}
        self._now: dict[_Place, Tensor] | None = None  # of the microbatch whose backward pass runs
        self._num_added = 0
        self._is_counting = True

    def forget(self) -> None:
        self._found.clear()
        self._num_added = 0

    def drop(self, microbatches: Collection[Microbatch]) -> None:
        """Forgets these alone, which any lane may compute again: each has the digests of one lane."""
        for one in microbatches:
            self._found.pop(one, None)

    @property
    def num_added(self) -> int:
        """Microbatches whose gradients the sums of this lane have got since `forget`; 0 but on its first rank."""
        return self._num_added if self._is_first else 0

    @contextmanager
    def watching(self, items: Collection[Item]) -> Iterator[None]:
        """In this context, `on_forward` and `on_backward` take digests of the items that are audited."""
        audited = [item for item in items if item.is_digested]
        if not audited:
            yield
            return
        for item in audited:
            self._found[item.microbatch.unit] = {}
        hooks = [
            flat.parameter.register_hook(self._hook(flat.start, self._stages[flat.parameter]))
            for flat in self._parameters
        ]
        try:
            yield
        finally:
            self._now = None
            self._count(is_counting=True)
            for hook in hooks:
                hook.remove()

    def on_forward(self, chunk: Chunk, item: Item, output: Tensor) -> None:
        if item.is_digested:
            self._found[item.microbatch.unit]["forward", chunk.stage] = digest64(output)

    def on_backward(self, chunk: Chunk, item: Item, gradient: Tensor) -> None:
        """The backward pass of this item begins, of which this is the gradient of the chunk's output."""
        self._now = self._found[item.microbatch.unit] if item.is_digested else None
        self._count(is_counting=not item.is_audit)
        self._num_added += item.is_counted and chunk is self._first_chunk
        if self._now is not None:
            self._now["backward", chunk.stage] = digest64(gradient)

    def _count(self, *, is_counting: bool) -> None:
        self._is_counting = is_counting
        for slab in self._slabs:
            slab.gradients.is_counting = is_counting

    def boundaries(self, microbatch: Microbatch) -> list[Boundary]:
        """What this rank has of a microbatch, nothing if other lanes have computed it. Waits for the device, once."""
        found = self._found.get(microbatch)
        if not found:
            return []
        digests = torch.stack(list(found.values())).tolist()
        return [
            Boundary(kind, stage, self._positions[stage], digest % 2**64, self._offset)  # type: ignore[arg-type]
            for (kind, stage), digest in zip(found, digests, strict=True)
        ]

    def _hook(self, start: int, stage: int) -> Callable[[Tensor], Tensor | None]:
        def on_gradient(gradient: Tensor) -> Tensor | None:
            if self._now is not None:
                digest, key = digest64(gradient, salt=start + 1), ("gradients", stage)
                self._now[key] = self._now[key] + digest if key in self._now else digest
            return None if self._is_counting else torch.zeros_like(gradient)

        return on_gradient
