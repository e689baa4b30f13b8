"""A lock that admits one job at a time to a directory."""

import ctypes
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spare_megatron.formats.codec import parsed_json
from spare_megatron.formats.output import real_paths

LOCK = "lock"
_PR_GET_DUMPABLE = 3


class Locked(ValueError):
    """Another job holds the directory; the message names it."""


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Holds the directory, creating it if absent, against other jobs on any machine until the process ends; a file that
    is left over means nothing. Yields its `held_path`. Locked: another process holds it. OSError: it cannot be created
    or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_path(folder) as held:
        fd = os.open(held / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = real_paths(str(folder))
                raise Locked(f"{where} is in use by {_holder(fd)}; wait for it, end it, or choose another") from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            yield held
        finally:
            os.close(fd)


@contextmanager
def held_path(folder: Path) -> Iterator[Path]:
    """A path that leads every process of this machine and user to the directory, wherever it is moved, until the end of
    the block: that of this process's descriptor of it, a link to where it is. Where that leads others nowhere, the
    directory's own.
    """
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    path = Path(f"/proc/{os.getpid()}/fd/{fd}")
    try:
        yield path if _leads_others(path, fd) else folder.absolute()
    finally:
        os.close(fd)


def _leads_others(path: Path, fd: int) -> bool:
    """Whether /proc shows this process, as it does not if it is of another process namespace, and to others of the same
    user, as it does not for an interpreter with file capabilities.
    """
    try:
        is_shown = os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False
    return is_shown and ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE) == 1


def hold_shared(folder: Path) -> int:
    """Holds the directory until this process and all that it forks from now on have ended, as several processes may.
    Waits until none holds it `locked`. Returns the descriptor. OSError: no lock file, or a file system without locks.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)  # stays open; to be held alone NFS wants it open for writing
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def hold_alone(fd: int) -> bool:
    """Gives up what `hold_shared` holds, and holds it alone if no other process does. Of several that call this, the
    last is alone.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the directory `locked`, as a driver does; None if that cannot be determined here. Only
    for the directory of a run that has begun: one that is starting could find the lock taken by this check.
    """
    return _is_refused(folder, os.O_RDONLY, fcntl.LOCK_SH)


def is_held(folder: Path) -> bool | None:
    """As `is_locked`, or whether any process has called `hold_shared` for it."""
    return is_locked(folder) or _is_refused(folder, os.O_RDWR, fcntl.LOCK_EX)  # NFS locks only what is open for writing


def _is_refused(folder: Path, access: int, lock: int) -> bool | None:
    try:
        fd = os.open(folder / LOCK, access | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(fd)


def _holder(fd: int) -> str:
    try:
        holder = parsed_json(os.pread(fd, 1024, 0))
        driver = f"process {holder['pid']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):
        driver = "a process that has not written its name yet"
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return driver
    return f"a run whose nodes train on without their driver, {driver}"
