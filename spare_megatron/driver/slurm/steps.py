"""The steps of a job: srun commands, the launcher of supervisors, and the end of a job without its batch script."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spare_megatron.config.schema import SlurmConfig
from spare_megatron.driver.slurm.allocation import Claims, choose_node, nodes_of
from spare_megatron.driver.slurm.slurm_commands import JobId, call, cancel, own_job
from spare_megatron.process.processes import say


def end_orphaned_job(*, wants_more: bool) -> None:
    """Ends the job of this step, whose batch script was lost with its node; every remaining node calls this, the first
    has an effect. Requeues it if steps (`wants_more`) and requeues are left, else cancels it.
    """
    job_id, requeues = own_job(), os.environ.get("SPARE_REQUEUES", "")
    if job_id is None or not requeues.isdigit():  # only the script of `spare submit` says how often
        return
    num_left = int(requeues) - int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with contextlib.suppress(ValueError):
        call("scontrol", "requeue", str(job_id)) if wants_more and num_left > 0 else cancel(job_id)


def step_command(name: str, on: str, command: Sequence[str]) -> tuple[str, ...]:
    """The srun command that runs once on this node, beside other steps, and survives the loss of other nodes."""
    options = (
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={on}",
        f"--job-name={name}",
        "--overlap",
        "--no-kill",
        "--mem=0",
        "--cpu-bind=none",
        "--input=none",
    )
    return ("srun", *options, *command)


def node_step(slurm: SlurmConfig, name: str, on: str, words: Sequence[str], job: str | None = None) -> tuple[str, ...]:
    """The srun command of a step `name` that runs a `spare` command on this node, in the container if any; of this
    `job`.
    """
    command = (*slurm.container, slurm.python or sys.executable, "-P", "-m", "spare_megatron", *words)
    srun, *rest = step_command(name, on, command)
    return (srun, *(() if job is None else (f"--jobid={job}",)), *slurm.step_options, *rest)


def start_step(step: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Starts a step with its output in the file."""
    with log.open("wb") as file:
        return subprocess.Popen(step, start_new_session=True, stdout=file, stderr=file)


@dataclass(slots=True)
class SrunLauncher:
    """Starts the supervisors of one run as steps of its job. `job_id`: the job that the driver belongs to. `nodes`: the
    Slurm nodes that the run begins on, in the order of its own.
    """

    job_id: JobId
    slurm: SlurmConfig
    nodes: tuple[str, ...]
    replaces: bool = True
    _held: str = field(default="", init=False)
    _last: str = field(default="", init=False)

    def lacks(self, node: int) -> bool:
        return node >= len(self.nodes)

    def start(self, run_dir: Path, node: int, incarnation: int) -> subprocess.Popen[bytes] | None:
        """Starts the supervisor with srun. Returns None if no node is free now."""
        name = self._choose(run_dir, node, incarnation)
        if name is None:
            return None
        say(f"node {node}: its supervisor is started on {name}")
        step = node_step(self.slurm, f"node-{node}", name, ("supervise", str(run_dir), "--node", str(node)))
        return subprocess.Popen(step, start_new_session=True)

    def release(self, run_dir: Path, node: int) -> None:  # noqa: ARG002  (it knows what it has taken)
        if self._held:
            Claims(run_dir).release(self._held)
            self._last, self._held = self._held, ""

    def _choose(self, run_dir: Path, node: int, incarnation: int) -> str | None:
        claims = Claims(run_dir)
        name = self.nodes[node] if incarnation == 0 else choose_node(nodes_of(self.job_id), claims.taken(), self._last)
        if name is None or not claims.claim(name, node):
            return None
        self._held = name
        return name
