"""Limits of processes, what a process lacks, and time without a processor."""

import errno
import multiprocessing.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.checks.validate import MachineResources, ProcessLimits, limit_problems, open_files_needed
from spare_megatron.config.schema import ClusterConfig, ControlConfig, LayoutConfig, RunConfig
from spare_megatron.driver import run
from spare_megatron.machine.machine_signs import UnstarvedClock, unstarved_clock
from spare_megatron.machine.processor_quota import CpuController, ProcessorQuota, find_controller, why_no_quota
from spare_megatron.process.shortages import limits_reached, process_limits, shortage_in

ENOUGH = ProcessLimits(open_files=1 << 20, open_files_most=1 << 20)
GIB = 2**30


def config_of(num_groups: int = 4, pipeline: int = 1, launcher: str = "local", store: str = "embedded") -> RunConfig:
    return RunConfig(
        layout=LayoutConfig(num_groups=num_groups, pipeline_parallel=pipeline),
        cluster=ClusterConfig(device="cpu", launcher=launcher, num_nodes=num_groups if launcher != "local" else 1),  # type: ignore[arg-type]
        control=ControlConfig(store=store),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (
            replace(ENOUGH, open_files=64),
            "64 files open, and the processes of 4 groups need 276; raise it by `ulimit -n 2",
        ),
        (replace(ENOUGH, open_files=64, open_files_most=64), "limits.conf, as root, and `ulimit -n 276`"),
        (
            replace(ENOUGH, address_space_bytes=GIB),
            "1 GiB of address space, and a rank needs 2.75 GiB; raise it by `u",
        ),
        (replace(ENOUGH, file_bytes=20 << 10), "files of 20.5 kB, and a run needs 1.09 GB; raise it by `ulimit -f unl"),
        (replace(ENOUGH, temp_folder="/" + "t" * 75), "has 76 bytes, and a socket in it may have 75: set TMPDIR"),
    ],
)
def test_a_limit_that_is_exceeded_is_named_with_the_value_and_the_command(limits: ProcessLimits, named: str) -> None:
    [problem] = limit_problems(config_of(), limits, rank_bytes=GIB)
    assert named in problem


def test_processes_within_their_limits_are_no_problem() -> None:
    limits = ProcessLimits(open_files=276, open_files_most=276, address_space_bytes=3 * GIB, temp_folder="/" + "t" * 74)
    assert list(limit_problems(config_of(), limits, rank_bytes=GIB)) == []
    assert list(limit_problems(config_of(), replace(limits, address_space_bytes=1), rank_bytes=0)) == []


@given(
    st.integers(2, 400), st.integers(1, 8), st.sampled_from(["local", "hand"]), st.sampled_from(["embedded", "etcd"])
)
def test_more_ranks_never_need_fewer_files_and_what_was_measured_is_enough(
    num_groups: int, pipeline: int, launcher: str, store: str
) -> None:
    """Measured on one machine: a rank has 40 files, one for each group, and 5 for each rank that started before it."""
    config = config_of(num_groups, pipeline, launcher, store)
    num_here = num_groups * pipeline if launcher == "local" else pipeline
    assert open_files_needed(config) >= 40 + num_groups + 5 * num_here
    assert open_files_needed(config_of(num_groups + 1, pipeline, launcher, store)) >= open_files_needed(config)


