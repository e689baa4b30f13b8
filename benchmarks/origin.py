"""Where a figure comes from: machine, commit and date, to stand beside it."""

import os
import platform
import subprocess
import time
from pathlib import Path


def origin() -> dict[str, str]:
    """Machine, commit and date."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
        "commit": found.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    """The processor's name where the kernel tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
