"""A real Slurm on this machine, and jobs on it."""

import dataclasses
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import (
    ClusterConfig,
    ControlConfig,
    FaultConfig,
    LayoutConfig,
    ReduceConfig,
    SlurmConfig,
)
from spare_megatron.config.schema_sections import CheckpointConfig
from tests.integration.etcd_cluster import ports_for_members
from tests.integration.whole_run import tiny_config
from tests.search_path import with_checkout
from tests.slurm.installation import find_slurm, skip_where_no_node_can_be
from tests.slurm.jobs import NUM_STEPS, Cluster, Job, pauses, spare

CLUSTER = Path(__file__).parent / "cluster.sh"


@pytest.fixture(scope="session")
def slurm_environment(pytestconfig: pytest.Config) -> Mapping[str, str]:
    skip_where_no_node_can_be()
    assert pytestconfig.cache is not None
    return find_slurm(pytestconfig.cache.mkdir("slurm"))


@pytest.fixture
def start_cluster(
    slurm_environment: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Cluster]]:
    """Brings up a cluster of so many nodes, which are all there then, in so many racks, or in none that Slurm knows of.
    Where it does not come up the test is skipped: what a container may do is not ours.
    """
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name, value in {**slurm_environment, "SLURM_CONF": str(folder / "slurm.conf")}.items():
        monkeypatch.setenv(name, value)

    def order(what: str, *words: str) -> None:
        command = ["bash", str(CLUSTER), what, str(folder), *words]
        with (folder / "orders.log").open("ab") as log:  # a pipe would be held by the daemons
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=150, check=False)
        if done.returncode and what == "up":
            pytest.skip(f"a Slurm does not come up here: {(folder / 'orders.log').read_text()[-500:]}")
        assert done.returncode == 0, (folder / "orders.log").read_text()

    def start(num_nodes: int, num_racks: int = 0) -> Cluster:
        order("up", str(num_nodes), str(_free_ports(num_nodes)), str(num_racks))
        return Cluster(folder=folder, order=order)

    try:
        yield start
    finally:
        order("down")


@pytest.fixture
def can_submit(text_corpus: Path, etcd_binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes have an etcd and this code."""
    monkeypatch.setenv("PATH", f"{etcd_binary.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", with_checkout())


@pytest.fixture
def submit(text_corpus: Path, tmp_path: Path, can_submit: None) -> Callable[..., Job]:
    """Submits a run with a rank on each node, of the smallest model, that leaves processors to what else runs here."""

    def submit(
        layout: LayoutConfig,
        slurm: SlurmConfig,
        *,
        redundancy: int | None = None,
        faults: Sequence[FaultConfig] = (),
        num_further: int = 0,
        num_steps: int = NUM_STEPS,
    ) -> Job:
        config = tiny_config(
            text_corpus,
            layout,
            steps=num_steps,
            faults=[*faults, *pauses(group=layout.num_groups - 1, num_steps=num_steps)],
            redundancy=redundancy,
            rejoins=3,
            cluster=ClusterConfig(device="cpu", num_nodes=layout.num_groups * layout.pipeline_parallel),
        )
        config = dataclasses.replace(
            config,
            control=ControlConfig(store="etcd", heartbeat_interval_s=4.0),
            reduce=ReduceConfig(mode="reproducible"),
            checkpoint=CheckpointConfig(interval_steps=100, max_restarts=0, restart_wait_s=10.0),
            slurm=dataclasses.replace(slurm, etcd_port=ports_for_members()),
            # All nodes are this computer, whose processors they take from each other: some are slow by turns.
            spare=dataclasses.replace(config.spare, reform_after_s=0.0, replace_slow=False),
        )
        if num_further:
            most_groups = layout.num_groups + num_further
            config = dataclasses.replace(
                config,
                layout=dataclasses.replace(layout, max_groups=most_groups),
                cluster=dataclasses.replace(config.cluster, num_nodes=most_groups * layout.pipeline_parallel),
                data=dataclasses.replace(config.data, access="shared"),
            )
        preset = tmp_path / "preset.toml"
        preset.write_text(dump_run_config(config))
        spare("submit", "--config", str(preset), "--run-dir", str(tmp_path / "job"))
        return Job(folder=tmp_path / "job")

    return submit


def _free_ports(num_nodes: int) -> int:
    """The first of a thousand ports, of which some were free a moment ago: the daemons must know each other's."""
    for first in range(17000, 30000, 1000):
        try:
            for port in range(first, first + num_nodes + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no thousand ports are free")
