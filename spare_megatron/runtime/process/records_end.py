"""How a process reports that storage does not take what it writes down of a run."""

from collections.abc import Callable
from typing import Protocol

from spare_megatron.journal.files import BytesLost, OnHeld
from spare_megatron.runtime.process.reports import RecordsHeld, RecordsLost


class _Closable(Protocol):
    def close(self) -> None:
        """Raises BytesLost if the disk has not taken everything."""


def report_held(report: Callable[[RecordsHeld], None]) -> OnHeld:
    """What an `AppendingFile` calls when the storage stops taking it, and when it takes it again."""
    return lambda path, reason: report(RecordsHeld(path=str(path), reason=reason))


def close_or_tell(records: _Closable, tell: Callable[[RecordsLost], None]) -> None:
    """Closes them. What a full disk does not take is missing in the verdict, and is no lost group or run."""
    try:
        records.close()
    except BytesLost as error:
        tell(RecordsLost(paths=(str(error.filename),), num_bytes=error.num_bytes, reason=error.reason))
