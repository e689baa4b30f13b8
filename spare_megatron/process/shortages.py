"""Recognizes that a process lacks memory, threads, open files or room in shared memory, and names the remedy."""

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from spare_megatron.config.checks.validate import ProcessLimits
from spare_megatron.machine.gpus.device_errors import is_want_of_memory

_REMEDIES: Mapping[int, str] = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max with `sysctl`",
    errno.EAGAIN: "no further thread or process can start: raise `ulimit -v`, `ulimit -u` or the job's memory",
    errno.ENOMEM: "raise `ulimit -v` or the job's memory, or have other programs end",
    errno.ENOBUFS: "have other programs close connections",
    errno.ENOSPC: "make room in /dev/shm",
}
"""By the number of a system error that concerns a process or its machine, and no peer."""

_TEXTS: Mapping[str, int] = {
    # That of ENFILE begins with that of EMFILE.
    **{os.strerror(number).lower(): number for number in (errno.ENFILE, *_REMEDIES)},
    "can't start new thread": errno.EAGAIN,
    "std::bad_alloc": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "memoryerror": errno.ENOMEM,
}
"""Fragments of lower-case error messages that stand for these numbers; the first one counts."""

_FEW_FILES = 16
_LITTLE_MEMORY_BYTES = 64 * 2**20
"""Room below a limit with which neither a connection nor a thread may be possible."""


def process_limits() -> ProcessLimits:
    """The limits of this process, which those that it starts inherit."""
    open_files, open_files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessLimits(
        open_files=open_files,
        open_files_most=open_files_most,
        address_space_bytes=_limit_of(resource.RLIMIT_AS),
        file_bytes=_limit_of(resource.RLIMIT_FSIZE),
        temp_folder=tempfile.gettempdir(),
    )


def _limit_of(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def shortage_in(error: BaseException) -> str:
    """What the error says that this process lacks, with the remedy; empty for another kind. Where libraries hide the
    system error, a limit that is nearly reached is the cause. Not for errors that a lost peer explains.
    """
    if is_want_of_memory(error):
        return "the GPU lacks memory for communicators; lower train.micro_batch_size or reduce.bucket_mib"
    number = _number_of(error)
    limits = "; ".join(limits_reached(os.getpid()))
    if number is None:
        return limits
    lacking = os.strerror(number)
    return f"{lacking[0].lower()}{lacking[1:]}; {limits or _REMEDIES[number]}"


def limits_reached(pid: int) -> Iterator[str]:
    """Each limit that the process has reached or is close to, for people; nothing for a process that has ended."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        num_files = len(os.listdir(f"/proc/{pid}/fd"))
        if limit != resource.RLIM_INFINITY and num_files + _FEW_FILES >= limit:
            yield f"it has {num_files} of at most {limit} files open: raise `ulimit -n`"
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, _ = resource.prlimit(pid, resource.RLIMIT_AS)
        lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        used = 1024 * int({name: text for name, _, text in lines}["VmSize"].split()[0])
        if limit != resource.RLIM_INFINITY and used + _LITTLE_MEMORY_BYTES >= limit:
            yield f"it has {used >> 20} MiB of at most {limit >> 20} MiB of memory as address space: raise `ulimit -v`"


def _number_of(error: BaseException | None) -> int | None:
    """The system error that this one, or one that it was raised from, stands for; None if it is of another kind."""
    while error is not None:
        if isinstance(error, MemoryError):
            return errno.ENOMEM
        if isinstance(error, OSError) and error.errno in _REMEDIES:
            return error.errno
        text = str(error).lower()
        for fragment, number in _TEXTS.items():
            if fragment in text:
                return number
        error = error.__cause__ or error.__context__
    return None
