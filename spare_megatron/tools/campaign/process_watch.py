"""Samples the processes of a run from outside, to find leaks and processes that outlive the run."""

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
from typing import Self

import psutil

from spare_megatron.process.processes import fork_server
from spare_megatron.process.reports import RanksStarted, RunEvent, StepCommitted

_PR_SET_CHILD_SUBREAPER = 36
_LEAST_SAMPLES = 16
_ENOUGH_SAMPLES = 120
"""A process is judged for growth from this many samples on. In a shorter run half of the longest series suffices, but
at least `_LEAST_SAMPLES`: what a new rank holds still changes."""
_FAREWELL_S = 5.0
"""How long processes may take to end after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Resources that a process holds, or their growth."""

    memory_bytes: int
    threads: int
    file_descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    num_processes: int
    growth: Holdings
    """Largest growth of any process: the median over the last quarter of its samples minus that over the second. In the
    first quarter it starts up."""
    grown_most: Mapping[str, str]
    """Resource -> the process that it grew most in."""
    largest: Holdings
    """Largest holding of any process."""
    orphans: tuple[str, ...]
    """Processes that outlived the run, as pid and command line. They have been killed."""


_THINGS = tuple(item.name for item in fields(Holdings))
MOST_GROWTH = Holdings(memory_bytes=64 << 20, threads=8, file_descriptors=8)
"""Growth beyond this is a leak. Connections to each group come on top."""
_MOST_COMMUNICATORS = 2
"""Communicators that a rank may be releasing: their connections stay open until their work has ended."""


class ProcessWatch:
    """Context manager that samples this process and all its descendants every `interval_s` seconds. Meanwhile this
    process is the reaper of its descendants' orphans, so that none escapes.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._own = psutil.Process()
        # Also by name: what a spare holds grows when it becomes a rank.
        self._samples: dict[tuple[psutil.Process, str], list[Holdings]] = defaultdict(list)
        self._names: dict[int, str] = {self._own.pid: "driver"}
        self._has_begun = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before: set[psutil.Process] = set()
        self._orphans: list[str] = []

    def __enter__(self) -> Self:
        fork_server()  # not an orphan: it stays for the next run
        self._before = set(self._own.children(recursive=True))
        _adopt_descendants(is_wanted=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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

    def on_event(self, event: RunEvent) -> None:
        """Starts sampling with the first committed step, because loading libraries looks like growth; learns names."""
        match event:
            case RanksStarted(pids=pids):
                self._names |= {child.pid: child.name for child in multiprocessing.active_children() if child.pid}
                self._names |= {pid: f"rank {rank} of group {group}" for (group, rank), pid in pids.items()}
            case StepCommitted():
                self._has_begun.set()

    def report(self) -> ProcessReport:
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
                self._sample()

    def _sample(self) -> None:
        for process in (self._own, *self._own.children(recursive=True)):
            with contextlib.suppress(psutil.Error, FileNotFoundError):  # it has ended
                self._samples[process, self._name(process)].append(_holdings(process))

    def _left(self) -> list[psutil.Process]:
        """Descendants of the run that have not ended. Reaps those that have."""
        left = []
        for process in set(self._own.children(recursive=True)) - self._before:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
                elif process.ppid() == self._own.pid:
                    os.waitpid(process.pid, os.WNOHANG)
        return left


def process_problems(report: ProcessReport, num_groups: int) -> list[str]:
    """Leaks and orphans of a run with so many groups, in words; empty if there are none."""
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
    """The median of the last quarter of the samples minus that of the second."""
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
