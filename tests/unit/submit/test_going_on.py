"""A job goes back into the queue, or is ended by the nodes that are left; other allocations are left alone."""

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.slurm.allocation import this_job
from spare_megatron.driver.slurm.batch_script import job_script
from spare_megatron.driver.slurm.steps import end_orphaned_job
from spare_megatron.journal.state.summary import Summary
from tests.unit.submit.job_configs import configured


@pytest.mark.parametrize(
    ("exit_code", "restarts", "state", "is_requeued"),
    [
        (0, 0, "RUNNING", False),
        (3, 0, "RUNNING", True),
        (5, 9, "RUNNING", True),
        (5, 10, "RUNNING", False),
        (4, 0, "RUNNING", False),
        (3, 0, "CANCELLED", False),
    ],
)
def test_a_job_goes_back_into_the_queue_when_there_is_more_to_train(
    fake_slurm: Path, tmp_path: Path, exit_code: int, restarts: int, state: str, is_requeued: bool
) -> None:
    """The script itself, with a Python that ends like a run."""
    for name, text in (
        ("python", f'#!/bin/sh\necho "$@" > {tmp_path}/run\nexit {exit_code}\n'),
        ("sleep", "#!/bin/sh\n"),
    ):
        (fake_slurm / name).write_text(text)
        (fake_slurm / name).chmod(0o755)
    (fake_slurm / "scontrol.out").write_text(f"JobId=17 JobState={state}\n")
    script = job_script(configured(), folder=tmp_path, working_folder=tmp_path, python=fake_slurm / "python")
    environment = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == exit_code, done.stderr
    calls = (fake_slurm / "calls").read_text() if (fake_slurm / "calls").exists() else ""
    assert ("scontrol requeue 17" in calls) == is_requeued
    assert f"--run-dir {tmp_path}/attempt-{restarts:03d} --resume" in (tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("wants_more", "restarts", "call"),
    [(False, "0", "scancel 17"), (True, "0", "scontrol requeue 17"), (True, "2", "scancel 17")],
)
def test_nodes_without_a_batch_script_end_the_job_or_send_it_back(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch, wants_more: bool, restarts: str, call: str
) -> None:
    for name, value in (("SLURM_JOB_ID", "17"), ("SLURM_RESTART_COUNT", restarts), ("SPARE_REQUEUES", "2")):
        monkeypatch.setenv(name, value)
    end_orphaned_job(wants_more=wants_more)
    assert (fake_slurm / "calls").read_text() == f"{call}\n"


def test_a_job_of_an_array_ends_itself_alone(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of one of them is that of the whole array."""
    for name, value in (("JOB_ID", "17"), ("ARRAY_JOB_ID", "17"), ("ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SPARE_REQUEUES", "0")
    end_orphaned_job(wants_more=False)
    assert (fake_slurm / "calls").read_text() == "scancel 17_2\n"
    assert this_job() == "17_2"


def test_outside_of_a_job_there_is_none_to_end(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    end_orphaned_job(wants_more=True)
    assert not (fake_slurm / "calls").exists()


def test_outside_of_a_job_steps_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="of a Slurm job, and this process is in none: use `spare submit`"):
        this_job()


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an `salloc`."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SPARE_REQUEUES", raising=False)


@pytest.mark.parametrize("wants_more", [True, False])
def test_an_allocation_that_no_script_of_ours_runs_in_is_left_alone(
    fake_slurm: Path, allocation: None, wants_more: bool
) -> None:
    end_orphaned_job(wants_more=wants_more)
    assert not (fake_slurm / "calls").exists()


@pytest.mark.parametrize(("launcher", "calls"), [("hand", None), ("srun", "scancel 17\n")])
def test_a_node_ends_the_job_only_if_the_job_has_started_it(
    fake_slurm: Path,
    allocation: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    calls: str | None,
) -> None:
    """The driver was lost, and nodes started by hand in a batch script of the user's own ended that."""
    monkeypatch.setenv("SPARE_REQUEUES", "0")  # as in a job of ours, and a run by hand within it
    config = load_run_config(None, [f"cluster.launcher={launcher}"]).config
    ended = Summary(verdict="valid", reasons=(), outcome="finished", outcome_reason="", steps_committed=1)
    monkeypatch.setattr(
        "spare_megatron.supervisor.node_process.look_after_node", lambda run_dir, node, wait_s: (ended, config)
    )

    class Ended(BaseException):
        """Instead of the end of this process."""

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process goes on
    with pytest.raises(Ended):
        CliRunner().invoke(app, ["supervise", str(tmp_path), "--node", "1"], catch_exceptions=False)
    written = fake_slurm / "calls"
    assert (written.read_text() if written.exists() else None) == calls
