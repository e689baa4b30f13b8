"""What the kernel reports of a machine and of a process that may be slow: processors, swap, TCP, CPU quotas."""

import contextlib
import os
import re
from dataclasses import dataclass
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
