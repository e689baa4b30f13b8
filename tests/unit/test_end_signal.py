"""SIGUSR1 at any time of a run's life: until somebody can act on it, it waits."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, Pipe

import pytest

from spare_megatron.runtime import end_signal
from spare_megatron.runtime.processes import end_child, start_child


def _is_pending_of_itself(reports: Connection) -> None:
    """Born with it blocked, whatever its parent does with it."""
    os.kill(os.getpid(), signal.SIGUSR1)
    reports.send(end_signal.is_pending())
    end_signal.listen(lambda: reports.send("asked"))
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.timeout(120)
def test_what_is_asked_of_a_process_before_it_listens_is_obeyed_when_it_does() -> None:
    child = start_child(multiprocessing.get_context("fork"), "listener", _is_pending_of_itself)
    try:
        assert [child.reports.recv() for _ in range(3)] == [True, "asked", "asked"]
    finally:
        end_child(child)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "its parent is as before"


def _keeps_it_ignored_while_blocked(ours: Connection) -> None:
    """As the driver does: ignored, so that nothing happens once it is over, and still known of until then."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with end_signal.blocked():
        os.kill(os.getpid(), signal.SIGUSR1)
        ours.send(end_signal.is_pending())
    ours.send(end_signal.is_pending())


@pytest.mark.timeout(120)
def test_it_ends_nobody_who_has_it_ignored_and_is_known_of_while_it_is_blocked() -> None:
    ours, theirs = Pipe()
    process = multiprocessing.get_context("fork").Process(target=_keeps_it_ignored_while_blocked, args=(theirs,))
    process.start()
    process.join(60.0)
    assert (process.exitcode, ours.recv(), ours.recv()) == (0, True, False)
