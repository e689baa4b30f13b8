"""Examines machines: asks for that through the control store, and does it in a process of its own.

A process examines its devices (`slow_machines.device_checks`), transfers of known content between machines, and an
exchange with the control store, judged by `core.slow_machines.examination_rules`.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from spare_megatron.core.machines.failure_detector import ENDED
from spare_megatron.core.machines.places import Places, Quarantine
from spare_megatron.core.slow_machines import examination_rules as rules
from spare_megatron.faults.points import Fault
from spare_megatron.formats.codec import encode
from spare_megatron.journal.records import ExaminationRecord
from spare_megatron.machine.gpus import name_in_torch
from spare_megatron.process.heartbeats import HeartbeatPage, between_steps
from spare_megatron.process.processes import (
    Child,
    await_exit,
    describe_error,
    end_child,
    leave,
    rank_context,
    say,
    start_child,
)
from spare_megatron.process.specs import NodeSpec, gpus_on
from spare_megatron.stacking.layout import MachineId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore, StoreLost, StoreTimeout, read_values, write_value
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec

_NUM_ANSWERS, _NUM_VALUES, _VALUE_CHARACTERS = 16, 4, 64_000
_MOST_ERRORS = 16
_LEAST_TIMEOUT_S, _ABORT_S = 0.1, 5.0
"""0 would be no timeout. An abort frees memory, for which CUDA waits until no other transfer of the device hangs."""
_LASTING = ("drift", "stuck_bit", "product_drift", "product_stuck", "product_rare", "slow")
"""Kinds of injected faults that an examination of the machine meets, too, for the seconds that they last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationWanted:
    """Machine `examined`, or the one that replaces it, is examined for the time `number`: this machine, if it `is_own`,
    or another one, as which it is to do the same. `helpers`: the other machines that do.
    """

    examined: MachineId
    number: int
    helpers: tuple[MachineId, ...] = ()
    is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationTask:
    wanted: ExaminationWanted
    machine: MachineId
    devices: tuple[str, ...]
    """All that the ranks of the machine use."""
    store: StoreSpec
    after: tuple[int, ...]
    """Processes that examine for other machines, and end first."""
    page: HeartbeatPage | None
    """Of the rank that trains on the first device, and is to wait between two steps."""
    step_limit_s: float
    transfer_timeout_s: float
    limit_s: float
    """After which the answer counts no longer."""
    load: rules.Load


class Examiner:
    """Starts the examinations on one machine. `limit` is called with the id of each process; `page` gives that of the
    rank on the first device.
    """

    def __init__(self, spec: NodeSpec, machine: MachineId) -> None:
        self._spec = spec
        self._machine = machine
        self._context = rank_context(spec.config.cluster.device, multiprocessing.get_context("fork"))
        self._children: list[Child] = []
        self._lasting: list[tuple[Fault, float]] = []  # injected faults, and when they end
        self.limit: Callable[[Collection[int]], None] = lambda _: None
        self.page: Callable[[], HeartbeatPage | None] = lambda: None

    def note_fault(self, fault: Fault) -> None:
        """An injected fault of this machine has struck."""
        if fault.kind in _LASTING and fault.seconds is not None:
            self._lasting.append((fault, time.monotonic() + fault.seconds))

    def start(self, wanted: ExaminationWanted) -> None:
        """Starts an examination, which begins when those of other machines have ended; its own ends all before it."""
        for child in [child for child in self._children if wanted.is_own or not child.process.is_alive()]:
            end_child(child)
            self._children.remove(child)
        config, now_s = self._spec.config, time.monotonic()
        interval_s = config.control.heartbeat_interval_s
        gpus = dict.fromkeys(gpus_on(config, self._spec.node))  # of the supervisor's list, which the process sees
        devices = tuple(name_in_torch("cpu" if gpu is None else "gpu", gpu or 0) for gpu in gpus)
        faults = [fault for fault, until_s in self._lasting if now_s < until_s]
        task = ExaminationTask(
            wanted=wanted,
            machine=self._machine,
            devices=devices,
            store=self._spec.store,
            after=tuple(child.pid for child in self._children),
            page=None if wanted.is_own else self.page(),
            step_limit_s=rules.STEP_INTERVALS * interval_s,
            transfer_timeout_s=rules.TRANSFER_INTERVALS * interval_s + rules.TRANSFER_S * len(devices),
            limit_s=max(rules.LIMIT_INTERVALS * interval_s, rules.LEAST_LIMIT_S),
            load=rules.Load(
                seed=wanted.number,
                leaves_waits_out=config.cluster.launcher == "local" or not wanted.is_own,
                drifts=any(fault.kind != "slow" for fault in faults),
                factor=max((fault.factor or 1.0 for fault in faults if fault.kind == "slow"), default=1.0),
            ),
        )
        try:
            self._children.append(start_child(self._context, "examination", _examine, task))
        except OSError as error:  # such as a limit on processes: who waits for the answer has a limit
            say(f"warning: no examination can be started: {error}", err=True)
        self.limit([child.pid for child in self._children])

    def end_all(self) -> None:
        while self._children:
            end_child(self._children.pop())


