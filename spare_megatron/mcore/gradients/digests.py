"""Digests of tensors, computed on their device in exact integers: equal bytes give equal digests on CPUs and GPUs.

The bytes of a tensor are 32-bit words (the last filled with zeros) in blocks. Twice, with independent odd 64-bit
multipliers, a block is summed up: word x multiplier of its place, mod 2^64. A digest is SHA-256 over names, lengths and
sums, in order. It changes for certain with a change of one word of a block, two words exchanged, the signs of two. Any
other change escapes with a probability of at most 2^-64 a block, unless it was made for it: the multipliers are public.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from spare_megatron.mcore.gradients.checksums import pseudo_random

BLOCK_WORDS = 1 << 14
"""Words that are summed with a multiplier each; 64 KiB."""

_BLOCK_BYTES = 4 * BLOCK_WORDS
_CPU_PIECE_BLOCKS = 4
"""Blocks multiplied at a time on a CPU: the products stay in the cache of a core."""
_DEVICE_PIECE_BLOCKS = 128
"""The same elsewhere: large against the start of a kernel, small against the memory of a device."""


class TensorsDigest:
    """The digest of named tensors as they are now on the current stream; the device computes it while the caller goes
    on.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], head: str = "") -> None:
        self._head = sha256(head.encode())
        named = list(tensors)
        for name, tensor in named:
            self._head.update(f"\n{name} {tensor.nbytes}".encode())
        self._sums = list(_sums_in_order([tensor for _, tensor in named]))

    def hexdigest(self) -> str:
        """Waits for the device, once."""
        digest = self._head.copy()
        waiting = [sums for sums in self._sums if sums.device.type != "cpu"]
        arrived = iter(torch.cat(waiting).cpu().split([len(sums) for sums in waiting]) if waiting else ())
        for sums in self._sums:
            digest.update((sums if sums.device.type == "cpu" else next(arrived)).numpy())
        return digest.hexdigest()


def _sums_in_order(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The sums of all blocks in the order of the tensors; those of all tensors on the GPU by one kernel."""
    on_gpu = [tensor for tensor in tensors if _has_kernel(tensor.device)]
    found: Iterator[Tensor] = iter(())
    if on_gpu:
        from spare_megatron.mcore.gradients.kernels import sum_blocks

        (device,) = {tensor.device for tensor in on_gpu}
        sums = sum_blocks([part for tensor in on_gpu for part in _parts(tensor)], multipliers_on(device))
        found = iter(sums.split([-(-tensor.nbytes // _BLOCK_BYTES) for tensor in on_gpu]))
    for tensor in tensors:
        if _has_kernel(tensor.device):
            yield next(found)
        else:
            yield from block_sums(tensor)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """All of its words; a last block that ends inside a word is a copy that is filled up."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    end = data.numel() - (data.numel() % _BLOCK_BYTES if data.numel() % 4 else 0)
    for part in (data[:end], data[end:]):
        if part.numel():
            yield words_of(part)


def block_sums(tensor: Tensor, piece_blocks: int | None = None) -> Iterator[Tensor]:
    """Both sums of each block by torch alone, a row each, in order; `piece_blocks` at a time, and a last short block by
    itself.
    """
    piece_blocks = piece_blocks or (_CPU_PIECE_BLOCKS if tensor.device.type == "cpu" else _DEVICE_PIECE_BLOCKS)
    data = tensor.detach().reshape(-1).view(torch.uint8)
    multipliers = multipliers_on(tensor.device)
    end = data.numel() - data.numel() % _BLOCK_BYTES
    for start in range(0, end, piece_blocks * _BLOCK_BYTES):
        words = words_of(data[start : min(start + piece_blocks * _BLOCK_BYTES, end)]).view(-1, BLOCK_WORDS)
        yield _sums(words.to(torch.int64), multipliers)
    if end < data.numel():
        words = words_of(data[end:])
        yield _sums(words.to(torch.int64).view(1, -1), multipliers[:, : len(words)])


def _sums(words: Tensor, multipliers: Tensor) -> Tensor:
    # On CPUs the product takes a sixth of the time; GPUs have none of integers.
    of_lane = torch.mv if words.device.type == "cpu" else lambda words, lane: (words * lane).sum(1)
    return torch.stack([of_lane(words, lane) for lane in multipliers], dim=1)


def words_digest(tensor: Tensor) -> Tensor:
    """Two int64 numbers that depend on each of up to 2^30 bytes, computed on the device; never waits for it."""
    sums = torch.cat(list(_sums_in_order([tensor])))
    return (sums * multipliers_on(tensor.device)[:, : len(sums)].t()).sum(0)


def prepare_digests(device: torch.device) -> None:
    """Compiles what digests on this device need, so that no later one has to wait for that."""
    _has_kernel(device)


def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from spare_megatron.mcore.gradients.kernels import can_sum_blocks

    return can_sum_blocks(device, BLOCK_WORDS)


def words_of(data: Tensor) -> Tensor:
    """The bytes, copied if they do not begin at a word or end inside one."""
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


@cache
def multipliers_on(device: torch.device) -> Tensor:
    odd = pseudo_random(1, 2 * BLOCK_WORDS) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64).reshape(2, BLOCK_WORDS)).to(device)
