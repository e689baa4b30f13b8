"""Jobs of a real Slurm whose nodes are lost. They take minutes: `pytest tests/slurm --slurm`."""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.main import app
from spare_megatron.config.resolved import dump_run_config
from spare_megatron.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ControlConfig,
    LayoutConfig,
    ReduceConfig,
    SlurmConfig,
)
from spare_megatron.journal.check import check_journal
from spare_megatron.journal.files import read_journal
from tests.integration.etcd_cluster import ports_for_members
from tests.integration.whole_run import tiny_config

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

Order = Callable[..., None]
TIMEOUT_S = 400.0
NUM_STEPS = 1_000_000
"""More than are committed by the time at which the test has the run end."""


def test_a_job_outlives_a_step_and_its_first_node_and_proves_itself(
    cluster: Order, job: Callable[..., Path], tmp_path: Path
) -> None:
    """The first node has the batch script, the driver, a supervisor and a member of etcd."""
    folder = job(num_groups=4)
    run_dir = folder / "attempt-000"
    wait_until(folder, lambda: committed(run_dir, 1) > 0)
    assert "4 nodes, 0 problems, 0 warnings" in log_of(folder)
    slurm("scancel", f"{job_id(folder)}.{step_of(folder, 'node-2')}")
    # Its node is still in the job, and has room for another.
    wait_until(folder, lambda: "group 2 rejoined" in log_of(folder))
    cluster("off", "n1")
    wait_until(folder, lambda: "the driver is gone" in (run_dir / "logs/supervisor-1.log").read_text())
    before = committed(run_dir, 1)
    wait_until(folder, lambda: committed(run_dir, 1) > before + 3)
    slurm("scancel", "--signal=USR1", str(job_id(folder)))  # what Slurm sends before the time limit
    wait_until(folder, lambda: state_of(folder) not in ("RUNNING", "COMPLETING"))
    journal = read_journal(run_dir)
    verdict = check_journal(journal)
    assert verdict.verdict == "valid", verdict.reasons
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["groups_lost"], summary["groups_rejoined"]) == ("finished", 2, 1)
    assert state_of(folder) == "CANCELLED", "by the nodes that were left"


def test_a_spare_node_takes_the_place_of_a_lost_one_and_the_job_goes_on_after_its_time(
    cluster: Order, job: Callable[..., Path]
) -> None:
    folder = job(num_groups=3, spare_nodes=1, max_requeues=1)
    first, second = folder / "attempt-000", folder / "attempt-001"
    wait_until(folder, lambda: committed(first, 0) > 0)
    cluster("off", "n2")
    wait_until(folder, lambda: "group 1 rejoined" in log_of(folder))
    assert "started on n4" in (first / "logs/node-1.log").read_text()
    slurm("scancel", "--signal=USR1", str(job_id(folder)))  # what Slurm sends before the time limit
    wait_until(folder, lambda: (first / "summary.json").exists())
    summary = json.loads((first / "summary.json").read_text())
    assert (summary["outcome"], summary["verdict"]) == ("finished", "valid"), summary["reasons"]
    assert (summary["groups_lost"], summary["groups_rejoined"]) == (1, 1)
    cluster("on", "n2")
    wait_until(folder, lambda: state_of(folder) == "PENDING" or second.exists())
    slurm("scontrol", "update", f"JobId={job_id(folder)}", "StartTime=now")
    wait_until(folder, lambda: committed(second, 0) > 0)
    assert spare("cancel", str(folder)).startswith("job ")
    wait_until(folder, lambda: state_of(folder) == "CANCELLED")
    run = json.loads((second / "journal/driver.jsonl").read_text().splitlines()[0])
    assert run["first_step"] == summary["steps_committed"] > 0


def test_an_array_trains_each_of_its_jobs_by_itself(
    cluster: Order, text_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that has the number of the whole array."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=3)
    preset, folder = tmp_path / "preset.toml", tmp_path / "job"
    contained = SlurmConfig(doctor=True, container=("env",), step_options=("--quiet",))  # as containers are started
    preset.write_text(dump_run_config(dataclasses.replace(config, slurm=contained)))
    words = ("--config", str(preset), "--run-dir", str(folder), "--array", "train.seed=1,2,3", "--wait")
    spare("submit", *words)
    told = json.loads(spare("status", str(folder), "--json"))["tasks"]
    assert [job["state"] for job in told.values()] == ["COMPLETED"] * 3
    assert [job["runs"]["attempt-000"]["steps_committed"] for job in told.values()] == [3] * 3
    assert len({job["runs"]["attempt-000"]["final_loss"] for job in told.values()}) == 3
    for task in told:
        assert "1 node, 0 problems, 0 warnings" in (folder / task / "slurm.log").read_text()
        verdict = check_journal(read_journal(folder / task / "attempt-000"))
        assert verdict.verdict == "valid", verdict.reasons


@pytest.fixture
def job(
    cluster: Order, text_corpus: Path, etcd_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Submits a run with a group on each node; returns the job's folder."""
    monkeypatch.setenv("PATH", f"{etcd_binary.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def submit(*, num_groups: int, spare_nodes: int = 0, max_requeues: int = 0) -> Path:
        config = tiny_config(
            text_corpus,
            LayoutConfig(num_groups=num_groups),
            steps=NUM_STEPS,
            rejoins=3,
            cluster=ClusterConfig(device="cpu", num_nodes=num_groups),
        )
        config = dataclasses.replace(
            config,
            control=ControlConfig(store="etcd", heartbeat_interval_s=2.0),
            reduce=ReduceConfig(),
            checkpoint=CheckpointConfig(interval_steps=1000),
            slurm=SlurmConfig(
                num_spare_nodes=spare_nodes, etcd_port=ports_for_members(), max_requeues=max_requeues, doctor=True
            ),
        )
        preset = tmp_path / "preset.toml"
        preset.write_text(dump_run_config(config))
        spare("submit", "--config", str(preset), "--run-dir", str(tmp_path / "job"))
        return tmp_path / "job"

    return submit


def spare(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def job_id(folder: Path) -> int:
    return int(json.loads((folder / "job.json").read_text())["job_id"])


def state_of(folder: Path) -> str:
    return str(json.loads(spare("status", str(folder), "--json"))["state"])


def step_of(folder: Path, name: str) -> str:
    """The number of the job's step of this name."""
    lines = slurm("squeue", "--steps", "--noheader", "--format=%i %j", f"--jobs={job_id(folder)}").splitlines()
    (found,) = [line.split()[0] for line in lines if line.split()[1] == name]
    return found.partition(".")[2]


def log_of(folder: Path) -> str:
    file = folder / "slurm.log"
    return file.read_text() if file.exists() else ""


def committed(run_dir: Path, group: int) -> int:
    """Updates that the group has journaled."""
    file = run_dir / f"journal/group-{group:04d}-rank-0.jsonl"
    return file.read_text().count('"record":"update"') if file.exists() else 0


def wait_until(folder: Path, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s, log_of(folder)[-4000:]
        time.sleep(0.2)
