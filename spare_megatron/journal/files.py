"""Journal files: one per writer, under `RUN_DIR/journal`, line by line: a SIGKILL can tear only the last line.

A line is a JSON object of a record with its writer (`source`) and its time (`at_s`).
"""

import contextlib
import ctypes
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

from spare_megatron.formats.codec import decode, decode_head, encode
from spare_megatron.formats.output import real_paths, reason_of
from spare_megatron.journal import records
from spare_megatron.journal.records import FaultRecord, Record
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.version import __version__

R = TypeVar("R", bound=Record)

FORMAT = 5
"""Journal format that this version writes; rises with every change that the previous reader cannot handle."""

_FORMER_FIELDS = {"cadence": ("restart_s",)}
"""Fields of format 1 records that later formats dropped; ignored when read."""

KINDS: dict[str, type[Record]] = {
    name.removesuffix("Record").lower(): kind
    for name, kind in {**vars(records), "RunRecord": RunRecord}.items()
    if name.endswith("Record") and kind is not Record
}
"""Kind, as lines have it -> its class. Every class of records whose name ends in `Record` is a kind."""
_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    source: str
    at_s: float
    record: Record


def source_of_rank(group: int, rank: int, incarnation: int) -> str:
    return f"group-{group:04d}-rank-{rank}" + (f"-life-{incarnation}" if incarnation else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    record: str
    source: str
    at_s: float


def records_of(lines: Iterable[Line], kind: type[R]) -> list[R]:
    return [line.record for line in lines if isinstance(line.record, kind)]


def encode_line(line: Line) -> str:
    """The line as JSON, without a line end."""
    head = encode(_Head(record=_NAMES[type(line.record)], source=line.source, at_s=round(line.at_s, 6)))
    return f"{head[:-1]},{encode(line.record)[1:]}"


def decode_line(text: str) -> Line:
    """Decodes what `encode_line` wrote; raises ValueError for a damaged text or an unknown kind."""
    try:
        head = decode_head(text, _Head)
    except JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"not a record: {error}: {text[:80]}") from error
    kind = KINDS.get(head.record)
    if kind is None:
        raise ValueError(f"record of unknown kind: {text[:80]}")
    try:
        record = decode(text, kind, beside=("record", "source", "at_s", *_FORMER_FIELDS.get(head.record, ())))
    except ValueError as error:
        raise ValueError(f"damaged record: {error}: {text[:80]}") from error
    return Line(source=head.source, at_s=head.at_s, record=record)


ORIGIN = "origin.json"


def origin_field(run_dir: Path, name: str) -> str | None:
    """Field of `origin.json`; empty if the file lacks it, None without a readable file (a copied journal)."""
    try:
        text = (run_dir / ORIGIN).read_bytes()
    except OSError:
        return None
    try:
        return str(decode(text, dict).get(name, ""))
    except ValueError:
        return ""


