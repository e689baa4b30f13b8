"""Watches the processes of a run from outside: what they hold over time, and what is left when the run is over."""

import contextlib
import ctypes
import multiprocessing
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from types import TracebackType
from typing import Self

import psutil

from spare_megatron.process.processes import fork_server
from spare_megatron.process.reports import RanksStarted, RunEvent, StepCommitted

_PR_SET_CHILD_SUBREAPER = 36
_LEAST_SAMPLES = 16
_ENOUGH_SAMPLES = 120
"""Of how many samples a process's growth is judged, or of half of all there are. What a rank holds follows the number
of groups, so that one that was taken in a few steps ago tells nothing."""
_FAREWELL_S = 5.0
"""Processes that are ending when the run is over may take this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one process holds, or how much more of it than before."""

    memory_bytes: int
    threads: int
    file_descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """What was seen of the processes of a run.

    Attributes:
        num_processes: How many were seen.
        growth: The largest growth of any of them: the median over the last quarter of its life above that over the
            second quarter, in the first of which it starts up.
        grown_most: For each thing held, which process that was.
        largest: The most that any of them held.
        orphans: Those that outlived the run: pid and command line. They have been killed.
    """

    num_processes: int
    growth: Holdings
    grown_most: Mapping[str, str]
    largest: Holdings
    orphans: tuple[str, ...]


_THINGS = tuple(item.name for item in fields(Holdings))

MOST_GROWTH = Holdings(memory_bytes=64 << 20, threads=8, file_descriptors=8)
"""More than what a process may hold more after some time than before: a leak. Connections to each group come on top."""
_MOST_COMMUNICATORS = 2
"""Communicators that a rank may be letting go of: their connections are held until their work has ended."""


class ProcessWatch:
    """Samples this process and all that descend from it. Use as a context manager around a run.

    While it watches, this process adopts what its descendants leave behind, so that nothing escapes it.

    Args:
        interval_s: Seconds between samples.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._own = psutil.Process()
        # By its name, too: a spare that takes a lost rank's place begins to hold what a rank does.
        self._samples: dict[tuple[psutil.Process, str], list[Holdings]] = defaultdict(list)
        self._names: dict[int, str] = {self._own.pid: "driver"}
        self._has_begun = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before: set[psutil.Process] = set()
        self._orphans: list[str] = []

    def __enter__(self) -> Self:
        fork_server()  # it stays for the next run
        self._before = set(self._own.children(recursive=True))
        _adopt_descendants(is_wanted=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        end_s = time.monotonic() + _FAREWELL_S
        while self._left() and time.monotonic() < end_s:
            time.sleep(0.05)
        for process in self._left():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._orphans.append(f"{process.pid}: {' '.join(process.cmdline())[:80]}")
                process.kill()
                process.wait(_FAREWELL_S)
        _adopt_descendants(is_wanted=False)

    def take(self, event: RunEvent) -> None:
        """Begins to look when training begins: what loads its libraries grows. Learns the names of ranks."""
        match event:
            case RanksStarted(pids=pids):
                self._names |= {child.pid: child.name for child in multiprocessing.active_children() if child.pid}
                self._names |= {pid: f"rank {rank} of group {group}" for (group, rank), pid in pids.items()}
            case StepCommitted():
                self._has_begun.set()

    def report(self) -> ProcessReport:
        """What was seen, after the end."""
        longest = max(map(len, self._samples.values()), default=0)
        enough = max(_LEAST_SAMPLES, min(_ENOUGH_SAMPLES, longest // 2))
        growths = {key: growth_of(samples) for key, samples in self._samples.items() if len(samples) >= enough}
        held = [sample for samples in self._samples.values() for sample in samples]
        return ProcessReport(
            num_processes=len({process for process, _ in self._samples}),
            growth=_largest(list(growths.values())),
            grown_most={
                name: max(growths, key=lambda key: getattr(growths[key], name))[1] for name in _THINGS if growths
            },
            largest=_largest(held),
            orphans=tuple(self._orphans),
        )

    def _name(self, process: psutil.Process) -> str:
        return self._names.get(process.pid, f"process {process.pid}")

    def _watch(self) -> None:
        while not self._is_over.wait(self._interval_s):
            if self._has_begun.is_set():
                self._look()

    def _look(self) -> None:
        for process in (self._own, *self._own.children(recursive=True)):
            with contextlib.suppress(psutil.Error, FileNotFoundError):  # it has ended
                self._samples[process, self._name(process)].append(_holdings(process))

    def _left(self) -> list[psutil.Process]:
        """Descendants of the run that have not ended; those that have are reaped."""
        left = []
        for process in set(self._own.children(recursive=True)) - self._before:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
                elif process.ppid() == self._own.pid:
                    os.waitpid(process.pid, os.WNOHANG)
        return left


def process_problems(report: ProcessReport, num_groups: int) -> list[str]:
    """Why a run of so many groups left something behind, or would have in time; empty if it did not."""
    found = [f"process {orphan} outlived the run" for orphan in report.orphans]
    most = replace(MOST_GROWTH, file_descriptors=MOST_GROWTH.file_descriptors + _MOST_COMMUNICATORS * num_groups)
    for name in _THINGS:
        grown, limit = getattr(report.growth, name), getattr(most, name)
        if grown > limit:
            found.append(f"{report.grown_most[name]} grew by {grown} {name.replace('_', ' ')}, more than {limit}")
    return found


def _holdings(process: psutil.Process) -> Holdings:
    with process.oneshot():
        return Holdings(
            memory_bytes=process.memory_info().rss,
            threads=process.num_threads(),
            file_descriptors=process.num_fds(),
        )


def growth_of(samples: Sequence[Holdings]) -> Holdings:
    """The median of the last quarter of the samples above that of the second."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    return Holdings(
        **{
            name: int(median(getattr(s, name) for s in last) - median(getattr(s, name) for s in second))
            for name in _THINGS
        }
    )


def _largest(holdings: Sequence[Holdings]) -> Holdings:
    return Holdings(**{name: max((getattr(held, name) for held in holdings), default=0) for name in _THINGS})


def _adopt_descendants(*, is_wanted: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted))
