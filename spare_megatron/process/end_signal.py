"""SIGUSR1, the request to end a run after the current step, to any of its processes at any time. All start with it
blocked, so it stays pending. Supervisors unblock it once they can act on it; the driver forwards its own to them. The
next votes of a group whose ranks are asked repeat it, so that one supervisor is enough.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = {signal.SIGUSR1}


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks the signal in this thread; processes and threads started in the block keep it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def block() -> None:
    """Blocks the signal in this process until `listen`, which delivers a pending one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def listen(on_asked: Callable[[], None]) -> None:
    """Calls back on each request, at once if one is pending. Main thread only."""
    signal.signal(signal.SIGUSR1, lambda *_: on_asked())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def is_pending() -> bool:
    """Whether a request has arrived while the signal was blocked."""
    return signal.SIGUSR1 in signal.sigpending()
