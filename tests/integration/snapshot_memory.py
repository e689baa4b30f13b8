"""The memory of a snapshot server's process, seen from outside."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def memory_files(pid: int) -> Iterator[Path]:
    """Descriptors of snapshots that the process has open, some of them perhaps of the same one."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that has ended meanwhile
            if "spare-snapshot" in os.readlink(file):
                yield file
