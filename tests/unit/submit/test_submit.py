"""`spare submit` and the commands that follow it; those of Slurm only write down how they were called."""

import json
import os
import sys
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.machine.lock import locked
from tests.unit.submit.job_configs import CONFIGS, spare


def test_a_dry_run_prints_the_script_and_leaves_nothing(arguments: list[str], fake_slurm: Path, tmp_path: Path) -> None:
    output = spare("submit", *arguments, "--dry-run")
    assert "#SBATCH --nodes=17" in output
    assert not (tmp_path / "job").exists()
    assert not (fake_slurm / "calls").exists()


def test_submitting_writes_the_folder_and_hands_the_script_over(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    spare("submit", *arguments)
    assert (fake_slurm / "calls").read_text().splitlines() == [
        "scontrol --oneliner show partition",
        f"sbatch --parsable {folder / 'job.sh'}",
    ]
    assert json.loads((folder / "job.json").read_text()) == {"job_id": 17}
    config = load_run_config(folder / "config.toml").config
    assert (config.cluster.launcher, config.checkpoint.folder) == ("srun", str(folder / "checkpoints"))
    assert sys.executable in (folder / "job.sh").read_text()


def test_a_folder_that_holds_something_is_left_alone(arguments: list[str], fake_slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/mine").touch()
    assert "is not empty" in spare("submit", *arguments, expected=2)
    assert not (fake_slurm / "calls").exists()
    assert (tmp_path / "job/mine").exists()


def test_a_second_job_in_the_folder_of_a_first_is_refused_with_what_that_is_doing(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    spare("submit", *arguments)
    (fake_slurm / "scontrol.out").write_text("JobId=17 JobState=RUNNING Reason=None NodeList=n1\n")
    output = spare("submit", *arguments, expected=2)
    assert f"--run-dir {tmp_path / 'job'} is that of job 17, which is RUNNING" in output
    assert (fake_slurm / "calls").read_text().count("sbatch") == 1


def test_what_slurm_refuses_leaves_nothing_and_may_be_tried_again(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    (fake_slurm / "sbatch.err").write_text("sbatch: error: invalid partition specified: h100\n")
    spare("submit", *arguments, expected=2)
    assert not (tmp_path / "job").exists()
    (tmp_path / "job").mkdir()
    spare("submit", *arguments, expected=2)
    assert list((tmp_path / "job").iterdir()) == []
    (fake_slurm / "sbatch.err").unlink()
    spare("submit", *arguments)


@pytest.mark.parametrize("setting", ["--run-dir", "checkpoint.folder"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_queued(
    arguments: list[str], fake_slurm: Path, tmp_path: Path, setting: str
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file/below")
    words = ["--run-dir", folder] if setting == "--run-dir" else ["--set", f"checkpoint.folder={folder}"]
    output = spare("submit", *arguments, *words, expected=2)
    assert f"{setting} {folder} cannot be made: {tmp_path / 'file'} is a file; choose another" in output
    assert not (fake_slurm / "calls").exists()


def test_a_folder_that_is_not_ones_own_is_refused(
    arguments: list[str], fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    output = spare("submit", *arguments, expected=2)
    assert f"--run-dir {tmp_path / 'job'} cannot be written: {tmp_path} is not yours to write" in output


def test_checkpoints_that_another_run_is_writing_are_reported(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    """No more than a warning: the job may be meant to wait for that run."""
    with locked(tmp_path / "ck"):
        output = spare("submit", *arguments, "--set", f"checkpoint.folder={tmp_path / 'ck'}")
    assert f"warning: checkpoint.folder: {tmp_path / 'ck'} is in use by process {os.getpid()}" in output


def test_another_cluster_wins_over_that_of_the_run(arguments: list[str], fake_slurm: Path) -> None:
    """The demo on the nodes of a cluster: its values count, and what it does not say is the run's."""
    words = ["--config", str(CONFIGS / "run/demo_cpu.toml"), *arguments[2:]]
    output = spare("submit", *words, "--cluster", str(CONFIGS / "cluster/h100.toml"), "--dry-run")
    assert "#SBATCH --partition=h100" in output
    assert "#SBATCH --job-name=demo_cpu" in output


def test_without_slurm_one_line_says_what_to_do(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not in PATH: run this on a login node" in spare("submit", *arguments, expected=2)
    assert not (tmp_path / "job").exists()


def test_a_partition_that_slurm_does_not_know_is_explained(arguments: list[str], fake_slurm: Path) -> None:
    (fake_slurm / "sbatch.err").write_text("sbatch: error: invalid partition specified: h100\n")
    output = spare("submit", *arguments, expected=2)
    assert "invalid partition specified: h100" in output
    assert "correct slurm.partition" in output


def test_waiting_ends_with_the_exit_code_of_the_job(arguments: list[str], fake_slurm: Path) -> None:
    (fake_slurm / "scontrol.out").write_text("JobId=17 JobState=FAILED Reason=None ExitCode=4:0 NodeList=(null)\n")
    spare("submit", *arguments, "--wait", expected=4)


def test_a_job_is_shown_by_its_folder_and_cancelled(arguments: list[str], fake_slurm: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "job")
    spare("submit", *arguments)
    (fake_slurm / "scontrol.out").write_text("JobId=17 JobState=PENDING Reason=Resources NodeList=(null)\n")
    assert "job 17: PENDING, reason Resources" in spare("status", folder)
    shown = json.loads(spare("status", folder, "--json"))
    assert (shown["job_id"], shown["state"], shown["runs"]) == (17, "PENDING", {})
    assert "slurm.log is not there: the job has not started" in spare("logs", folder, expected=2)
    (tmp_path / "job/slurm.log").write_text("one\ntwo\nthree\n")
    assert spare("logs", folder, "--lines", "2") == "two\nthree\n"
    assert "no log of group 1" in spare("logs", folder, "1", expected=2)
    log = tmp_path / "job/attempt-001/logs/group-0001-rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("a rank\n")
    assert spare("logs", folder, "1") == "a rank\n"
    spare("cancel", folder)
    assert (fake_slurm / "calls").read_text().splitlines()[-1] == "scancel 17"


def test_a_folder_of_no_job_is_recognized(tmp_path: Path, fake_slurm: Path) -> None:
    assert "no job.json, as the folder of a job does" in spare("status", str(tmp_path), expected=2)