def _examine(task: ExaminationTask, _: Connection) -> None:
    """Main function of the process. If a device hangs, it ends at its limit, as its memory is wanted here."""
    limit = threading.Timer(task.limit_s, _give_up, [task.limit_s])
    limit.daemon = True
    limit.start()
    try:
        _answer(task)
    finally:
        limit.cancel()
    leave(0)


def _give_up(limit_s: float) -> None:
    say(f"an examination has not ended within {limit_s:g} s", err=True)
    leave(1)


def _answer(task: ExaminationTask) -> None:
    await_exit(task.after, task.transfer_timeout_s)
    wanted, store = task.wanted, open_store(task.store)
    if not wanted.is_own:
        os.nice(10)  # training goes first
    try:
        figures = _examine_devices(task, store)
    except RuntimeError as error:  # such as an ECC error of a GPU
        if not wanted.is_own:
            raise
        wrong = (describe_error(error),)
        figures = rules.Figures(digests=(), product_s=0.0, copy_s=0.0, answer_s=0.0, exchange_s=0.0, wrong=wrong)
    store.put(keys.examined(wanted.examined, wanted.number, task.machine), encode(figures))


def _examine_devices(task: ExaminationTask, store: ControlStore) -> rules.Figures:
    from spare_megatron.slow_machines import device_checks

    wanted, load = task.wanted, task.load
    devices = task.devices if wanted.is_own else task.devices[:1]  # all GPUs of others compute the same
    linked, wrong = _transfers(task, store)
    with nullcontext(-1) if task.page is None else between_steps(task.page, task.step_limit_s) as after_step:
        found = [device_checks.multiply(load, device) for device in devices]
        digests, times_s, repeated, clocks = zip(*found, strict=True)
        for device, errors in zip(devices, repeated, strict=True):
            wrong += [*errors, *device_checks.check_products(load, device)]
            wrong += device_checks.check_memory(device, is_own=wanted.is_own)
        wrong += device_checks.check_links(devices)
        copy_s = max(device_checks.copy(load, device) for device in devices)
        device_checks.free(devices[0])
    answer_s, exchange_s = _exchange(store, keys.exchanged(wanted.examined, wanted.number, task.machine))
    return rules.Figures(
        digests=digests,
        product_s=max(times_s),
        copy_s=copy_s,
        answer_s=answer_s,
        exchange_s=exchange_s,
        wrong=tuple(wrong[:_MOST_ERRORS]),
        reduced=tuple((device, clock) for device, clock in zip(devices, clocks, strict=True) if clock),
        after_step=after_step,
        model=device_checks.model_of(devices[0]),
        linked=linked if wanted.is_own else None,
    )


def _transfers(task: ExaminationTask, store: ControlStore) -> tuple[tuple[MachineId, ...], list[str]]:
    """Transfers of known content between the examined machine, from each of its devices, and the others, first of all,
    as all begin at about the same time. Returns with whom they have ended, and what arrived wrong.
    """
    from spare_megatron.slow_machines.device_checks import transfer

    wanted, linked, wrong = task.wanted, list[MachineId](), list[str]()
    ends_at_s = time.monotonic() + task.transfer_timeout_s

    def run(helper: MachineId) -> None:
        what, rank = f"transfer between machines {wanted.examined} and {helper}", 0 if wanted.is_own else 1
        with suppress(RuntimeError, OSError, StoreLost, StoreTimeout):  # the other one is late, gone, or out of reach
            for number, own in enumerate(task.devices):
                name = f"{keys.exchanged(wanted.examined, wanted.number, helper)}/{number}"
                timeout_s = max(_LEAST_TIMEOUT_S, ends_at_s - time.monotonic())
                meeting, device = store.rendezvous(name, rank, timeout_s), own if wanted.is_own else task.devices[0]
                wrong.extend(transfer(meeting, rank, device, what, timedelta(seconds=timeout_s)))
            linked.append(helper)

    # A broken link may block a thread for good; the process leaves without it.
    others = wanted.helpers if wanted.is_own else (task.machine,)
    threads = [threading.Thread(target=run, args=(helper,), daemon=True) for helper in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_at_s + _ABORT_S - time.monotonic()))
    return tuple(linked), list(wrong)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """An examination under way; `examined` is the machine whose quarantine it may end, which this one may replace."""

    examined: MachineId
    number: int
    helpers: tuple[MachineId, ...]
    begun_at_s: float


