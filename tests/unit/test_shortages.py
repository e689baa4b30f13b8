"""What a process lacks: from errors, and from its limits."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from spare_megatron.process.shortages import limits_reached, shortage_in

pytestmark = pytest.mark.timeout(60)


def raised_from(error: Exception) -> RuntimeError:
    outer = RuntimeError("a connection could not be built")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "too many open files; raise `ulimit -n`"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "too many open files in system; raise fs.file-max"),
        (RuntimeError("[enforce fail at device.cc:186] rv != -1. Too many open files"), "too many open files; "),
        (RuntimeError("socket: Too many open files in system"), "too many open files in system; "),
        (RuntimeError("can't start new thread"), "no further thread or process can start"),
        (RuntimeError("Resource temporarily unavailable"), "no further thread or process can start"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "no further thread or process can start"),
        (MemoryError(), "cannot allocate memory; "),
        (RuntimeError("std::bad_alloc"), "cannot allocate memory; "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "cannot allocate"),
        (RuntimeError("CUDA error: out of memory"), "cannot allocate memory; "),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "make room in /dev/shm"),
        (
            RuntimeError("NCCL: creating shared memory segment /dev/shm/nccl-1 failed: No space left on device (28)"),
            "make room in /dev/shm",
        ),
        (OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)), "no buffer space available; "),
        (raised_from(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))), "cannot allocate memory; "),
    ],
)
def test_an_error_that_names_a_resource_is_recognized(error: Exception, named: str) -> None:
    assert named in shortage_in(error)


@pytest.mark.parametrize("error", [RuntimeError("Connection reset by peer"), OSError(errno.ECONNREFUSED, "refused")])
def test_an_error_of_another_kind_names_nothing(error: Exception) -> None:
    assert shortage_in(error) == ""


HIDDEN = """
import os, resource
from spare_megatron.process.shortages import shortage_in
kind, room = resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 4
if {by_memory}:
    kind, room = resource.RLIMIT_AS, 1024 * int(open("/proc/self/statm").read().split()[0]) * 4 + 2**24
resource.setrlimit(kind, (room, resource.getrlimit(kind)[1]))
print(shortage_in(RuntimeError("Cannot resolve 127.0.0.1 to a (local) address")))
"""


@pytest.mark.parametrize(("by_memory", "remedy"), [(False, "`ulimit -n`"), (True, "`ulimit -v`")])
def test_an_error_that_hides_its_cause_is_explained_by_the_limit_that_is_reached(by_memory: bool, remedy: str) -> None:
    script = HIDDEN.format(by_memory=by_memory)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert remedy in done.stdout


def test_a_process_with_room_below_its_limits_and_one_that_has_ended_reach_none() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert list(limits_reached(os.getpid())) == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert list(limits_reached(ended.pid)) == []
