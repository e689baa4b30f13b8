"""Settings that cannot run as a job of Slurm are refused, doubtful ones reported."""

import pytest

from spare_megatron.config.checks.validate import MachineResources, problems, warnings
from tests.unit.submit.job_configs import configured


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
