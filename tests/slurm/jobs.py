"""A cluster, a job on it, and what is asked of both."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from spare_megatron.cli.main import app
from spare_megatron.slurm.commands import job_fields

TIMEOUT_S = 250.0
NUM_STEPS = 1_000_000
"""More than are committed by the time at which a test has the run end."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes n1, n2 ... of a Slurm that runs.

    Attributes:
        folder: Of its files.
        order: Runs cluster.sh on it.
    """

    folder: Path
    order: Callable[..., None]

    def power_off(self, node: str) -> None:
        """The node is lost with all that runs on it. Slurm is not told."""
        self.order("off", node)

    def power_on(self, node: str) -> None:
        """The node starts."""
        self.order("on", node)

    def mark_down(self, node: str) -> None:
        """Slurm is told that the node is lost, before it finds out."""
        slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def processes(self) -> list[str]:
        """What runs on nodes, beside Slurm's own daemon."""
        roots = [psutil.Process(int(file.read_text())) for file in (self.folder / "run").glob("n*.pid")]
        return [
            " ".join(process.cmdline())
            for root in roots
            for process in root.children(recursive=True)
            if process.name() != "slurmd" and process.status() != psutil.STATUS_ZOMBIE
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that has been submitted.

    Attributes:
        folder: What `spare submit` has made.
    """

    folder: Path

    @property
    def number(self) -> int:
        return int(json.loads((self.folder / "job.json").read_text())["job_id"])

    @property
    def state(self) -> str:
        return job_fields(self.number)["JobState"]

    @property
    def is_over(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "COMPLETING")

    @property
    def log(self) -> str:
        return text_of(self.folder / "slurm.log")

    def run(self, attempt: int = 0) -> Path:
        """The directory of the run that is the job's first, second ... time out of the queue."""
        return self.folder / f"attempt-{attempt:03d}"

    def summary(self, attempt: int = 0) -> dict[str, Any]:
        """Of a run that has ended."""
        return dict(json.loads((self.run(attempt) / "summary.json").read_text()))

    def signal_end(self) -> None:
        """What Slurm sends before the time limit."""
        slurm("scancel", "--signal=USR1", str(self.number))

    def limit_time(self) -> None:
        """From now on Slurm lets it run for two or three minutes."""
        hours, minutes, _ = map(int, job_fields(self.number)["RunTime"].split(":"))
        slurm("scontrol", "update", f"JobId={self.number}", f"TimeLimit={60 * hours + minutes + 3}")

    def start_now(self) -> None:
        """Slurm keeps a job that is back in the queue waiting for two minutes."""
        slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def cancel_step(self, name: str) -> None:
        """Ends the step of this name, with all that it has started."""
        lines = slurm("squeue", "--steps", "--noheader", "--format=%i %j", f"--jobs={self.number}").splitlines()
        (found,) = [line.split()[0] for line in lines if line.split()[1] == name]
        slurm("scancel", found)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Raises AssertionError with the end of the job's log if it does not come to be so."""
        end_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < end_s, f"{self.state}: {self.log[-4000:]}"
            time.sleep(_POLL_S)


def spare(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def text_of(file: Path) -> str:
    """Empty before there is any."""
    return file.read_text() if file.exists() else ""


def num_records(run_dir: Path, group: int, record: str) -> int:
    """Records of a kind that the group's first rank has journaled."""
    return text_of(run_dir / f"journal/group-{group:04d}-rank-0.jsonl").count(f'"record":"{record}"')