def test_the_longest_folder_of_temporary_files_is_one_in_which_python_can_open_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts what Python adds, of which it is no part of the interface how much."""
    folder = "/tmp/" + "t" * 70
    assert list(limit_problems(config_of(), replace(ENOUGH, temp_folder=folder))) == []
    inside = os.path.join(tempfile.mkdtemp(prefix="pymp-", dir=tmp_path), "listener-")
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: os.path.dirname(inside))
    added = len(connection.arbitrary_address("AF_UNIX")) - len(str(tmp_path))
    assert len(folder) + added == 107


def test_a_run_beyond_the_limits_is_refused_in_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(process_limits(), open_files=64, open_files_most=64)
    machine = MachineResources(num_gpus=0, num_cores=2, has_corpus=True, limits=limits)
    monkeypatch.setattr(run, "look_at_machine", lambda config, on_read: machine)
    monkeypatch.setattr(run, "resolved", lambda config, machine: config)
    with pytest.raises(ValueError, match=r"^a process may have 64 files open, [^\n]*`ulimit -n 276`[^\n]*$"):
        run.start_run(config_of(), tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()


def raised_from(error: Exception) -> RuntimeError:
    outer = RuntimeError("a connection could not be built")
    outer.__cause__ = error
    return outer


@pytest.mark.timeout(60)
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
        (RuntimeError("CUDA error: out of memory"), "the GPU lacks memory for communicators; lower train.micro"),
        (RuntimeError("NCCL error\nCuda failure 2 'out of memory'"), "the GPU lacks memory for communicators"),
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


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("by_memory", "remedy"), [(False, "`ulimit -n`"), (True, "`ulimit -v`")])
def test_an_error_that_hides_its_cause_is_explained_by_the_limit_that_is_reached(by_memory: bool, remedy: str) -> None:
    script = HIDDEN.format(by_memory=by_memory)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert remedy in done.stdout


@pytest.mark.timeout(60)
def test_a_process_with_room_below_its_limits_and_one_that_has_ended_reach_none() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert list(limits_reached(os.getpid())) == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert list(limits_reached(ended.pid)) == []


_BUSY = """
import sys
print("up", flush=True)
while True:
    pass
"""


def version_2(folder: Path, controllers: str) -> str:
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(controllers)
    return f"cgroup2 {folder} cgroup2 rw 0 0\n"


@pytest.mark.timeout(60)
def test_the_controller_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    hybrid = version_2(tmp_path / "empty", "hugetlb") + "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
    assert find_controller(hybrid) == CpuController(Path("/sys/fs/cgroup/cpu,cpuacct"), is_version_2=False)
    unified = "proc /proc proc rw 0 0\n" + version_2(tmp_path / "all", "cpuset cpu io")
    assert find_controller(unified) == CpuController(tmp_path / "all", is_version_2=True)
    assert find_controller("cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n") is None


@pytest.mark.timeout(60)
@pytest.mark.skipif(bool(why_no_quota()), reason=why_no_quota())
def test_a_process_with_a_tenth_of_a_processor_waits_for_it_and_not_after_the_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE)
    quota = ProcessorQuota(os.getpid(), 0.1)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        quota.limit([child.pid, 2**22 + 1])  # and one that has ended
        while quota.num_throttled < 5:
            time.sleep(0.01)
        quota.close()
        assert f"spare-quota-{os.getpid()}" not in Path(f"/proc/{child.pid}/cgroup").read_text()
    finally:
        child.kill()
        child.wait()


@pytest.mark.timeout(60)
@pytest.mark.skipif(bool(why_no_quota()), reason=why_no_quota())
def test_groups_of_processes_that_were_killed_are_removed() -> None:
    controller = find_controller(Path("/proc/mounts").read_text())
    assert controller is not None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = controller.mount / f"spare-quota-{ended.pid}"
    left.mkdir()
    ProcessorQuota(os.getpid(), 1.0).close()
    assert not left.exists()


MS = 1_000_000


def test_a_wait_between_its_two_readings_does_not_turn_the_clock_back() -> None:
    """A pass that ended in such a wait lasted a negative time, and the group was lost over it."""
    waited_ns = iter([0, 0, 0, 80 * MS, 80 * MS])
    now_s = iter([10.0, 10.02, 10.1])
    clock = UnstarvedClock(lambda: next(waited_ns), lambda: next(now_s))
    assert clock() == 10.0
    assert abs(clock() - 10.02) < 1e-9  # 10.1 less the wait of 0.08


def test_it_never_falls_though_the_kernels_clocks_differ() -> None:
    waited_ns = iter([0, 0, 21 * MS, 21 * MS])
    now_s = iter([10.0, 10.02])
    clock = UnstarvedClock(lambda: next(waited_ns), lambda: next(now_s))
    assert [clock(), clock()] == [10.0, 10.0]


def test_this_kernel_counts_waits() -> None:
    clock = unstarved_clock()
    assert isinstance(clock, UnstarvedClock)
    assert clock() <= clock()
