"""Examines this machine: a seeded matrix product, copies in memory, and an exchange with the control store.

A process of its own does it and publishes what it has found. `core.examination` judges it.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from spare_megatron.core.examination import Figures
from spare_megatron.core.fault_points import Fault
from spare_megatron.process.processes import Child, end_child, leave, rank_context, start_child
from spare_megatron.process.specs import NodeSpec, devices_on
from spare_megatron.stacking.layout import MachineId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec

_NUM_ANSWERS, _NUM_VALUES, _VALUE_CHARACTERS = 16, 4, 64_000
_LASTING = ("drift", "stuck_bit", "slow")
"""Kinds of injected faults that an examination of the machine meets, too, for the seconds that they last."""


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
        devices = tuple(dict.fromkeys(devices_on(config, self._spec.node)))
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
    from spare_megatron.supervisor.machine_checks import copy, multiply  # torch: not for who starts this process

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
    store.put(keys.examined(wanted.examined, wanted.number, task.machine), json.dumps(asdict(figures)))
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
