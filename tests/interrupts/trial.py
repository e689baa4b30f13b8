"""A `spare train` that a signal ends at some moment of its start, and what is to be seen of that."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import LayoutConfig
from tests.integration.whole_run import tiny_config

_BEGUN = "begun"
_COMMAND = """
import sys
from spare_megatron.machine import interrupts
interrupts.exit_at_once()
print("begun", flush=True)
from spare_megatron.__main__ import main
sys.exit(main())
"""
"""The command as `spare` runs it, which says when the first line of it that can act on a signal has been executed."""

STOPPED = 5
START_TIMEOUT_S, END_TIMEOUT_S = 120.0, 60.0
_LEFT_TIMEOUT_S = 10.0
"""How long the kernel may take to end the processes that a killed one has forked."""
_POLL_S = 0.01
_NUM_STEPS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A command that was interrupted.

    Attributes:
        after_s: How long after the line that was waited for.
        seen: The last line of its progress by then.
        problem: What is not as it should be; empty if nothing.
    """

    after_s: float
    seen: str
    problem: str


def write_preset(corpus: Path, preset: Path) -> None:
    """Two groups of one rank each, and more steps than are committed in time; no warning that checkpoints lack."""
    config = tiny_config(corpus, LayoutConfig(num_groups=2), steps=_NUM_STEPS)
    config = replace(config, checkpoint=replace(config.checkpoint, interval_steps=_NUM_STEPS))
    preset.write_text(dump_run_config(config))


def time_of_start(preset: Path, folder: Path) -> float:
    """Seconds from the first line of the command to the first committed step."""
    process, began_s = _start(preset, folder)
    try:
        metrics = folder / "run/metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None, (folder / "stderr").read_text()
            assert time.monotonic() - began_s < START_TIMEOUT_S, "no step was committed in time"
            time.sleep(_POLL_S)
        return time.monotonic() - began_s
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(END_TIMEOUT_S)


def interrupt(
    preset: Path, folder: Path, after_s: float, line: str = _BEGUN, number: signal.Signals = signal.SIGINT
) -> Interrupted:
    """Starts the command, sends its process group a signal after this time, as a terminal does, and waits for the end.

    Args:
        preset: Of the run.
        folder: For the run and the output; it does not exist yet.
        after_s: Counted from a line of the command's progress.
        line: What that line contains: a time stamp comes first.
        number: The signal.
    """
    process, began_s = _start(preset, folder, line)
    try:
        time.sleep(max(0.0, began_s + after_s - time.monotonic()))
        progress = (folder / "stdout").read_text().splitlines()
        os.killpg(process.pid, number)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(END_TIMEOUT_S)
        end_s = time.monotonic() + _LEFT_TIMEOUT_S
        while (left := _group_of(process.pid)) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        problem = _problem_of(code, (folder / "stderr").read_text(), left)
        if code == STOPPED and number != signal.SIGINT:  # training had begun
            problem = _problem_of_stopped(folder, left)
        return Interrupted(after_s=after_s, seen=progress[-1], problem=problem)
    finally:
        for item in _group_of(process.pid):
            item.kill()
        process.wait(END_TIMEOUT_S)


def _start(preset: Path, folder: Path, line: str = _BEGUN) -> tuple[subprocess.Popen[bytes], float]:
    """The command in a process group of its own, and when it printed a line that contains this."""
    folder.mkdir()
    command = [sys.executable, "-c", _COMMAND, "train", "--config", str(preset), "--run-dir", str(folder / "run")]
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
    end_s = time.monotonic() + START_TIMEOUT_S
    while not any(line in text for text in (folder / "stdout").read_text().splitlines()):
        assert process.poll() is None, (folder / "stderr").read_text()
        assert time.monotonic() < end_s, f"it did not print {line!r} in time"
        time.sleep(0.001)
    return process, time.monotonic()


def _group_of(leader_pid: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader_pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _problem_of(code: int | None, output: str, left: list[psutil.Process]) -> str:
    lines = output.splitlines()
    if code is None:
        return f"it did not end within {END_TIMEOUT_S:g} s: {output}"
    if code != 130:
        return f"exit code {code}: {output}"
    if len(lines) != 1 or not lines[0].startswith(("spare: interrupted", "spare train: interrupted")):
        return f"not one clean line: {output}"
    return f"left behind: {left}" if left else ""


def _problem_of_stopped(folder: Path, left: list[psutil.Process]) -> str:
    output, summary = (folder / "stderr").read_text(), json.loads((folder / "run/summary.json").read_text())
    if output or summary["outcome"] != "stopped" or summary["verdict"] != "valid":
        return f"not ended in order: {output}, {summary}"
    if not (folder / f"run/checkpoints/step-{summary['steps_committed']:08d}").is_dir():
        return "its last state is not saved"
    return f"left behind: {left}" if left else ""
