"""Limits the processors of a node's ranks by a quota of the kernel's CPU controller, so that a fault can slow a host.

Control groups of version 2 (cgroup-v2.rst, `cpu.max`), or of version 1 where the controller is mounted there
(sched-bwc.rst). Needs root.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = "spare-quota-"
_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1_000  # the kernel's


@dataclass(frozen=True, slots=True)
class CpuController:
    """Where the CPU controller is mounted, and by which file it takes a quota."""

    mount: Path
    is_version_2: bool


def find_controller(mounts: str) -> CpuController | None:
    """The CPU controller, by the text of /proc/mounts; None if none is mounted."""
    for line in mounts.splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(Path(folder), is_version_2=False)
        if kind == "cgroup2":
            controllers = Path(folder) / "cgroup.controllers"
            with contextlib.suppress(OSError):
                if "cpu" in controllers.read_text().split():
                    return CpuController(Path(folder), is_version_2=True)
    return None


def why_no_quota() -> str:
    """Why this process cannot limit the processors of others; empty if it can. Makes a group, and removes it."""
    try:
        ProcessorQuota(os.getpid(), 1.0).close()
    except OSError as error:
        return str(error)
    return ""


class ProcessorQuota:
    """A control group whose processes share this many processors, named after the process that makes it, `owner`.
    Raises OSError if it cannot be made. `close` moves the processes back to the top group, which lifts the limit.
    """

    def __init__(self, owner: int, num_processors: float) -> None:
        controller = find_controller(Path("/proc/mounts").read_text())
        if controller is None:
            raise OSError("no CPU controller of control groups is mounted")
        self._mount = controller.mount
        self._folder = controller.mount / f"{_NAME}{owner}"
        _remove_left(self._mount)
        quota_us = max(_LEAST_QUOTA_US, round(num_processors * _PERIOD_US))
        if controller.is_version_2:
            (self._mount / "cgroup.subtree_control").write_text("+cpu")
        self._folder.mkdir()
        try:
            if controller.is_version_2:
                (self._folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (self._folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError:
            self._folder.rmdir()
            raise

    def limit(self, pids: Iterable[int]) -> None:
        """Limits these processes, as far as they are still there, and those that they start from now on."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def num_throttled(self) -> int:
        """Periods in which its processes had to wait."""
        fields = (line.split() for line in (self._folder / "cpu.stat").read_text().splitlines())
        return next(int(value) for name, value in fields if name == "nr_throttled")

    def close(self) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (self._mount / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # a process that is ending is still in it
            self._folder.rmdir()


def _remove_left(mount: Path) -> None:
    """Removes the groups of processes that were killed before they could."""
    for folder in mount.glob(f"{_NAME}*"):
        if not Path(f"/proc/{folder.name.removeprefix(_NAME)}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
