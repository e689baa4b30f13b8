"""SIGUSR1, which asks a run to end with the step under way.

It may be sent to all processes of a run at any time. All of them are born with it blocked: there it stays pending, and
does no harm. Supervisors let it through once they can act on it. What came before there were any is the driver's to
pass on.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = {signal.SIGUSR1}


@contextmanager
def blocked() -> Iterator[None]:
    """It stays pending in this thread, and in what is started by it, also once this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def block() -> None:
    """It stays pending in this process from now on, until `listen`, and is then obeyed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def listen(on_asked: Callable[[], None]) -> None:
    """Calls back when the process is asked to end, and at once where it has been already; in the main thread."""
    signal.signal(signal.SIGUSR1, lambda *_: on_asked())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def is_pending() -> bool:
    """Whether this process has been asked since it was blocked."""
    return signal.SIGUSR1 in signal.sigpending()
