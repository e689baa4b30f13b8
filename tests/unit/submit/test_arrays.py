"""A job for each value of a setting, as one job array."""

import json
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from tests.unit.submit.job_configs import spare

RATES = ("--array", "optimizer.learning_rate=1e-4,2e-4")


def test_an_array_has_a_folder_and_a_setting_for_each_of_its_jobs(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    output = spare("submit", *arguments, *RATES)
    assert f"spare logs {folder}/task-1    # optimizer.learning_rate=2e-4" in output
    assert "#SBATCH --array=0-1\n" in (folder / "job.sh").read_text()
    configs = [load_run_config(folder / f"task-{index}/config.toml").config for index in range(2)]
    assert [config.optimizer.learning_rate for config in configs] == [1e-4, 2e-4]
    assert [config.checkpoint.folder for config in configs] == [f"{folder}/task-{i}/checkpoints" for i in range(2)]
    assert [json.loads((folder / name / "job.json").read_text())["job_id"] for name in ("", "task-0", "task-1")] == [
        17,
        "17_0",
        "17_1",
    ]


def test_an_array_is_shown_and_cancelled_whole_or_by_its_jobs(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "job")
    spare("submit", *arguments, *RATES)
    (fake_slurm / "scontrol.out").write_text("JobId=18 JobState=PENDING Reason=Resources NodeList=(null)\n")
    shown = spare("status", folder)
    assert "task-0: optimizer.learning_rate=1e-4\njob 17_0: PENDING, reason Resources\ntask-1: " in shown
    status = json.loads(spare("status", folder, "--json"))
    assert (status["job_id"], status["tasks"]["task-1"]["job_id"]) == (17, "17_1")
    assert "job 17_1: PENDING" in spare("status", f"{folder}/task-1")
    assert "is that of a job array: name one of task-0, task-1 in it" in spare("logs", folder, expected=2)
    (tmp_path / "job/task-1/slurm.log").write_text("one\n")
    assert spare("logs", f"{folder}/task-1") == "one\n"
    spare("cancel", f"{folder}/task-1")
    spare("cancel", folder)
    assert (fake_slurm / "calls").read_text().splitlines()[-2:] == ["scancel 17_1", "scancel 17"]


def test_waiting_for_an_array_ends_with_the_highest_of_its_exit_codes(arguments: list[str], fake_slurm: Path) -> None:
    (fake_slurm / "scontrol").write_text(
        "#!/bin/sh\ncase $* in *17_0) code=4;; *17_1) code=3;; esac\n"
        'echo "JobState=FAILED ExitCode=$code:0 NodeList=(null)"\n'
    )
    spare("submit", *arguments, *RATES, "--wait", expected=4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--array", "train.seed"], "is not of the form KEY=V1,V2,..."),
        (["--array", "train.seed=1,,2"], "is not of the form"),
        (["--array", "train.seed=1,1"], "with different values"),
        (["--array", "train.sed=1,2"], "train.seed"),
        (["--array", "train.micro_batch_size=1,0"], "train.micro_batch_size=0 must be at least 1"),
        (["--array", "slurm.num_spare_nodes=1,2"], "varies what the batch script depends on"),
        (["--array", "train.seed=1,2", "--set", "checkpoint.folder=/ck"], "would be that of several jobs of --array"),
    ],
)
def test_an_array_that_cannot_be_is_refused_whole(
    arguments: list[str], fake_slurm: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    assert expected in spare("submit", *arguments, *words, expected=2)
    assert not (tmp_path / "job").exists()
    assert not (fake_slurm / "calls").exists()
