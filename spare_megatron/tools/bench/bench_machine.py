"""Describes the machine of a benchmark, and measures the memory of processes."""

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.machine.gpus import visible_gpus


def describe_machine() -> str:
    """Processor, number of cores, GPUs if any, and the Python version."""
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores"]
    if gpus := visible_gpus():
        parts.append(f"{len(gpus)} x {gpus[0].name}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    host_bytes: int
    """Largest peak (VmHWM, proc(5)) of any of the processes."""
    device_bytes: int
    """Memory in use on the fullest visible GPU, reserves of driver and allocator included; 0 on CPUs."""


def memory_of(pids: Iterable[int], *, is_gpu: bool) -> Memory:
    """Memory of these local processes; those that have ended count as zero."""
    device_bytes = max(gpu.memory_bytes - gpu.free_bytes for gpu in visible_gpus()) if is_gpu else 0
    return Memory(host_bytes=max(map(_most_ever, pids), default=0), device_bytes=device_bytes)


def _most_ever(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), default=0)
