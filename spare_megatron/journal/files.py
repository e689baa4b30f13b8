"""Journal files: one for each writer, under `RUN_DIR/journal`.

A line is handed to the operating system in one write before the writer goes on, so that it survives the writer's
SIGKILL. Only the last line of a killed writer can be torn.
"""

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spare_megatron.journal.lines import Line, decode_line, encode_line, require_known_format
from spare_megatron.journal.records import Record

R = TypeVar("R", bound=Record)
OnHeld = Callable[[Path, str], None]

_OWN_ERRORS = (errno.EBADF, errno.EFAULT, errno.EINVAL)
"""What says that the write was wrong. All others may be storage that is full, fails, or is away for a while."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_MOST_HELD_BYTES = 64 << 20
_PATIENCE_S = 5.0
_RETRY_S = 0.05


class BytesLost(OSError):
    """A file was closed before the disk had taken all of it.

    Attributes:
        num_bytes: What is missing at its end.
        reason: The error that kept it from being written, without the path.
    """

    def __init__(self, error: OSError, num_bytes: int, path: Path) -> None:
        super().__init__(error.errno, f"{error.strerror}: the last {num_bytes} bytes are lost", str(path))
        self.num_bytes = num_bytes
        self.reason = _reason_of(error)


class AppendingFile:
    """A file that is only appended to, in whole writes, and outlasts a full disk.

    What storage that is full, fails or is away does not take is kept in memory and written with the next text that it
    does take. Any thread may append: a fault that strikes the one that saves is written beside what the main thread
    writes.

    Args:
        path: The file.
        on_held: Called with the path and the error when the storage stops taking the file, and with an empty text
            when it has taken all of it again; in the thread that appends.
    """

    def __init__(self, path: Path, on_held: OnHeld | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, _FLAGS, 0o644)
        self._held = b""
        self._error: OSError | None = None  # why something is held
        self._num_torn = 0  # bytes of a line whose rest is held
        self._on_held = on_held
        self._lock = threading.RLock()

    def append(self, text: str) -> None:
        """Writes the text.

        Raises:
            OSError: The disk has not taken anything for so long that memory would fill up.
        """
        with self._lock:
            self._held += text.encode()
            before = self._error
            try:
                while self._held:
                    self._write_held()
                self._error = None
            except OSError as error:
                self._error = error
                if error.errno in _OWN_ERRORS or len(self._held) > _MOST_HELD_BYTES:
                    raise
                if error.errno == errno.ESTALE:
                    self._open_again()
            if self._on_held is not None and (before is None) is not (self._error is None):
                self._on_held(self._path, "" if self._error is None else _reason_of(self._error))

    def _write_held(self) -> None:
        num_written = os.write(self._fd, self._held)
        written, self._held = self._held[:num_written], self._held[num_written:]
        line_end = written.rfind(b"\n")
        self._num_torn = len(written) - line_end - 1 if line_end >= 0 else self._num_torn + len(written)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    def reserve(self, num_bytes: int) -> None:
        """Has the file system set so much aside behind the end of the file: it is taken though the disk is full.

        The size of the file stays as it is. A file system that cannot do so, or has no room, reserves nothing.
        """
        size = os.fstat(self._fd).st_size
        allocate = ctypes.CDLL(None).fallocate
        allocate(self._fd, _KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(num_bytes))

    def _open_again(self) -> None:
        """A file server that was started again may not know the descriptor any more, but the path."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, _FLAGS, 0o644)
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)

    def close(self) -> None:
        """Closes the file when the disk has taken everything, which it is given some seconds for.

        Raises:
            BytesLost: It has not. The file ends with its last whole line.
        """
        end_s = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):
            while self._held and time.monotonic() < end_s:
                time.sleep(_RETRY_S)
                self.append("")
        with contextlib.suppress(OSError):
            if self._num_torn:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - self._num_torn)
        with contextlib.suppress(OSError):
            os.close(self._fd)
        if self._error is not None:
            raise BytesLost(self._error, self._num_torn + len(self._held), self._path)


def _reason_of(error: OSError) -> str:
    """The error without its path."""
    return f"[Errno {error.errno}] {error.strerror}"


class JournalWriter(AppendingFile):
    """Appends the records of one writer.

    Args:
        run_dir: The run's directory.
        source: The writer's name.
        now_s: The wall clock.
        writing: Entered around each write, which takes as long as storage pauses.
        on_held: As of `AppendingFile`.
    """

    def __init__(
        self,
        run_dir: Path,
        source: str,
        now_s: Callable[[], float] = lambda: time.time(),
        writing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        on_held: OnHeld | None = None,
    ) -> None:
        super().__init__(run_dir / "journal" / f"{source}.jsonl", on_held)
        self._writing = writing
        self._source = source
        self._now_s = now_s

    def write(self, record: Record) -> None:
        text = encode_line(Line(source=self._source, at_s=self._now_s(), record=record)) + "\n"
        with self._writing():
            self.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """All lines of a run in the order of their times, and what could not be read."""

    lines: tuple[Line, ...]
    damage: tuple[str, ...] = ()

    def of(self, kind: type[R]) -> list[R]:
        """The records of one kind, in the order of their times."""
        return [line.record for line in self.lines if isinstance(line.record, kind)]


def read_journal(run_dir: Path) -> Journal:
    """Everything under `RUN_DIR/journal`.

    Raises:
        FileNotFoundError: The run directory has no journal.
        ValueError: It is of a later format.
    """
    require_known_format(run_dir)
    files = sorted((run_dir / "journal").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    lines: list[Line] = []
    damage: list[str] = []
    for file in files:
        texts = file.read_text().split("\n")
        # A writer that was killed may leave its last line without an end: that record was never made.
        for number, text in enumerate(texts[:-1], start=1):
            try:
                lines.append(decode_line(text))
            except ValueError as error:
                damage.append(f"{file.name}:{number}: {error}")
    lines.sort(key=lambda line: line.at_s)
    return Journal(lines=tuple(lines), damage=tuple(damage))
