"""What a figure was measured on."""

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Processor, its cores, and GPUs if there are any."""
    import torch

    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores"]
    if num_gpus := torch.cuda.device_count():
        parts.append(f"{num_gpus} x {torch.cuda.get_device_name(0)}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def _processor() -> str:
    """The processor's name where the kernel tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
