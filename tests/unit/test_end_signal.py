"""Requests to end a run at any time of it: they stay pending until a process can act on them.

In processes of their own, that begin anew: a thread that some library starts in a forked one would take the signal.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

import pytest

from spare_megatron.machine import end_signal
from spare_megatron.process.processes import end_child, start_child


def _is_pending_of_itself(reports: Connection) -> None:
    """Born with it blocked, whatever its parent does with it."""
    os.kill(os.getpid(), signal.SIGUSR1)
    reports.send(end_signal.is_pending())
    end_signal.listen(lambda number: reports.send("asked"))
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.timeout(120)
def test_what_is_asked_of_a_process_before_it_listens_is_obeyed_when_it_does() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = start_child(multiprocessing.get_context("spawn"), "listener", _is_pending_of_itself)
    try:
        assert [child.reports.recv() for _ in range(3)] == [True, "asked", "asked"]
    finally:
        end_child(child)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "its parent is as before"


def _keeps_it_ignored_while_blocked(ours: Connection) -> None:
    """As the driver does: ignored, so that nothing happens once it is over, and still known of until then."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # commands tried in the parent may have it blocked
    with end_signal.blocked():
        signal.raise_signal(signal.SIGUSR1)
        ours.send(end_signal.is_pending())
    ours.send(end_signal.is_pending())


@pytest.mark.timeout(120)
def test_the_signal_ends_no_process_that_ignores_it_and_is_seen_while_blocked() -> None:
    ours, theirs = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_keeps_it_ignored_while_blocked, args=(theirs,))
    process.start()
    process.join(60.0)
    assert (process.exitcode, ours.recv(), ours.recv()) == (0, True, False)


LOOK_AT_THREADS = """
import pathlib
import spare_megatron.cli.train as command

def look(*_):
    for status in pathlib.Path("/proc/self/task").glob("*/status"):
        print(next(line for line in status.read_text().splitlines() if line.startswith("SigBlk")).split()[1])
    raise SystemExit

command.load_runnable = look
command.train(pathlib.Path("preset.toml"))
"""


@pytest.mark.timeout(120)
def test_no_thread_of_a_driver_swallows_it() -> None:
    """numpy starts threads when it is imported, unless a setting forbids it."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", LOOK_AT_THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    masks = [int(mask, 16) for mask in done.stdout.split()]
    assert masks
    assert all(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)
