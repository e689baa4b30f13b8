"""Where a figure comes from: machine, commit and date, to stand beside it."""

import subprocess
import time
from pathlib import Path

from spare_megatron.bench.machine import describe_machine


def origin() -> dict[str, str]:
    """Machine, commit and date."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return {
        "machine": describe_machine(),
        "commit": found.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }
