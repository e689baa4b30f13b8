"""Supervisors in processes of their own, as on other machines, started by what stands for them."""

import multiprocessing
import os
import subprocess
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from spare_megatron.process.processes import die_with
from spare_megatron.supervisor.node_process import look_after_node

START_S = 60.0


class Forked:
    """A supervisor's process, as `subprocess.Popen` would show it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.terminate, self.kill = process.terminate, process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("supervisor", timeout_s)
        return self._process.exitcode


@dataclass(frozen=True)
class Forks:
    """Starts supervisors, and others in the place of lost ones, from the process that stands for them."""

    replaces: bool = True

    def lacks(self, node: int) -> bool:
        return False

    def start(self, run_dir: Path, node: int, incarnation: int) -> Forked | None:
        process = multiprocessing.get_context("fork").Process(target=supervise, args=(os.getpid(), run_dir, node))
        process.start()
        return Forked(process)

    def release(self, run_dir: Path, node: int) -> None:
        """There is nothing to be given back."""


@dataclass(frozen=True)
class LateForks(Forks):
    """Starts no supervisor in the place of a lost one before a file is there."""

    may_come: Path = Path()

    def start(self, run_dir: Path, node: int, incarnation: int) -> Forked | None:
        return None if incarnation and not self.may_come.exists() else super().start(run_dir, node, incarnation)


def supervise(remote_supervisor_pid: int, run_dir: Path, node: int) -> None:
    die_with(remote_supervisor_pid)
    look_after_node(run_dir, node, START_S)
    os._exit(0)  # a thread may be waiting for the store
