"""Benchmarks in a mode so short that their figures mean nothing: their commands work."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def run(name: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *words, "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert {"machine", "commit", "date"} <= set(result)
    return result


def test_control_plane() -> None:
    """Blocks of two groups: in loops and as threads, with relays and an epoch change."""
    words = ("--stores", "embedded", "--groups", "6", "--fan-in", "2", "--steps", "2", "--processes", "2")
    loops, threads = run("control_plane", *words)["rows"]
    assert (loops["clients"], threads["clients"]) == ("loops", "threads")
    assert 0 < loops["commit_ms"]["p50"] <= loops["commit_ms"]["p99"]
    assert 0 < threads["fence_ms"]["p50"] < threads["epoch_change_ms"]["p99"]
