"""How a process ends what it writes down of a run."""

from collections.abc import Callable
from typing import Protocol

from spare_megatron.runtime.process.reports import RecordsLost


class _Closable(Protocol):
    def close(self) -> None:
        """Raises OSError if the disk has not taken everything."""


def close_or_tell(records: _Closable, tell: Callable[[RecordsLost], None]) -> None:
    """Closes them. What a full disk does not take is missing in the verdict, and is no lost group or run."""
    try:
        records.close()
    except OSError as error:
        tell(RecordsLost(reason=str(error)))
