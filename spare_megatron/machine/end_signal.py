"""Requests to end a run after the step under way and save it, by a signal to any of its processes.

SIGUSR1 may come at any time and sets no limit. All processes start with it blocked, so that it stays pending until
supervisors can act on it and the driver looks. After any other signal the run has `control.end_grace_s`. Only driver
(`interrupts`) and supervisors act on them; votes repeat a request, so that one supervisor is enough.
"""

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

WITHOUT_LIMIT = signal.SIGUSR1
_ALL = (WITHOUT_LIMIT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks SIGUSR1 in this thread; processes and threads started in the block keep it blocked."""
    with masked([WITHOUT_LIMIT]):
        yield


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Blocks all of these signals, so that processes started in the block keep them blocked."""
    with masked(_ALL):
        yield


def block() -> None:
    """Blocks SIGUSR1 in this process until `listen`, which delivers a pending one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [WITHOUT_LIMIT])


def listen(on_asked: Callable[[signal.Signals], None]) -> None:
    """Calls back on each signal that is not ignored, at once if one is pending. Main thread only."""
    for number in _ALL:
        if number == WITHOUT_LIMIT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: on_asked(signal.Signals(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)


def disregard() -> None:
    """Ignores these signals in this process, but not in programs that it starts."""
    for number in _ALL:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)


def is_pending() -> bool:
    return WITHOUT_LIMIT in signal.sigpending()


@contextmanager
def masked(numbers: Collection[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
