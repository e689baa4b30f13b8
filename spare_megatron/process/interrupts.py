"""SIGINT and SIGTERM handling, from the first import of a command to the end of its process.

- `exit_at_once`: nothing to clean up, as during imports. One line, exit code 130, no exception.
- `raising`: the block cleans up after a KeyboardInterrupt, wherever it is raised.
- `deferred`: the block must not be left half done, such as the start of a process. A signal takes effect where the
  block waits, and at its end.

Imports little, as commands import it before all else.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit code of a command ended by a signal."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_at_once(command: str = "spare") -> None:
    """From here on SIGINT prints one line and ends this process with exit code 130."""
    signal.signal(signal.SIGINT, partial(_exit, command))


def name_command(command: str) -> None:
    """Sets the command that this line names, if SIGINT still ends the process at once."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _exit:
        exit_at_once(f"spare {command}")


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """The first SIGINT or SIGTERM in the block raises KeyboardInterrupt; later ones are ignored during the cleanup."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _raise:  # none came
            for number, handler in before.items():
                signal.signal(number, handler)


class Deferral:
    """The signals that came in a `deferred` block, where `act` is described."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._outer: dict[signal.Signals, Any] = {}
        self._first: signal.Signals | None = None
        self._wakeup_fd, self._writing_fd = os.pipe()
        os.set_blocking(self._writing_fd, False)

    def check(self) -> None:
        if self._first is not None:
            self._act()  # also on what was started after the signal
            raise KeyboardInterrupt

    def wait(self, objects: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """As `multiprocessing.connection.wait`, but raises KeyboardInterrupt as soon as a signal has come."""
        from multiprocessing.connection import wait

        ready = wait([*objects, self._wakeup_fd], timeout_s)
        self.check()
        return ready

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Restores the previous handlers inside the block: for long calls that may be interrupted anywhere."""
        try:
            self._uninstall()
            self.check()
            yield
        finally:
            self._install()

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():  # only this thread handles signals
            found = {number: signal.getsignal(number) for number in _SIGNALS}
            self._outer |= {number: handler for number, handler in found.items() if handler != self._on_signal}
            for number, handler in self._outer.items():
                if handler not in (signal.SIG_DFL, None):  # else its default action ends this process
                    signal.signal(number, self._on_signal)

    def _uninstall(self) -> None:
        for number, handler in self._outer.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def _close(self) -> None:
        self._uninstall()
        os.close(self._wakeup_fd)
        os.close(self._writing_fd)
        if self._first is not None and callable(handler := self._outer[self._first]):
            handler(self._first, None)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._act()
        if callable(self._outer[signal.Signals(number)]):  # else it is ignored
            self._first = self._first or signal.Signals(number)
            with contextlib.suppress(BlockingIOError):
                os.write(self._writing_fd, b"!")


@contextlib.contextmanager
def deferred(act: Callable[[], None] = lambda: None) -> Iterator[Deferral]:
    """Defers SIGINT and SIGTERM: the first one has its previous effect at the end of the block. An exception of the
    block then gives way to that effect: what fails after a signal may fail because of it. `act` is called in the
    handler of each signal, and again when it takes effect in the block; it must not raise.
    """
    deferral = Deferral(act)
    deferral._install()
    try:
        yield deferral
    finally:
        deferral._close()


@contextlib.contextmanager
def never_in_children() -> Iterator[None]:
    """Processes started in the block never receive SIGINT, which Ctrl-C sends to all processes of a terminal."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # Python unblocks SIGINT when it starts the tracker
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit(command: str, number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{command}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
