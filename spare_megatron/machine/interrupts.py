"""Handles signals that end a command, from its first import to the end of its process: SIGINT, SIGTERM and, unless they
were ignored when it started, SIGHUP, SIGQUIT and SIGUSR2.

- `exit_at_once`: nothing to clean up, as during imports. One line, exit code 130, no exception.
- `raising`: the block cleans up after a KeyboardInterrupt, wherever it is raised.
- `deferred`: the block must not be left half done, such as the start of a process. A signal takes effect where the
  block waits, and at its end. The block may also take the first one but SIGINT for a request, which it grants itself.

Imports little, as commands import it before all else.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

from spare_megatron.machine.end_signal import masked

INTERRUPTED = 130
"""Exit code of a command ended by a signal."""

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
_ECHO_S = 0.25
"""A further signal this soon after a request repeats it: shells pass SIGHUP on to jobs to which the kernel has sent it,
and service managers send it together with SIGTERM."""


def _handled() -> list[signal.Signals]:
    return [*_ALWAYS, *(number for number in _UNLESS_IGNORED if signal.getsignal(number) is not signal.SIG_IGN)]


def exit_at_once(command: str = "spare") -> None:
    """From here on these signals print one line and end this process, but no child, with exit code 130."""
    for number in _handled():
        signal.signal(number, partial(_exit, command, os.getpid()))


def name_command(command: str) -> None:
    """Sets the command that this line names, if the signals still end the process at once."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _exit:
        exit_at_once(f"spare {command}")


def ignore() -> None:
    """From here on these signals do nothing: the exit code of the process is settled."""
    for number in _handled():
        signal.signal(number, signal.SIG_IGN)  # a function would give way to the default action with the interpreter


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """The first signal in the block raises KeyboardInterrupt; later ones are ignored during the cleanup."""
    before, own = {number: signal.getsignal(number) for number in _handled()}, partial(_raise, os.getpid())
    for number in before:
        signal.signal(number, own)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is own:  # none came
            for number, handler in before.items():
                signal.signal(number, handler)


class Deferral:
    """The signals that came in a `deferred` block, where `act` is described."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.request: signal.Signals | None = None
        """The first signal that came after `take_requests`, if it was none that takes effect at once."""
        self._takes_requests = False
        self._requested_at_s = 0.0
        self._outer: dict[signal.Signals, Any] = {}
        self._first: signal.Signals | None = None
        self._wakeup_fd, self._writing_fd = os.pipe()
        os.set_blocking(self._writing_fd, False)

    def check(self) -> None:
        if self._first is not None:
            self._act()  # also on what was started after the signal
            raise KeyboardInterrupt

    def take_requests(self) -> None:
        """From here on the first signal but SIGINT becomes the `request`, and the next one takes effect."""
        self._takes_requests = True

    def wait(self, objects: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """As `multiprocessing.connection.wait`, but returns on a request, and raises KeyboardInterrupt on a signal."""
        from multiprocessing.connection import wait

        ready = wait([*objects, self._wakeup_fd], timeout_s)
        self.check()
        if self._wakeup_fd in ready:
            ready.remove(self._wakeup_fd)
            os.read(self._wakeup_fd, 1)
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
            found = {number: signal.getsignal(number) for number in (*_ALWAYS, *_UNLESS_IGNORED)}
            self._outer |= {number: handler for number, handler in found.items() if handler != self._on_signal}
            for number, handler in self._outer.items():
                # Else its default action ends this process, or all that it starts are to ignore it, too.
                if callable(handler):
                    signal.signal(number, self._on_signal)

    def _uninstall(self) -> None:
        for number, handler in self._outer.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def _close(self) -> None:
        self._uninstall()
        os.close(self._wakeup_fd)
        os.close(self._writing_fd)
        if self._first is not None:
            self._outer[self._first](self._first, None)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        found = signal.Signals(number)
        is_ignored = self._outer[found] is _do_nothing
        if not is_ignored and found != signal.SIGINT and self._first is None and self._is_request():
            self.request = self.request or found
            self._wake_up()
            return
        self._act()
        if not is_ignored:
            self._first = self._first or found
            self._wake_up()

    def _is_request(self) -> bool:
        """Whether a signal that comes now is the request, or repeats it."""
        now_s = time.monotonic()
        if self.request is None:
            self._requested_at_s = now_s
        return self._takes_requests and now_s - self._requested_at_s < _ECHO_S

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing_fd, b"!")


@contextlib.contextmanager
def deferred(act: Callable[[], None] = lambda: None) -> Iterator[Deferral]:
    """Defers the signals: the first one has its previous effect at the end of the block. An exception of the block then
    gives way to that effect: what fails after a signal may fail because of it. `act` is called in the handler of each
    signal, and again when it takes effect in the block; it must not raise.
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

    # It ignores SIGINT and SIGTERM, which Python unblocks here when it starts it.
    with masked({*_UNLESS_IGNORED, signal.SIGUSR1}):
        resource_tracker.ensure_running()
    with masked({signal.SIGINT}):
        yield


def _exit(command: str, pid: int, number: int, frame: FrameType | None) -> None:
    _pass_on_in_child(pid, number)
    with contextlib.suppress(OSError):
        os.write(2, f"{command}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _raise(pid: int, number: int, frame: FrameType | None) -> None:
    _pass_on_in_child(pid, number)
    for further in _handled():
        signal.signal(further, _do_nothing)
    raise KeyboardInterrupt


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, no choice of those that have started this process, and none for those that it starts."""


def _pass_on_in_child(pid: int, number: int) -> None:
    """Ends a forked child of the process `pid`, which has set the handlers, as if there were none."""
    if os.getpid() != pid:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
