"""Processes that share a part of a processor, by the kernel's own quota."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spare_megatron.machine.processor_quota import CpuController, ProcessorQuota, find_controller, why_no_quota

pytestmark = pytest.mark.timeout(60)

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


def test_the_controller_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    hybrid = version_2(tmp_path / "empty", "hugetlb") + "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
    assert find_controller(hybrid) == CpuController(Path("/sys/fs/cgroup/cpu,cpuacct"), is_version_2=False)
    unified = "proc /proc proc rw 0 0\n" + version_2(tmp_path / "all", "cpuset cpu io")
    assert find_controller(unified) == CpuController(tmp_path / "all", is_version_2=True)
    assert find_controller("cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n") is None


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
