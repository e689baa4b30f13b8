"""What whole runs share: one fork server that has torch and Megatron, one corpus, one etcd binary."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.etcd_cluster import EtcdCluster, running_cluster


@pytest.fixture(scope="session", autouse=True)
def _forks_ranks(warm_fork_server: None) -> None:
    """From a server that has torch and Megatron."""


@pytest.fixture(scope="session")
def etcd_cluster(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """For tests that leave its members alone."""
    with running_cluster(etcd_binary, tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster
