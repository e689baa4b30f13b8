"""Settings that cannot run as a job of Slurm, or in no partition, are refused; doubtful ones are reported."""

from pathlib import Path

import pytest

from spare_megatron.config.checks.validate import MachineResources, problems, warnings
from tests.unit.submit.job_configs import configured, spare


def problems_of(*overrides: str) -> list[str]:
    return problems(configured(*overrides), MachineResources(num_gpus=1024, num_cores=1024, has_corpus=True))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.num_nodes=2"], "control.store=embedded serves one machine, but cluster.num_nodes + "),
        (["slurm.num_spare_nodes=1"], "slurm.num_spare_nodes = 2; set control.store=etcd"),
        (["cluster.device=auto"], "cluster.device=auto cannot be resolved before the job runs"),
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
        (["slurm.partition=a b"], "slurm.partition='a b' is not a valid name in Slurm"),
        (["slurm.account=$(id)"], "slurm.account='$(id)' is not a valid name"),
        (['slurm.options=["qos=high"]'], "slurm.options: 'qos=high' is not an option of sbatch"),
        (['slurm.options=["--x\\nrm"]'], "is not an option of sbatch"),
        (['slurm.step_options=["container"]'], "slurm.step_options: 'container' is not an option of srun"),
        (['slurm.container=["--nv"]'], "slurm.container begins with '--nv', but must begin with a command"),
        (["slurm.end_before_limit_s=0"], "slurm.end_before_limit_s=0 must be at least 1"),
        (["slurm.time_limit_minutes=5"], "slurm.end_before_limit_s=300 uses up all of slurm.time_limit_minutes=5"),
        (["slurm.time_limit_minutes=0"], "slurm.time_limit_minutes=0 must be at least 1"),
        (["slurm.max_requeues=-1"], "slurm.max_requeues=-1 must be at least 0"),
        (["slurm.gpus_per_node=0"], "slurm.gpus_per_node=0 must be at least 1"),
        (["slurm.num_spare_nodes=-1"], "slurm.num_spare_nodes=-1 must be at least 0"),
        (["slurm.etcd_port=65534"], "slurm.etcd_port=65534 leaves fewer than 6 ports"),
        (["cluster.ranks_per_gpu=2"], "cluster.ranks_per_gpu=2 is for tests on one machine"),
        (["cluster.isolate_nodes=true"], "cluster.isolate_nodes=true emulates nodes on one machine"),
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


def test_what_may_not_be_meant_is_reported() -> None:
    here = MachineResources(num_gpus=0, num_cores=99, has_corpus=True)
    found = warnings(configured("control.store=etcd", "cluster.num_nodes=2", "checkpoint.cadence=fixed"), here)
    assert any("the job would start over each time" in text for text in found)
    assert not [
        text
        for text in warnings(configured(), MachineResources(num_gpus=0, num_cores=99, has_corpus=True))
        if "job" in text
    ]


def partition(name: str, total: str, **fields: str) -> str:
    more = "".join(f" {key}={value}" for key, value in fields.items())
    return f"PartitionName={name} Nodes=n[1-{total}] TotalNodes={total}{more}\n"


@pytest.mark.parametrize(
    ("answer", "words", "expected"),
    [
        (partition("h100", "16"), [], "h100 has 16 nodes, and cluster.num_nodes + slurm.num_spare_nodes = 17"),
        (partition("a", "99") + partition("h100", "16"), [], "the job would wait forever"),
        (partition("a", "2", Default="YES") + partition("h100", "99"), ["--set", "slurm.partition="], "a has 2 nodes"),
        (
            partition("a", "2") + partition("h100", "3"),
            ["--set", "slurm.partition=a,h100"],
            "a has 2 nodes, h100 has 3 nodes",
        ),
    ],
)
def test_a_partition_that_cannot_hold_the_job_is_reported_before_it_is_queued(
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
