"""Jobs of a real Slurm of eight nodes. They take minutes: `pytest tests/slurm --slurm`."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spare_megatron.config.resolved import dump_run_config
from spare_megatron.config.schema import LayoutConfig, SlurmConfig
from tests.integration.etcd_cluster import ports_for_members
from tests.integration.whole_run import tiny_config
from tests.slurm.jobs import Cluster, Job, num_records, spare, text_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

CONFIGS = Path(__file__).parents[2] / "configs"
Submit = Callable[..., Job]


def test_the_demo_as_a_job_loses_two_groups_and_proves_itself(
    cluster: Cluster, can_submit: None, text_corpus: Path, tmp_path: Path
) -> None:
    settings = (
        f"data.corpus={text_corpus}",
        "cluster.num_nodes=4",
        "slurm.num_spare_nodes=1",
        "control.store=etcd",
        f"slurm.etcd_port={ports_for_members()}",
        "slurm.doctor=true",
        "slurm.max_requeues=0",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    preset, folder = CONFIGS / "run/demo_cpu.toml", tmp_path / "job"
    spare("submit", "--config", str(preset), "--run-dir", str(folder), *words, "--wait")
    job = Job(folder=folder)
    assert "5 nodes, 0 problems" in job.log  # the spare one, too
    assert job.state == "COMPLETED"
    assert spare("check", str(job.run())).startswith("valid: 60 steps")
    assert job.summary()["groups_lost"] == 2
    job.wait_until(lambda: cluster.processes() == [])


def test_a_group_on_two_of_eight_nodes_is_lost_with_one_of_them(cluster: Cluster, submit: Submit) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    job = submit(layout, SlurmConfig(max_requeues=0))
    run_dir = job.run()
    job.wait_until(lambda: num_records(run_dir, 0, "update") > 0)
    cluster.power_off("n6")
    job.wait_until(lambda: num_records(run_dir, 0, "recovery") > 0)
    before = num_records(run_dir, 0, "update")
    job.wait_until(lambda: num_records(run_dir, 0, "update") > before + 3)
    job.signal_end()
    job.wait_until(lambda: job.is_over)
    assert spare("check", str(run_dir)).startswith("valid")
    summary = job.summary()
    assert (summary["outcome"], summary["groups_lost"], summary["steps_lost"]) == ("finished", 1, 0)
    assert {2} == {group for recovery in summary["recoveries"] for group in recovery["lost"]}


def test_a_lost_step_starts_again_and_the_job_goes_on_after_its_time_until_it_is_cancelled(
    cluster: Cluster, submit: Submit
) -> None:
    limits = SlurmConfig(max_requeues=1, time_limit_minutes=60, end_before_limit_s=60)
    job = submit(LayoutConfig(num_groups=2), limits)
    first, second = job.run(0), job.run(1)
    job.wait_until(lambda: num_records(first, 1, "update") > 0)
    job.cancel_step("node-1")  # its node is still in the job, and has room for another
    job.wait_until(lambda: "group 1 rejoined" in job.log)
    job.limit_time()
    job.wait_until(lambda: (first / "summary.json").exists())  # nobody but Slurm has sent it the signal
    assert spare("check", str(first)).startswith("valid")
    summary = job.summary(0)
    assert (summary["outcome"], summary["groups_lost"], summary["groups_rejoined"]) == ("finished", 1, 1)
    committed = summary["steps_committed"]
    assert resumed_from(job) == committed > 0
    assert spare("cancel", str(job.folder)).startswith("job ")
    job.wait_until(lambda: job.state == "CANCELLED")
    job.wait_until(lambda: cluster.processes() == [])
    assert num_records(second, 0, "update") > 0


def test_a_wipe_out_sends_the_job_back_and_it_goes_on_from_its_checkpoint_on_other_nodes(
    cluster: Cluster, submit: Submit
) -> None:
    job = submit(LayoutConfig(num_groups=2), SlurmConfig(max_requeues=1), redundancy=1)
    first, checkpoints = job.run(0), job.folder / "checkpoints"
    job.wait_until(lambda: any(checkpoints.glob("step-*")))
    cluster.power_off("n2")
    cluster.mark_down("n2")
    job.wait_until(lambda: (first / "summary.json").exists())
    assert (job.summary(0)["outcome"], job.summary(0)["verdict"]) == ("wipe_out", "valid"), job.summary(0)["reasons"]
    assert 0 < resumed_from(job) <= job.summary(0)["steps_committed"]
    second = job.run(1)
    job.signal_end()
    job.wait_until(lambda: (second / "summary.json").exists())
    assert spare("check", str(second)).startswith("valid")
    assert "started on n2" not in "".join(text_of(second / f"logs/node-{node}.log") for node in range(2))


def resumed_from(job: Job) -> int:
    """The first step of the job's second run, which has come to train."""
    job.wait_until(lambda: job.state == "PENDING" or job.run(1).exists())
    job.start_now()
    job.wait_until(lambda: num_records(job.run(1), 0, "update") > 0)
    return int(json.loads(text_of(job.run(1) / "journal/driver.jsonl").splitlines()[0])["first_step"])


def test_an_array_trains_each_of_its_jobs_by_itself(
    cluster: Cluster, can_submit: None, text_corpus: Path, tmp_path: Path
) -> None:
    """Also the one that has the number of the whole array."""
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
        assert "1 node, 0 problems, 0 warnings" in text_of(folder / task / "slurm.log")
        assert spare("check", str(folder / task / "attempt-000")).startswith("valid")