def journal_files(run_dir: Path) -> list[Path]:
    """The files of a journal. FileNotFoundError: there is none; ValueError: its format is later or unknown."""
    require_known_format(run_dir)
    files = sorted((run_dir / "journal").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    return files


def require_known_format(run_dir: Path) -> None:
    """Raises ValueError if the journal's format is later or unknown; passes without a first record."""
    found = _first_record(run_dir).get("format", FORMAT)
    if found not in range(FORMAT + 1):
        raise ValueError(
            f"the journal of {run_dir} is of format {found!r} ({_origin(run_dir)}); spare_megatron {__version__} reads "
            f"formats 1 to {FORMAT}: use the version that wrote it, or a later one"
        )


def _first_record(run_dir: Path) -> dict[str, Any]:
    try:
        with (run_dir / "journal" / "driver.jsonl").open("rb") as file:
            return decode(file.readline(), dict)
    except (OSError, ValueError):  # reported by the reader of the whole journal
        return {}


def _origin(run_dir: Path) -> str:
    """Version and commit that wrote the journal, for an error message."""
    version, commit = origin_field(run_dir, "version"), origin_field(run_dir, "commit")
    if version and commit:
        return f"written by spare_megatron {version}, commit {commit}"
    return "origin.json does not say by which version it was written"


OnHeld = Callable[[Path, str], None]

_OWN_ERRORS = (errno.EBADF, errno.EFAULT, errno.EINVAL)
"""Errors of the call itself; all others may come from storage that is full, fails or is temporarily away."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_MOST_HELD_BYTES = 64 << 20
_PATIENCE_S = 5.0
_RETRY_S = 0.05


class BytesLost(OSError):
    """A file was closed though its last `num_bytes` were not accepted; `reason` is the error without the path."""

    def __init__(self, error: OSError, num_bytes: int, path: Path) -> None:
        named = real_paths(str(path))
        super().__init__(error.errno, f"{error.strerror}: the last {num_bytes} bytes are lost", named)
        self.num_bytes = num_bytes
        self.reason = reason_of(error)


class AppendingFile:
    """An append-only file that outlasts a full disk; any thread may append.

    Text that storage does not accept stays in memory and is written before any later text. `on_held` is called in the
    appending thread with the path and the error when storage stops accepting the file, and with an empty text once it
    has accepted all.
    """

    def __init__(self, path: Path, on_held: OnHeld | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = _open(path)
        self._held = b""
        self._error: OSError | None = None  # why something is held
        self._num_torn = 0  # bytes of a line whose rest is held
        self._on_held = on_held
        self._lock = threading.RLock()

    def append(self, text: str) -> None:
        """Appends the text; raises OSError if the call is wrong or held text exceeds its memory limit."""
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
                self._on_held(self._path, "" if self._error is None else reason_of(self._error))

    def _write_held(self) -> None:
        num_written = os.write(self._fd, self._held)
        written, self._held = self._held[:num_written], self._held[num_written:]
        line_end = written.rfind(b"\n")
        self._num_torn = len(written) - line_end - 1 if line_end >= 0 else self._num_torn + len(written)

    def fileno(self) -> int:
        return self._fd

    def reserve(self, num_bytes: int) -> None:
        """Allocates disk space behind the end, if the file system can; the size of the file does not change."""
        size = os.fstat(self._fd).st_size
        allocate = ctypes.CDLL(None).fallocate
        allocate(self._fd, _KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(num_bytes))

    def _open_again(self) -> None:
        """Reopens the path: a restarted file server may have forgotten the descriptor."""
        with contextlib.suppress(OSError):
            fd = _open(self._path)
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)

    def close(self) -> None:
        """Retries held text for some seconds, then closes; BytesLost if the file ends early, with a whole line."""
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


def _open(path: Path) -> int:
    """Opens a file of the run; by the name of its directory if the file server has forgotten the descriptor of that."""
    try:
        return os.open(path, _FLAGS, 0o644)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return os.open(real_paths(str(path)), _FLAGS, 0o644)


class JournalWriter(AppendingFile):
    """Appends the records of the writer `source`, which names its file. `writing` is entered around each write."""

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
        text = real_paths(text, lambda path: json.dumps(path)[1:-1])
        with self._writing():
            self.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """All lines of a run in time order, and what could not be read."""

    lines: tuple[Line, ...]
    damage: tuple[str, ...] = ()

    def of(self, kind: type[R]) -> list[R]:
        return records_of(self.lines, kind)


def read_journal(run_dir: Path) -> Journal:
    """Reads `RUN_DIR/journal`. FileNotFoundError: there is no journal; ValueError: it has a later format."""
    lines: list[Line] = []
    damage: list[str] = []
    for file in journal_files(run_dir):
        texts = file.read_text().split("\n")
        # A killed writer may leave its last line without an end; that record does not count.
        for number, text in enumerate(texts[:-1], start=1):
            try:
                lines.append(decode_line(text))
            except ValueError as error:
                damage.append(f"{file.name}:{number}: {error}")
    lines.sort(key=lambda line: line.at_s)
    return Journal(lines=tuple(lines), damage=tuple(damage))


def faults_struck(run_dir: Path, group: int, rank: int) -> set[FaultRecord]:
    """The injected faults that have struck this rank, in any incarnation, as far as its lines can be read."""
    found: set[FaultRecord] = set()
    for path in (run_dir / "journal").glob(f"group-{group:04d}-rank-{rank}*.jsonl"):
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # torn by the fault itself
                record = decode_line(text).record if '"record":"fault"' in text else None
                if isinstance(record, FaultRecord) and (record.group, record.rank) == (group, rank):
                    found.add(record)
    return found
