"""The standard streams of a process: always open, and for a run indifferent to what takes them.

Imports nothing else of the package, as commands call it before all else.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


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
    a reader, a terminal that is gone.
    """
    with redirect_stdout(outlast(sys.stdout)) as stdout, redirect_stderr(outlast(sys.stderr)) as stderr:
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()


def outlast(stream: TextIO) -> TextIO:
    """A stream to the same descriptor that raises no OSError; the stream itself if it has none, as in tests."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlasting(descriptor, "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty(),
    )


class _Outlasting(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            written: int | None = super().write(data)
            if written is not None:  # None: a pipe or terminal that is set not to block is full
                return written
        return memoryview(data).nbytes
