"""What `launch/test` does with the calls of pytest that it consists of."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
TIMEOUT_S = 30.0

ENVIRONMENT = 'cd "$(dirname "${BASH_SOURCE[0]}")/.." && venv="$PWD/venv"; say() { printf "%s\\n" "$*"; }\n'
PYTEST = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>calls
case "$*" in
    *tests/slurm) trap 'touch jobs-ended; exit 2' INT ;;
    *) trap 'exit 2' INT ;;
esac
echo >>ready
while :; do sleep 0.02; done
"""
"""It is interrupted as pytest is: with a code of its own."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout in which all tools are stubs."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "launch/test").write_bytes((LAUNCH / "test").read_bytes())
    (tmp_path / "launch/environment.sh").write_text(ENVIRONMENT)
    for name, text in {"python": PYTEST, "ruff": "#!/bin/sh\n", "mypy": "#!/bin/sh\n"}.items():
        tool = tmp_path / "venv/bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    return tmp_path


def test_ctrl_c_in_a_call_of_pytest_ends_the_whole(root: Path) -> None:
    """It went on to the next call, which takes longer."""
    process = subprocess.Popen(["bash", "launch/test"], cwd=root, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + TIMEOUT_S
        while not (root / "ready").exists() or (root / "ready").read_text().count("\n") < 2:  # with that of jobs
            assert time.monotonic() < end_s
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        first, second = sorted((root / "calls").read_text().splitlines(), key=len)
        assert (first, second.split()[2]) == ("-m pytest tests/slurm", "--numprocesses")
        assert (root / "jobs-ended").exists()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
