"""Replays a trace of machines that fail and come back on the nodes of a run: in wall time, and from outside."""

import contextlib
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

import psutil

from spare_megatron.formats.quantities import format_duration
from spare_megatron.process.reports import RanksStarted, RunEvent, StepCommitted
from spare_megatron.tools.campaign.campaign_figures import FaultCount
from spare_megatron.tools.simulate.failures import Loss

DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAbsence:
    """A node whose processes are suspended for a time, from so many seconds after the first committed step on."""

    node: int
    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedAbsences:
    """The part of a trace that a run replays: `machines` by the node that stands for them; `left_out` counts losses of
    other machines.
    """

    absences: tuple[NodeAbsence, ...]
    machines: tuple[str, ...]
    left_out: int
    num_days: float
    day_s: float

    @property
    def minutes(self) -> float:
        """How long a run may take: all days, counted from its first step, and two minutes for its start and end."""
        return 2 + self.num_days * self.day_s / 60

    def text(self) -> str:
        seconds = format_duration(median(absence.seconds for absence in self.absences))
        named = ", ".join(f"{node}: {machine}" for node, machine in enumerate(self.machines))
        return (
            f"trace: {len(self.absences)} absences of the machines with most of them (by node, {named}), half of them "
            f"longer than {seconds}; a day takes {format_duration(self.day_s)}; {self.left_out} of others are left out"
        )


def replay_of(losses: Sequence[Loss], num_nodes: int, days: tuple[float, float], day_s: float) -> ReplayedAbsences:
    """The losses that begin in these days, of as many machines as there are nodes: those that have most of them.
    A day of the trace takes `day_s` seconds. Raises ValueError where that is not possible.
    """
    first_s, end_s = (day * DAY_S for day in days)
    inside = [loss for loss in losses if first_s <= loss.at_s < end_s]
    of_machine = Counter(loss.machine for loss in inside)
    if None in of_machine or any(loss.repair_s is None for loss in inside):
        raise ValueError("--trace needs the columns machine and repair_s, to know who is away, and for how long")
    machines = sorted(map(str, of_machine), key=lambda machine: (-of_machine[machine], machine))[:num_nodes]
    if not machines:
        raise ValueError(f"no machine of --trace is lost in --days {days[0]:g} {days[1]:g}")
    nodes = {machine: node for node, machine in enumerate(machines)}
    scale = day_s / DAY_S
    absences = tuple(
        NodeAbsence(
            node=nodes[str(loss.machine)], at_s=(loss.at_s - first_s) * scale, seconds=(loss.repair_s or 0) * scale
        )
        for loss in inside
        if loss.machine in nodes
    )
    return ReplayedAbsences(
        absences=absences,
        machines=tuple(machines),
        left_out=len(inside) - len(absences),
        num_days=days[1] - days[0],
        day_s=day_s,
    )


class TraceReplay:
    """Context manager that suspends and resumes the processes of nodes, which all run on this machine."""

    def __init__(self, losses: ReplayedAbsences) -> None:
        self._losses = losses
        self._processes: dict[int, Sequence[psutil.Process]] = {}
        self._suspended: dict[int, list[psutil.Process]] = {}
        self._struck_s: list[float] = []
        self._began_s = self._last_step_s = 0.0
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._strike, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._has_begun.set()
        self._thread.join()
        for node in list(self._suspended):
            self._resume(node)

    def on_event(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(node=node, pids=pids):
                self._processes[node] = list(_processes((*_supervisors_of(node), *pids.values())))
            case StepCommitted():
                self._last_step_s = time.monotonic()
                self._began_s = self._began_s or self._last_step_s
                self._has_begun.set()

    def count(self) -> FaultCount:
        """An absence is masked if a step was committed after it began."""
        reached_s = self._last_step_s - self._began_s
        return FaultCount(
            planned=len(self._losses.absences),
            due=sum(absence.at_s <= reached_s for absence in self._losses.absences),
            fired=len(self._struck_s),
            masked=sum(at_s < self._last_step_s for at_s in self._struck_s),
        )

    def _strike(self) -> None:
        absences = self._losses.absences
        moments = [(one.at_s, 0, one.node) for one in absences]
        moments += [(one.at_s + one.seconds, 1, one.node) for one in absences]  # after its begin, however short
        self._has_begun.wait()
        for at_s, is_end, node in sorted(moments):
            if self._is_over.wait(max(0.0, self._began_s + at_s - time.monotonic())):
                return
            (self._resume if is_end else self._suspend)(node)

    def _suspend(self, node: int) -> None:
        self._suspended[node] = []
        for process in self._processes.get(node, ()):
            with contextlib.suppress(psutil.NoSuchProcess):  # nor does another one count that has its number now
                process.suspend()
                self._suspended[node].append(process)
        if self._suspended[node]:
            self._struck_s.append(time.monotonic())

    def _resume(self, node: int) -> None:
        for process in self._suspended.pop(node, ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _supervisors_of(node: int) -> list[int]:
    """Each life of a supervisor is a child of this process, with a name that begins alike."""
    children = [(f"{child.name}-", child.pid) for child in multiprocessing.active_children()]
    return [pid for name, pid in children if pid and name.startswith(f"supervisor-{node}-")]


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)
