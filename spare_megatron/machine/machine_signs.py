"""What the kernel reports of a machine and of processes that may be slow: processors, swap, TCP and CPU quotas."""

import contextlib
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spare_megatron.machine.processor_quota import find_controller

_SWAPPED = re.compile(r"^pswp(?:in|out) (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCounters:
    """Totals since boot: busy and all ticks, TCP segments sent again in this namespace, swapped pages."""

    busy_ticks: int
    ticks: int
    retransmitted: int
    swapped: int


def read_machine() -> MachineCounters:
    """The counters now (proc(5)); those that this kernel lacks are 0."""
    user, nice, system, idle, iowait, *others = (int(value) for value in _read("/proc/stat").split("\n")[0].split()[1:])
    busy = user + nice + system + sum(others[:3])
    return MachineCounters(
        busy_ticks=busy,
        ticks=busy + idle + iowait,
        retransmitted=_retransmitted(_read("/proc/net/snmp")),
        swapped=sum(map(int, _SWAPPED.findall(_read("/proc/vmstat")))),
    )


def _retransmitted(snmp: str) -> int:
    """The field of /proc/net/snmp, whose first line of a protocol names the fields of the second."""
    rows = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(*rows, strict=True)).get("RetransSegs", 0)) if len(rows) == 2 else 0


def starved_s(pid: int) -> float:
    """Seconds that the main thread of the process was ready to run without a processor; 0 if unknown."""
    fields = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    return int(fields[1]) * 1e-9 if len(fields) > 1 else 0.0


def throttled_s(pid: int) -> float:
    """Seconds that the CPU controller kept the processes of its control group from running; 0 if it has no limit."""
    controller = find_controller(_read("/proc/mounts"))
    if controller is None:
        return 0.0
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller.is_version_2 == (not names) and (controller.is_version_2 or "cpu" in names.split(",")):
            stat = dict(line.split() for line in _read(controller.mount / path.lstrip("/") / "cpu.stat").splitlines())
            return int(stat.get("throttled_usec", 0)) * 1e-6 + int(stat.get("throttled_time", 0)) * 1e-9
    return 0.0


def _read(path: str | os.PathLike[str]) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


_STAT_BYTES = 512


@dataclass(slots=True)
class _Thread:
    """The last observation of a thread."""

    times: tuple[int, int]
    """Nanoseconds that it has run, and that it has waited for a processor."""
    ready_since_s: float | None = None
    """Monotonic time since which it is known to wait for one; None if it is not."""
    ahead_s: float = 0.0
    """Seconds of its present wait that have been counted already."""


def times_of(pid: int) -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread has run and waited (Linux, sched-stats); empty without such counters."""
    times: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                ran, waited, _ = _read_of_thread(pid, thread, "schedstat").split()
                times[thread] = int(ran), int(waited)
    return times


def processor() -> str:
    """Its model; its architecture alone where the kernel says no more."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((one.partition(":")[2].strip() for one in lines if one.startswith("model name")), platform.machine())


class UnstarvedClock:
    """A monotonic clock (s) that stands still while its thread waits for a processor, by `read_waited_ns`."""

    def __init__(self, read_waited_ns: Callable[[], int], read_s: Callable[[], float] = time.monotonic) -> None:
        self._read_waited_ns = read_waited_ns
        self._read_s = read_s
        self._last_s = -math.inf

    def __call__(self) -> float:
        waited_ns, now_s, again_ns = self._read_waited_ns(), self._read_s(), self._read_waited_ns()
        while again_ns != waited_ns:  # a wait between the readings would be taken off a time that does not contain it
            waited_ns, now_s, again_ns = again_ns, self._read_s(), self._read_waited_ns()
        # The kernel's two clocks may differ by microseconds.
        self._last_s = max(self._last_s, now_s - waited_ns * 1e-9)
        return self._last_s


def unstarved_clock() -> Callable[[], float]:
    """The `UnstarvedClock` of the calling thread; `time.monotonic` if the kernel has no such counters."""
    try:
        # Kept open, which takes a tenth of the time: `thread-self` is resolved here.
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        os.pread(file, _STAT_BYTES, 0)
    except OSError:
        return time.monotonic
    return UnstarvedClock(lambda: int(os.pread(file, _STAT_BYTES, 0).split()[1]))


def is_ready(pid: int, thread: str) -> bool:
    """Whether the thread is runnable: neither asleep nor stopped (proc(5), /proc/pid/stat)."""
    try:
        return _read_of_thread(pid, thread, "stat").rpartition(b")")[2].split()[0] == b"R"
    except OSError:
        return False  # it has ended


def _read_of_thread(pid: int, thread: str, name: str) -> bytes:
    # Unbuffered: all threads of a node are looked at several times a second.
    with open(f"/proc/{pid}/task/{thread}/{name}", "rb", buffering=0) as file:
        return file.read(_STAT_BYTES)


@dataclass
class Starvation:
    """Watches the threads of one rank: their times (`read_times`), and whether one is runnable (`is_ready`)."""

    pid: int
    read_times: Callable[[int], Mapping[str, tuple[int, int]]] = times_of
    is_ready: Callable[[int, str], bool] = is_ready
    _threads: dict[str, _Thread] = field(default_factory=dict)
    _beats: int = -1
    _total_s: float = 0.0

    def seconds(self, beats: int, now_s: float) -> float:
        """Total starvation in seconds up to the monotonic time `now_s`; never falls. The kernel counts a wait when it
        is over, so one under way is looked for while the beat counter of the rank, `beats`, stands still.
        """
        is_silent, self._beats = beats == self._beats, beats
        seen: dict[str, _Thread] = {}
        for name, times in self.read_times(self.pid).items():
            thread = self._threads.get(name, _Thread((0, 0)))
            if times != thread.times:
                lacked_s = (times[1] - thread.times[1]) * 1e-9
                self._total_s += max(0.0, lacked_s - thread.ahead_s)
                thread = _Thread(times)
            elif thread.ready_since_s is not None:  # it has not run since, so it is still waiting
                waited_s = now_s - thread.ready_since_s
                self._total_s += waited_s
                thread = _Thread(times, now_s, thread.ahead_s + waited_s)
            elif is_silent and self.is_ready(self.pid, name):
                thread.ready_since_s = now_s
            seen[name] = thread
        self._threads = seen
        return self._total_s
