"""What an examination measures on a device with torch: a seeded matrix product, and copies in memory."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from spare_megatron.process.machine_signs import starved_s, throttled_s
from spare_megatron.supervisor.examination import ExaminationTask

_NUM_REPETITIONS = 5
_SIZE, _NUM_PRODUCTS = {"cpu": 256, "cuda": 2048}, {"cpu": 24, "cuda": 64}
_COPY_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
"""By type of device. On a GPU that trains little memory is free."""
_DRIFT = 1e-3


def multiply(task: ExaminationTask, device: str) -> tuple[tuple[str, ...], float]:
    """Digests of the same chain of products, again and again, and the median of their times."""
    torch.set_num_threads(1)
    kind, generator = device.partition(":")[0], torch.Generator().manual_seed(task.wanted.number)
    first, other = (torch.randn(_SIZE[kind], _SIZE[kind], generator=generator).to(device) for _ in range(2))
    digests, times_s = [], []
    for _ in range(_NUM_REPETITIONS + 1):
        with _timed(task, device) as spent_s:
            product = first
            for _ in range(_NUM_PRODUCTS[kind]):
                product = torch.tanh(product @ other)
        times_s.append(spent_s())
        digests.append(_digest(product.mul_(1 + _DRIFT) if task.drifts else product))
    return tuple(digests), median(times_s[1:])  # the first one loads code


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()[:16]


def copy(task: ExaminationTask, device: str) -> float:
    """Seconds of a copy in the memory of the device, the median."""
    values = torch.zeros(_COPY_BYTES[device.partition(":")[0]], dtype=torch.uint8, device=device)
    into, times_s = torch.empty_like(values), []
    for _ in range(_NUM_REPETITIONS + 1):
        with _timed(task, device) as spent_s:
            into.copy_(values)
        times_s.append(spent_s())
    return median(times_s[1:])


@contextmanager
def _timed(task: ExaminationTask, device: str) -> Iterator[Callable[[], float]]:
    """Yields what returns the seconds that the block has taken, but for waits for processors that others use: on a
    machine that trains, and where machines are emulated on one computer, they take them from each other.
    """
    ends: list[float] = []

    def now_s() -> float:
        if device != "cpu":
            torch.cuda.synchronize(device)
            return time.perf_counter()
        leaves_waits_out = task.shares_processors or not task.wanted.is_own
        waited_s = starved_s(os.getpid()) - throttled_s(os.getpid()) if leaves_waits_out else 0.0
        return time.perf_counter() - waited_s

    began_s = now_s()
    yield lambda: ends[0]
    taken_s = now_s() - began_s
    if task.factor > 1.0:  # an injected fault slows the machine
        time.sleep((task.factor - 1.0) * taken_s)
    ends.append(task.factor * taken_s)
