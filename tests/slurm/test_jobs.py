"""Jobs of a real Slurm that come to their end, or back into the queue."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.loader import dump_run_config, load_run_config
from spare_megatron.config.schema import ControlConfig, FaultsConfig, LayoutConfig, SlurmConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.journal.files import read_journal
from tests.integration.etcd_cluster import ports_for_members
from tests.integration.whole_run import CPU, complete_run, losses_of, tiny_config
from tests.slurm.jobs import (
    END_BEFORE_LIMIT_S,
    TIME_LIMIT_MINUTES,
    Cluster,
    Job,
    num_records,
    slurm,
    spare,
    text_of,
    verdict_of,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIGS = Path(__file__).parents[2] / "configs"
PREEMPTED_STEPS = 40
"""More than are committed before a job that preempts another one has its nodes three times."""


def test_the_demo_as_a_job_loses_two_groups_and_proves_itself(
    start_cluster: Callable[..., Cluster], can_submit: None, text_corpus: Path, tmp_path: Path
) -> None:
    """Started as in a container, on nodes that are looked at first. Each of two racks has two of the four groups."""
    cluster = start_cluster(3, 3)
    settings = (
        f"data.corpus={text_corpus}",
        "train.steps=24",
        "cluster.num_nodes=2",
        "slurm.num_spare_nodes=1",
        "control.store=etcd",
        f"slurm.etcd_port={ports_for_members()}",
        "slurm.doctor=true",
        "slurm.max_requeues=0",
        'slurm.container=["env"]',
        'slurm.step_options=["--quiet"]',
    )
    words = [word for setting in settings for word in ("--set", setting)]
    preset, folder = CONFIGS / "run/demo_cpu.toml", tmp_path / "job"
    spare("submit", "--config", str(preset), "--run-dir", str(folder), *words, "--wait")
    job = Job(folder=folder)
    assert "3 nodes, 0 problems" in job.log  # the spare one, too
    warning = "warning: rack rack1 has 2 groups (0, 1), and with spare.groups_per_domain=1 all hosts of a"
    assert warning in job.log
    assert job.state == "COMPLETED"
    assert spare("check", str(job.run())).startswith("valid: 24 steps")
    assert job.summary()["groups_lost"] == 2
    job.wait_until(lambda: cluster.processes() == [])


def test_a_job_goes_on_after_its_time_and_after_a_wipe_out_on_other_nodes_until_it_is_cancelled(
    start_cluster: Callable[..., Cluster], submit: Callable[..., Job]
) -> None:
    cluster = start_cluster(3)
    limits = SlurmConfig(max_requeues=2, time_limit_minutes=TIME_LIMIT_MINUTES, end_before_limit_s=END_BEFORE_LIMIT_S)
    job = submit(LayoutConfig(num_groups=2), limits, redundancy=1)
    job.wait_until(lambda: num_records(job.run(), 0, "update") > 0)
    job.limit_time()
    job.wait_until(lambda: (job.run() / "summary.json").exists())  # only Slurm has sent it the signal
    assert spare("check", str(job.run())).startswith("valid")
    assert job.summary()["outcome"] == "stopped"
    assert resumed_from(job, 1) == job.summary()["steps_committed"] > 0

    cluster.power_off("n2")
    cluster.mark_down("n2")
    job.wait_until(lambda: (job.run(1) / "summary.json").exists())
    summary = job.summary(1)
    assert (summary["outcome"], summary["verdict"]) == ("wipe_out", "valid"), summary["reasons"]
    assert resumed_from(job, 2) >= job.summary()["steps_committed"]
    started = [text_of(job.run(2) / f"logs/node-{node}.log") for node in range(2)]
    assert [f"started on {name}" in log for name, log in zip(("n1", "n3"), started, strict=True)] == [True] * 2

    assert spare("cancel", str(job.folder)).startswith("job ")
    job.wait_until(lambda: job.state == "CANCELLED")
    job.wait_until(lambda: cluster.processes() == [])
    # Cancelled at whatever moment: a group may not have come to write what it had of the last commit.
    unwritten = re.compile(
        r"unknown: (step \d+: no update|no digest of the last parameters) of group \d in the journal"
    )
    proven = verdict_of(job.run(2))
    assert [reason for reason in proven["reasons"] if not unwritten.fullmatch(reason)] == []
    assert proven["steps_committed"] > 0


@pytest.mark.parametrize("whole_job", [False, True], ids=["its steps", "its script as well"])
def test_a_job_that_is_asked_to_end_saves_its_run_and_goes_on_later(
    start_cluster: Callable[..., Cluster], submit: Callable[..., Job], *, whole_job: bool
) -> None:
    """SIGTERM to every process, etcd and ranks included, as before a preemption. It saved nothing."""
    start_cluster(2)
    job = submit(LayoutConfig(num_groups=2), SlurmConfig(max_requeues=1))
    job.wait_until(lambda: num_records(job.run(), 0, "update") > 0)
    slurm("scancel", *(["--full"] if whole_job else []), "--signal=TERM", str(job.number))
    job.wait_until(lambda: (job.run() / "summary.json").exists())
    summary = job.summary()
    assert (summary["outcome"], summary["verdict"]) == ("stopped", "valid"), summary
    assert "SIGTERM" in summary["outcome_reason"]
    job.wait_until(lambda: "exit code 5: the job goes back into the queue" in job.log)
    assert resumed_from(job, 1) == summary["steps_committed"]
    spare("cancel", str(job.folder))
    job.wait_until(lambda: job.state == "CANCELLED")


def test_a_job_that_is_preempted_three_times_ends_bitwise_as_one_that_is_not(
    start_cluster: Callable[..., Cluster], submit: Callable[..., Job], tmp_path: Path
) -> None:
    """Nothing is asked of Slurm but the jobs that preempt it, which last a moment. The last time its partition has no
    GraceTime, and it has KillWait to end.
    """
    start_cluster(2)
    job = submit(LayoutConfig(num_groups=2), SlurmConfig(), num_steps=PREEMPTED_STEPS)
    first = 0
    for attempt, grace_s in enumerate((60, 60, 0)):
        slurm("scontrol", "update", "PartitionName=test", f"GraceTime={grace_s}")
        job.wait_until(lambda attempt=attempt: num_records(job.run(attempt), 0, "update") > 1)
        slurm("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
        job.wait_until(lambda attempt=attempt: (job.run(attempt) / "summary.json").exists())
        summary = job.summary(attempt)
        # Without GraceTime the same signal ends the store's step: what it ends too early is saved without it.
        assert summary["outcome"] == "stopped"
        assert summary["verdict"] in ({"valid"} if grace_s else {"valid", "unknown"}), summary
        assert "SIGTERM" in summary["outcome_reason"]
        assert first_step_of(job, attempt) == first
        first += summary["steps_committed"]
    job.wait_until(lambda: job.is_over)
    assert job.state == "COMPLETED"
    assert sorted(path.name for path in job.folder.glob("attempt-*")) == [f"attempt-00{i}" for i in range(4)]
    last = job.summary(3)
    assert (last["outcome"], last["verdict"]) == ("finished", "valid"), last
    assert first_step_of(job, 3) == first == PREEMPTED_STEPS - last["steps_committed"]

    config = load_run_config(job.folder / "config.toml").config
    config = replace(config, cluster=CPU, control=ControlConfig(), checkpoint=CheckpointConfig(), faults=FaultsConfig())
    whole = complete_run(config, tmp_path / "whole")
    assert whole.summary.params_sha256 == last["params_sha256"] is not None
    losses = [losses_of(read_journal(job.run(attempt))) for attempt in range(4)]
    assert {step: found for part in losses for step, found in part.items()} == losses_of(whole.journal)


def first_step_of(job: Job, attempt: int) -> int:
    return int(json.loads(text_of(job.run(attempt) / "journal/driver.jsonl").splitlines()[0])["first_step"])


def resumed_from(job: Job, attempt: int) -> int:
    """The first step of a run that the job's requeueing has begun, and that has come to train."""
    run_dir = job.run(attempt)
    job.wait_until(lambda: job.state == "PENDING" or run_dir.exists())
    job.start_now()
    job.wait_until(lambda: num_records(run_dir, 0, "update") > 0)
    return first_step_of(job, attempt)


def test_an_array_trains_each_of_its_jobs_by_itself(
    start_cluster: Callable[..., Cluster], can_submit: None, text_corpus: Path, tmp_path: Path
) -> None:
    """Also the one that has the number of the whole array."""
    start_cluster(2)
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=3)
    preset, folder = tmp_path / "preset.toml", tmp_path / "job"
    preset.write_text(dump_run_config(config))
    words = ("--config", str(preset), "--run-dir", str(folder), "--array", "train.seed=1,2", "--wait")
    spare("submit", *words)
    jobs = json.loads(spare("status", str(folder), "--json"))["tasks"]
    assert [job["state"] for job in jobs.values()] == ["COMPLETED"] * 2
    assert [job["runs"]["attempt-000"]["steps_committed"] for job in jobs.values()] == [3] * 2
    assert len({job["runs"]["attempt-000"]["final_loss"] for job in jobs.values()}) == 2
    for task in jobs:
        assert spare("check", str(folder / task / "attempt-000")).startswith("valid")
