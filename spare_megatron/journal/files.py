"""Journal files: one for each writer, under `RUN_DIR/journal`.

A line is handed to the operating system in one write before the writer goes on, so that it survives the writer's
SIGKILL. Only the last line of a killed writer can be torn.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spare_megatron.journal.records import Line, Record, decode_line, encode_line

R = TypeVar("R", bound=Record)


class JournalWriter:
    """Appends the records of one writer."""

    def __init__(self, run_dir: Path, source: str, now_s: Callable[[], float] = time.time) -> None:
        folder = run_dir / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._now_s = now_s
        self._fd = os.open(folder / f"{source}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: Record) -> None:
        text = encode_line(Line(source=self._source, at_s=self._now_s(), record=record)) + "\n"
        os.write(self._fd, text.encode())

    def close(self) -> None:
        os.close(self._fd)


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
    """
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
