"""Reports once for the run that storage does not take its records, and that its directory is moved or removed."""

import os
from collections.abc import Callable
from pathlib import Path

from spare_megatron.formats.output import real_paths
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import StorageOutcome, StorageRecord
from spare_megatron.process.reports import RecordsHeld, RecordsLost, RunDirectoryMoved

RESERVED_BYTES = 16 << 10
"""Space reserved in the driver's journal for these records and the end of the run."""
_REMOVED = " (deleted)"
"""What the kernel appends to the path of a deleted file that a descriptor still refers to."""


class StorageWatch:
    """Merges all processes' reports about their files into the state of the run's storage; `journal` is set later."""

    def __init__(self, run_dir: Path, report: Callable[[RecordsHeld | RecordsLost], None]) -> None:
        self._run_dir = run_dir
        self._report = report
        self._held: set[str] = set()
        self._lost: list[RecordsLost] = []
        self.journal: JournalWriter | None = None

    def on_held(self, event: RecordsHeld) -> None:
        """Passes on that the first file is held, and that none is held any more."""
        was_held = bool(self._held)
        if event.reason:
            self._held.add(event.path)
        else:
            self._held.discard(event.path)
        if was_held is not bool(self._held):
            outcome: StorageOutcome = "held" if event.reason else "written"
            self._write(StorageRecord(outcome=outcome, path=self._name(event.path), reason=event.reason))
            self._report(event)

    def on_lost(self, event: RecordsLost) -> None:
        self._lost.append(event)

    def record_lost(self) -> None:
        """Journals that files of the journal are incomplete. Call before the driver's own file is closed."""
        journal = [event for event in self._lost if Path(event.paths[0]).parent.name == "journal"]
        if journal:
            record = StorageRecord(
                outcome="lost",
                path=self._name(journal[0].paths[0]),
                reason=journal[0].reason,
                num_files=len(journal),
                num_bytes=sum(event.num_bytes for event in journal),
            )
            self._write(record)

    def report_lost(self) -> None:
        """Passes on all incomplete files as one report."""
        if self._lost:
            paths = tuple(path for event in self._lost for path in event.paths)
            num_bytes = sum(event.num_bytes for event in self._lost)
            self._report(RecordsLost(paths=paths, num_bytes=num_bytes, reason=self._lost[0].reason))

    def _name(self, path: str) -> str:
        run_dir = real_paths(str(self._run_dir))
        return str(Path(path).relative_to(run_dir)) if Path(path).is_relative_to(run_dir) else path

    def _write(self, record: StorageRecord) -> None:
        if self.journal is not None:
            self.journal.write(record)


class DirectoryWatch:
    """Notices where the run's directory is, by the path that leads to it wherever it is moved; no storage is asked."""

    def __init__(self, run_dir: Path, report: Callable[[RunDirectoryMoved], None]) -> None:
        self._run_dir = run_dir
        self._report = report
        self._last = real_paths(str(run_dir))

    def poll(self) -> str:
        """Reports a move. Returns where the directory was if it is removed, else an empty text."""
        now = real_paths(str(self._run_dir))
        if now.endswith(_REMOVED) and not os.stat(self._run_dir).st_nlink:
            return now.removesuffix(_REMOVED)
        if now != self._last:
            former, self._last = self._last, now
            self._report(RunDirectoryMoved(path=Path(now), former=Path(former)))
        return ""