class Examinations:
    """The examinations that concern one machine. `start` has it do what an examination asks for."""

    def __init__(self, machine: MachineId, interval_s: float, start: Callable[[ExaminationWanted], None]) -> None:
        self._machine = machine
        self._interval_s = interval_s
        self._start = start
        self._last: dict[MachineId, int] = {}  # number of the last examination of each other machine that was seen
        self._open: _Open | None = None
        self._begins_at_s: float | None = None
        self._num_failed = 0

    def poll(self, store: ControlStore, places: Places) -> ExaminationRecord | None:
        """Does what is due. Returns the record of this machine's examination once it has ended; it has passed if
        `reason` is empty.
        """
        own = places.quarantine_of(self._machine)
        if own is None:
            self._help(store, [one.machine for one in places.quarantines])
            self._open, self._begins_at_s, self._num_failed = None, None, 0
            return None
        now_s = time.monotonic()
        if self._open is not None:
            return self._judge(store, self._open, now_s)
        if self._begins_at_s is None or now_s >= self._begins_at_s:
            self._begin(store, places, own, now_s)
        return None

    def _help(self, store: ControlStore, others: Sequence[MachineId]) -> None:
        """Does the same as other machines that are examined, if they ask for it."""
        wanted = read_values(store, [keys.examination(one) for one in others], tuple[int, list[MachineId]])
        for machine, (number, asked) in ((one, found) for one, found in zip(others, wanted, strict=True) if found):
            if self._last.get(machine) != number:
                self._last[machine] = number
                if self._machine in asked:
                    self._start(ExaminationWanted(examined=machine, number=number, helpers=tuple(asked)))

    def _begin(self, store: ControlStore, places: Places, own: Quarantine, now_s: float) -> None:
        held = [holding for holding in places.holders if holding.machine != own.machine]
        beats = store.get([keys.beat(holding.place) for holding in held]) if held else []
        others = [one.machine for one, beat in zip(held, beats, strict=True) if beat not in (None, ENDED)]
        (last,) = read_values(store, [keys.examination(own.machine)], tuple[int, list[MachineId]])
        number = 0 if last is None else last[0] + 1
        helpers = rules.helpers_of(places.quarantines.index(own), number, others)
        self._open = _Open(examined=own.machine, number=number, helpers=helpers, begun_at_s=now_s)
        write_value(store, keys.examination(own.machine), (number, helpers))
        self._start(ExaminationWanted(examined=own.machine, number=number, helpers=helpers, is_own=True))

    def _judge(self, store: ControlStore, of: _Open, now_s: float) -> ExaminationRecord | None:
        by = [self._machine, *of.helpers]
        figures = read_values(store, [keys.examined(of.examined, of.number, one) for one in by], rules.Figures)
        limit_s = rules.LIMIT_INTERVALS * self._interval_s
        if figures[0] is None:
            limit_s = max(limit_s, rules.LEAST_LIMIT_S)
        if None in figures and now_s < of.begun_at_s + limit_s:
            return None
        found = {one: of_one for one, of_one in zip(by, figures, strict=True) if of_one is not None}
        own = found.pop(self._machine, None)
        reason = rules.judge_examination(own, found)
        self._open, wait_s = None, 0.0
        if reason:
            self._num_failed += 1
            wait_s = rules.wait_s(self._num_failed, self._interval_s)
            self._begins_at_s = now_s + wait_s
        store.delete([keys.examined(of.examined, of.number, one) for one in by])
        return ExaminationRecord(
            machine=self._machine,
            number=of.number,
            reason=reason,
            wait_s=wait_s,
            own=None if own is None else asdict(own),
            likes={str(machine): asdict(figures) for machine, figures in found.items()},
        )
