"""The calls after which a NCCL communicator has connected all that sums use. It connects an algorithm, by function and
number of bytes, and a pair of members in the first call; while members are lost, that would block.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spare_megatron.comm import nccl


class Call(NamedTuple):
    """A call to a backend, which returns its work, and the tensors that it reads and writes."""

    tensors: Sequence[torch.Tensor]
    start: Callable[[Any], Any]


WarmUp = Callable[[int], Iterable[Call]]
"""The calls for a number of members, the same on all of them. Collective over: all members."""


def no_warm_up(_size: int) -> Iterable[Call]:
    return ()


def warm_up(new_buffer: Callable[[], torch.Tensor], size: int, *, is_stacked: bool) -> Iterable[Call]:
    """All-reduces of up to the size of a buffer, of the current stream; for stacked state also a reduce and
    all-gathers.
    """
    return _calls(new_buffer(), size, is_stacked=is_stacked)


def _calls(buffer: torch.Tensor, size: int, *, is_stacked: bool) -> Iterator[Call]:
    for count in _doubling(len(buffer)):
        yield _all_reduce(buffer[:count])
    if is_stacked:
        yield Call([buffer], lambda backend: backend.reduce([buffer[:1]], dist.ReduceOptions()))  # always in a ring
        for count in _doubling(len(buffer) // (size + 1)):
            yield _all_gather(buffer[: size * count], buffer[-count:])


def _all_reduce(values: torch.Tensor) -> Call:
    return Call([values], lambda backend: backend.allreduce([values], dist.AllreduceOptions()))


def _all_gather(received: torch.Tensor, sent: torch.Tensor) -> Call:
    return Call([received, sent], lambda backend: backend._allgather_base(received, sent))


def _doubling(largest: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the largest; nothing if that is 0."""
    if largest:
        yield from (1 << exponent for exponent in range((largest - 1).bit_length()))
        yield largest


def connecting(pairs: Sequence[tuple[int, int]], rank: int, device: torch.device) -> Call:
    """Sends an element in each (sender, receiver) pair, of which the member with index `rank` is one."""
    sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)

    def start(backend: Any) -> Any:
        def post() -> None:
            for sender, receiver in pairs:
                if sender == rank:
                    backend.send([sent], receiver, 0)
                else:
                    backend.recv([received], sender, 0)

        return nccl.coalesced(backend, device, post)

    return Call([sent, received], start)
