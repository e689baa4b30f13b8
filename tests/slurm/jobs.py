"""A cluster, a job on it, and what is asked of both."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import FaultConfig
from spare_megatron.driver.slurm.slurm_commands import job_fields
from spare_megatron.faults.points import FaultPoint

TIMEOUT_S = 250.0
NUM_STEPS = 1_000_000
"""More than are committed by the time at which a test has the run end."""
TIME_LIMIT_MINUTES = 60
END_BEFORE_LIMIT_S = 240
"""More than the busiest machine needs to end a run."""
_PAUSE_S = 0.3
_NUM_PAUSES = 400
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
        """The node is lost with all that runs on it. Slurm is not notified."""
        self.order("off", node)

    def power_on(self, node: str) -> None:
        """The node starts."""
        self.order("on", node)

    def mark_down(self, node: str) -> None:
        """Notifies Slurm that the node is lost, before Slurm finds out."""
        slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def processes(self) -> list[str]:
        """What runs on nodes, beside Slurm's own daemon."""
        found = []
        for file in (self.folder / "run").glob("n*.pid"):
            for process in psutil.Process(int(file.read_text())).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it is ending just now
                    if process.name() != "slurmd" and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(" ".join(process.cmdline()))
        return found


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
        """Slurm is to end it so soon that the signal before that comes within 30 s, at its next look at time limits."""
        slurm("scontrol", "update", f"JobId={self.number}", f"EndTime=now+{END_BEFORE_LIMIT_S + 30}")

    def start_now(self) -> None:
        """Slurm keeps a job that is back in the queue waiting for two minutes, and its time short."""
        slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now+2", f"TimeLimit={TIME_LIMIT_MINUTES}")

    def cancel_step(self, name: str) -> None:
        """Ends the newest step of this name, with all that it has started."""
        lines = slurm("squeue", "--steps", "--noheader", "--format=%i %j", f"--jobs={self.number}").splitlines()
        found = [line.split()[0] for line in lines if line.split()[1] == name]
        slurm("scancel", max(found, key=lambda step: int(step.partition(".")[2])))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Raises AssertionError with the end of the job's log if it does not come to be so."""
        end_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < end_s, f"{self.state}: {self.log[-4000:]}"
            time.sleep(_POLL_S)


def pauses(group: int, num_steps: int) -> list[FaultConfig]:
    """Of the group in each of the first steps: a run waits for what Slurm does, and is not to take the processors."""
    return [
        FaultConfig(phase=FaultPoint.FORWARD, step=step, group=group, rank=0, kind="hang", seconds=_PAUSE_S)
        for step in range(min(num_steps, _NUM_PAUSES))
    ]


def spare(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def verdict_of(run_dir: Path) -> dict[str, Any]:
    """What `spare check` says of the run, whatever it is."""
    return dict(json.loads(CliRunner().invoke(app, ["check", str(run_dir), "--json"]).stdout))


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def text_of(file: Path) -> str:
    """Empty before there is any."""
    return file.read_text() if file.exists() else ""


def num_records(run_dir: Path, group: int, record: str, rank: int = 0) -> int:
    """Records of a kind that a rank of the group has journaled, in all its incarnations."""
    files = (run_dir / "journal").glob(f"group-{group:04d}-rank-{rank}[.-]*")
    return sum(file.read_text().count(f'"record":"{record}"') for file in files)
