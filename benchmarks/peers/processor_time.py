"""Processor time of everything that this process and its descendants do, over time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil

INTERVAL_S = 0.25


class ProcessorTime:
    """Samples the processor time of this process, without the sampling, and of all its descendants.

    What a process has used is lost when it ends, so a figure is only right while the processes are the same.
    """

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._used_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="processor-time", daemon=True)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()

    @property
    def last_at_s(self) -> float:
        """The wall clock at the last sample; 0 before the first."""
        return self._at_s[-1] if self._at_s else 0.0

    def between(self, first_s: float, last_s: float) -> float:
        """Seconds of processors used between two moments of the wall clock, interpolated between samples."""
        first, last = np.interp([first_s, last_s], self._at_s, self._used_s)
        return float(last - first)

    def _run(self) -> None:
        this = psutil.Process()
        while not self._at_s or not self._is_over.wait(INTERVAL_S):
            at_s, others_s = time.time(), sum(_used_s(process) for process in this.children(recursive=True))
            self._used_s.append(_used_s(this) - time.thread_time() + others_s)
            self._at_s.append(at_s)


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(times.user + times.system)
