"""Supervisors as steps of a job: one on each node, and another where one is lost."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spare_megatron.slurm.allocation import Claims, choose_node, nodes_of
from spare_megatron.slurm.commands import JobId


def step_command(name: str, on: str, command: Sequence[str]) -> tuple[str, ...]:
    """The srun that runs a command once, on this node of the job.

    The step shares the node with others of the job, has all of it, and survives the loss of other nodes.
    """
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


@dataclass(slots=True)
class SrunLauncher:
    """Starts the supervisors of one run.

    Attributes:
        job_id: The job that the driver belongs to.
        python: The Python that has spare_megatron, on every node.
    """

    job_id: JobId
    python: str
    replaces: bool = True
    _last: str = field(default="", init=False)

    def start(self, run_dir: Path, node: int, life: int) -> subprocess.Popen[bytes] | None:
        """The srun of the supervisor; None if no node is free for it now.

        Raises:
            ValueError: The job has fewer nodes than the run.
        """
        name = self._choose(run_dir, node, life)
        if name is None:
            return None
        print(f"node {node}: its supervisor is started on {name}", flush=True)
        command = (self.python, "-m", "spare_megatron.cli.main", "supervise", str(run_dir), "--node", str(node))
        return subprocess.Popen(step_command(f"node-{node}", name, command), start_new_session=True)

    def ended(self, run_dir: Path, node: int) -> None:
        """The node of Slurm is free for others."""
        self._last = Claims(run_dir).leave(node) or self._last

    def _choose(self, run_dir: Path, node: int, life: int) -> str | None:
        present, claims = nodes_of(self.job_id), Claims(run_dir)
        if life == 0:
            if node >= len(present):
                raise ValueError(f"job {self.job_id} has {len(present)} nodes, too few for node {node} of the run")
            name = present[node]
        else:
            name = choose_node(present, claims.taken(), self._last) or ""
        return name if name and claims.take(name, node) else None
