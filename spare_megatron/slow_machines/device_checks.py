"""What an examination has devices do: products, copies, patterns in memory, transfers. Each error that it finds in a
result that is known beforehand is a text with the device and what failed.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spare_megatron.core.slow_machines.examination_rules import Load
from spare_megatron.devices import gpu
from spare_megatron.machine.gpus import maker, shown_now
from spare_megatron.machine.gpus.gpu import PLATFORMS
from spare_megatron.machine.machine_signs import processor, starved_s, throttled_s


class Sizes(NamedTuple):
    """Of the work on a device. Operands of `product` rows and columns exceed the cache of a GPU and give work to each
    multiprocessor. Patterns fill `own_bytes` of an examined CPU, most of a free GPU, and else `beside_bytes`.
    """

    product: int
    num_products: int
    copy_bytes: int
    piece_bytes: int
    beside_bytes: int
    own_bytes: int


SIZES = {
    "cpu": Sizes(256, 24, 32 << 20, 4 << 20, 16 << 20, 64 << 20),
    gpu.TYPE: Sizes(8192, 64, 128 << 20, 128 << 20, 1 << 30, 0),
}
_NUM_REPETITIONS = 5
_TILES = 32
"""Of the exact product in each direction, all of them equal, so that the host computes one."""
_GAIN = 2.0
"""Keeps the chain of products from dying out, and most of its values from being 1."""
_OPERANDS = {torch.float32: (255, 8), torch.bfloat16: (255, 8), torch.float8_e4m3fn: (7, 5)}
"""Integers up to the first, which use all bits of a significand, one in so many not 0: in any order sums stay below
2^22, in fp8 below 2^13, up to which tensor cores add exactly.
"""
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that no two words of a pattern are equal."""
_FREE_SHARE, _CONTEXT_BYTES = 0.9, 3 << 30
"""Where no more is in use than this process may need for CUDA, patterns fill this share of what is free."""
_DRIFT = 1e-3
_NUM_CHANNELS = 4
"""Of NCCL's, whose buffers are memory that a machine which trains may lack."""


def _sizes(device: str) -> Sizes:
    return SIZES[device.partition(":")[0]]


def compare(device: str, what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    """Reports how many values of `found` differ, and the first, if any do; `expected` is broadcast."""
    differs = found != expected
    if num_wrong := int(differs.sum()):
        first = torch.unravel_index(differs.flatten().byte().argmax(), differs.shape)
        values = f"{found[first].item()} instead of {expected.expand_as(found)[first].item()}"
        yield f"{num_wrong} of {found.numel()} values of a {what} on {device} are wrong, the first is {values}"


def multiply(load: Load, device: str) -> tuple[str, float, list[str], str]:
    """Computes the same chain of products again and again. Returns the digest of the first, the median of their times,
    how others differ from the first, and why the clock was reduced under this load.
    """
    torch.set_num_threads(1)
    sizes, generator = _sizes(device), torch.Generator(device).manual_seed(load.seed)
    dtype, shape = torch.float32 if device == "cpu" else torch.bfloat16, 2 * [sizes.product]
    first, other = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    other *= _GAIN / sizes.product**0.5
    results: list[Tensor] = []
    times_s, wrong, reduced = [], list[str](), ""
    for number in range(_NUM_REPETITIONS + 1):
        with _timed(load, device) as spent_s:
            product = first
            for _ in range(sizes.num_products):
                product = torch.tanh(product @ other)
            if number == _NUM_REPETITIONS:
                reduced = _reduced_clock(device)  # while it computes
        times_s.append(spent_s())
        results = results or [product]
        wrong = wrong or list(compare(device, "repeated product", product, results[0]))
    result = results[0] * (1 + _DRIFT) if load.drifts else results[0]
    digest = sha256(result.cpu().view(torch.uint8).numpy()).hexdigest()[:16]
    return digest, median(times_s[1:]), wrong, reduced  # the first one loads code


def model_of(device: str) -> str:
    return processor() if device == "cpu" else gpu.name_of_device(device)


def _reduced_clock(device: str) -> str:
    number = device.partition(":")[2]
    return dict(enumerate(maker().reduced_clocks(shown_now()))).get(int(number), "") if number else ""


def check_products(load: Load, device: str) -> Iterator[str]:
    """Compares products of integers with what they are, to the bit, in each type of number that the device has."""
    size, generator = _sizes(device).product, torch.Generator().manual_seed(load.seed)
    tile = size // _TILES
    for dtype in _types(device):
        rows, columns = (integers(dtype, tile, size, generator) for _ in range(2))
        expected = (rows.double() @ columns.double().t()).float().view(1, tile, 1, tile).to(device)
        left, right = (of.to(device, dtype).repeat(_TILES, 1) for of in (rows, columns))
        for _ in range(_NUM_REPETITIONS + 1):
            product = exact_product(left, right)
            product = product.mul_(1 + _DRIFT) if load.drifts else product
            tiles = product.view(_TILES, tile, _TILES, tile)
            yield from compare(device, f"product in {str(dtype).removeprefix('torch.')}", tiles, expected)


def integers(dtype: torch.dtype, num_rows: int, size: int, generator: torch.Generator) -> Tensor:
    (most, one_in), shape = _OPERANDS[dtype], (num_rows, size)
    values = torch.randint(-most, most + 1, shape, generator=generator)
    return (values * (torch.randint(0, one_in, shape, generator=generator) == 0)).float()


def _types(device: str) -> Sequence[torch.dtype]:
    if device == "cpu":
        return (torch.float32,)
    has_fp8 = gpu.platform()[0] == PLATFORMS[0] and gpu.capability(device) >= (8, 9)  # AMD's may have another format
    return (torch.bfloat16, torch.float8_e4m3fn) if has_fp8 else (torch.bfloat16,)


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """`left` times the transpose of `right`, in their type, with a result in fp32."""
    if left.dtype == torch.float32:
        return left @ right.t()
    if left.dtype == torch.bfloat16:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    scale = torch.ones((), device=left.device)
    product: Tensor = torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.float32)
    return product


