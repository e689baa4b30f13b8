"""What whole runs share: one fork server that has torch and Megatron, one corpus, one etcd binary."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spare_megatron.runtime.processes import fork_server
from tests.integration.etcd_cluster import EtcdCluster, running_cluster


@pytest.fixture(scope="session", autouse=True)
def _warm_fork_server() -> None:
    """Started before anybody else starts one: the first list of what to import is the one that counts."""
    # The fork server does not look where pytest does.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    fork_server()


@pytest.fixture(scope="session")
def etcd_cluster(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """For tests that leave its members alone."""
    with running_cluster(etcd_binary, tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster
