"""Examines this machine in a process of its own: a seeded matrix product, copies in memory, and an exchange with the
control store, judged by `core.slow_machines.examination_rules`.
"""

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING

from spare_megatron.core.slow_machines.examination_rules import Figures
from spare_megatron.faults.points import Fault
from spare_megatron.formats.codec import encode
from spare_megatron.machine.machine_signs import starved_s, throttled_s
from spare_megatron.process.processes import Child, end_child, leave, rank_context, start_child
from spare_megatron.process.specs import NodeSpec, gpus_on
from spare_megatron.stacking.layout import MachineId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec

if TYPE_CHECKING:
    from torch import Tensor

_NUM_ANSWERS, _NUM_VALUES, _VALUE_CHARACTERS = 16, 4, 64_000
_LASTING = ("drift", "stuck_bit", "slow")
"""Kinds of injected faults that an examination of the machine meets, too, for the seconds that they last."""
_NUM_REPETITIONS = 5
_SIZE, _NUM_PRODUCTS = {"cpu": 256, "cuda": 2048}, {"cpu": 24, "cuda": 64}
_COPY_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
"""By type of device. On a GPU that trains little memory is free."""
_DRIFT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationWanted:
    """Machine `examined`, or the one that replaces it, is examined for the time `number`: this machine, if it `is_own`,
    or another one, as which it is to do the same.
    """

    examined: MachineId
    number: int
    is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationTask:
    wanted: ExaminationWanted
    machine: MachineId
    devices: tuple[str, ...]
    store: StoreSpec
    shares_processors: bool
    drifts: bool
    factor: float
    """Injected faults: what it computes is wrong, and takes so many times as long."""


class Examiner:
    """Starts the examinations on one machine. `limit` is called with the id of each process."""

    def __init__(self, spec: NodeSpec, machine: MachineId) -> None:
        self._spec = spec
        self._machine = machine
        self._context = rank_context(spec.config.cluster.device, multiprocessing.get_context("fork"))
        self._children: list[Child] = []
        self._lasting: list[tuple[Fault, float]] = []  # injected faults, and when they end
        self.limit: Callable[[Collection[int]], None] = lambda _: None

    def note_fault(self, fault: Fault) -> None:
        """An injected fault of this machine has struck."""
        if fault.kind in _LASTING and fault.seconds is not None:
            self._lasting.append((fault, time.monotonic() + fault.seconds))

    def start(self, wanted: ExaminationWanted) -> None:
        """Starts an examination; ends the one before it."""
        self.end_all()
        config, now_s = self._spec.config, time.monotonic()
        gpus = dict.fromkeys(gpus_on(config, self._spec.node))  # of the supervisor's list, which the process sees
        devices = tuple("cpu" if gpu is None else f"cuda:{gpu}" for gpu in gpus)
        faults = [fault for fault, until_s in self._lasting if now_s < until_s]
        task = ExaminationTask(
            wanted=wanted,
            machine=self._machine,
            devices=devices if wanted.is_own else devices[:1],  # all GPUs of others compute the same
            store=self._spec.store,
            shares_processors=config.cluster.launcher == "local",
            drifts=any(fault.kind != "slow" for fault in faults),
            factor=max((fault.factor or 1.0 for fault in faults if fault.kind == "slow"), default=1.0),
        )
        self._children.append(start_child(self._context, "examination", _examine, task))
        self.limit([child.pid for child in self._children])

    def end_all(self) -> None:
        while self._children:
            end_child(self._children.pop())


def _examine(task: ExaminationTask, _: Connection) -> None:
    """Main function of the process."""
    if not task.wanted.is_own:
        os.nice(10)  # training goes first
    products = [multiply(task, device) for device in task.devices]
    copy_s = max(copy(task, device) for device in task.devices)
    store, wanted = open_store(task.store), task.wanted
    answer_s, exchange_s = _exchange(store, keys.exchanged(wanted.examined, wanted.number, task.machine))
    figures = Figures(
        digests=tuple(digest for digests, _ in products for digest in digests),
        product_s=max(seconds for _, seconds in products),
        copy_s=copy_s,
        answer_s=answer_s,
        exchange_s=exchange_s,
    )
    store.put(keys.examined(wanted.examined, wanted.number, task.machine), encode(figures))
    leave(0)


def _exchange(store: ControlStore, key: str) -> tuple[float, float]:
    """Mean time of an answer, and the time to write and read some values."""
    store.get([key])  # opens the connection
    began_s = time.perf_counter()
    for _ in range(_NUM_ANSWERS):
        store.get([key])
    answered_s = time.perf_counter()
    for number in range(_NUM_VALUES):
        store.put(key, str(number % 10) * _VALUE_CHARACTERS)
        store.get([key])
    exchanged_s = time.perf_counter()
    store.delete([key])
    return (answered_s - began_s) / _NUM_ANSWERS, exchanged_s - answered_s


def multiply(task: ExaminationTask, device: str) -> tuple[tuple[str, ...], float]:
    """Digests of the same chain of products, again and again, and the median of their times."""
    import torch

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


def _digest(values: "Tensor") -> str:
    return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()[:16]


def copy(task: ExaminationTask, device: str) -> float:
    """Seconds of a copy in the memory of the device, the median."""
    import torch

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
            import torch

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