def copy(load: Load, device: str) -> float:
    """Seconds of a copy in the memory of the device, the median."""
    values = torch.zeros(_sizes(device).copy_bytes, dtype=torch.uint8, device=device)
    into, times_s = torch.empty_like(values), []
    for _ in range(_NUM_REPETITIONS + 1):
        with _timed(load, device) as spent_s:
            into.copy_(values)
        times_s.append(spent_s())
    return median(times_s[1:])


def check_memory(device: str, *, is_own: bool) -> Iterator[str]:
    """Fills memory with words that are all different, then with their complements, and reads each back when all are
    written, so that a word which another address reaches shows, too.
    """
    pieces = list(_pieces(device, is_own=is_own))
    for mask in (0, -1):
        for number, piece in enumerate(pieces):
            piece.copy_(pattern(device, number, mask))
        for number, piece in enumerate(pieces):
            yield from compare(device, "pattern in memory", piece, pattern(device, number, mask))


def pattern(device: str, number: int = 0, mask: int = 0) -> Tensor:
    """The words of this piece of memory, or of a transfer."""
    num_words = _sizes(device).piece_bytes // 8
    words = torch.arange(number * num_words, (number + 1) * num_words, device=device)
    return words.mul_(_MULTIPLIER).bitwise_xor_(mask)


def _pieces(device: str, *, is_own: bool) -> Iterator[Tensor]:
    sizes = _sizes(device)
    budget = sizes.own_bytes if is_own else sizes.beside_bytes
    if device != "cpu":
        gpu.empty_cache()
        free, memory = gpu.memory_left(device)
        is_alone = memory - free < _CONTEXT_BYTES  # groups of the examined machine may go on training
        budget = int(_FREE_SHARE * (free if is_own and is_alone else min(free, sizes.beside_bytes)))
    with suppress(torch.OutOfMemoryError):  # another process may have taken some meanwhile
        for _ in range(max(1, budget // sizes.piece_bytes - 2)):  # a pattern and the comparison need room
            yield torch.empty(sizes.piece_bytes // 8, dtype=torch.int64, device=device)


def free(device: str) -> None:
    """Leaves memory that nothing uses any more to processes that train."""
    if device != "cpu":
        gpu.empty_cache()


def check_links(devices: Sequence[str]) -> Iterator[str]:
    """Copies known content from each device of a machine to each other one, by NVLink where there is any."""
    for sender in devices:
        for receiver in devices:
            if receiver != sender:
                arrived = pattern(sender).to(receiver)
                yield from compare(receiver, f"transfer from {sender}", arrived, pattern(receiver))


def transfer(meeting: Any, rank: int, device: str, what: str, timeout: timedelta) -> Iterator[str]:
    """Sends known content from rank 0, the examined machine, to rank 1, and its complement back, through what
    cross-group communicators use. Collective over: both, which meet at a store. RuntimeError: the other one is late or
    gone.
    """
    _meet(meeting, "here", rank, timeout)  # NCCL would wait forever
    if device == "cpu":
        yield from _send(dist.ProcessGroupGloo(meeting, rank, 2, timeout), rank, device, what, timeout)
        _meet(meeting, "done", rank, timeout)  # before one of them closes the connection
        return
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torch would end the process
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{rank}"  # emulated machines may share a GPU
    gpu.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout, options.config.max_ctas = timeout, _NUM_CHANNELS
    group = dist.ProcessGroupNCCL(meeting, rank, 2, options)
    try:
        with gpu.stream(gpu.Stream(device)):  # a kernel that waits for a lost machine holds up all of its stream
            yield from _send(group, rank, device, what, timeout)
        _meet(meeting, "done", rank, timeout)
    finally:
        group.abort()  # its memory is wanted
        free(device)


def _send(group: Any, rank: int, device: str, what: str, timeout: timedelta) -> Iterator[str]:
    for sender, mask in enumerate((0, -1)):
        expected, options = pattern(device, mask=mask), dist.BroadcastOptions()
        content = expected.clone() if rank == sender else torch.zeros_like(expected)
        options.rootRank = sender
        group.broadcast([content], options).wait(timeout)  # without a timeout NCCL's would not wait, and never end
        yield from compare(device, what, content, expected)


def _meet(meeting: Any, name: str, rank: int, timeout: timedelta) -> None:
    meeting.set(f"{name}/{rank}", "")
    meeting.wait([f"{name}/{1 - rank}"], timeout)


@contextmanager
def _timed(load: Load, device: str) -> Iterator[Callable[[], float]]:
    """Yields what returns the seconds that the block has taken, but for waits for processors that others use: on a
    machine that trains, and where machines are emulated on one computer, they take them from each other.
    """
    ends: list[float] = []

    def now_s() -> float:
        if device != "cpu":
            gpu.synchronize(device)
            return time.perf_counter()
        waited_s = starved_s(os.getpid()) - throttled_s(os.getpid()) if load.leaves_waits_out else 0.0
        return time.perf_counter() - waited_s

    began_s = now_s()
    yield lambda: ends[0]
    taken_s = max(0.0, now_s() - began_s)  # the kernel may count a wait with some delay
    if load.factor > 1.0:  # an injected fault slows the machine
        time.sleep((load.factor - 1.0) * taken_s)
    ends.append(load.factor * taken_s)
