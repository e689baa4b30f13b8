"""The standard streams of a process: open, and indifferent to what takes them. Imported by commands before all else."""

import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

_PATIENCE_S = 10.0
"""How long a pipe or terminal may take nothing before output is dropped."""


def open_closed() -> None:
    """Opens descriptors 0, 1 and 2 on /dev/null where they are closed, so that no other file gets these numbers; child
    processes inherit them. Characters that the encoding of stdout lacks are printed as escapes.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def outlasting() -> Iterator[None]:
    """In this block whatever is printed is dropped where stdout or stderr does not take it: a full disk, a pipe without
    a reader or with one that has stopped, a terminal that is gone.
    """
    with redirect_stdout(outlast(sys.stdout)) as stdout, redirect_stderr(outlast(sys.stderr)) as stderr:
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()


def outlast(stream: TextIO) -> TextIO:
    """A stream to the same file that raises no OSError and never blocks for long; itself if it has no descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlasting(_not_blocking(descriptor), "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty(),
    )


def _not_blocking(descriptor: int) -> int:
    """A descriptor of the same pipe or terminal that does not block, if it can be opened again; else the same one."""
    with suppress(OSError):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return descriptor


class _Outlasting(io.FileIO):
    """Drops what cannot be written, also after waiting for that; once it has waited in vain, at once until it can."""

    _is_stalled = False

    def write(self, data: Any) -> int:
        part = memoryview(data)[: select.PIPE_BUF]  # what a pipe that is ready takes whole
        with suppress(OSError):
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            self._is_stalled = not poll.poll(0 if self._is_stalled else 1000 * _PATIENCE_S)
            written: int | None = None if self._is_stalled else super().write(part)
            if written is not None:
                return written
        return part.nbytes
