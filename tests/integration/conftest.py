"""What whole runs share: a fork server that has torch and Megatron, a corpus, an etcd binary, runs without faults."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.integration.etcd_cluster import EtcdCluster, running_cluster

if TYPE_CHECKING:
    from tests.integration.fault_free import FaultFreeRuns


@pytest.fixture(scope="session", autouse=True)
def _forks_ranks(warm_fork_server: None) -> None:
    """From a server that has torch and Megatron."""


@pytest.fixture(scope="session")
def random_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents of 200 random bytes, in which every token occurs."""
    from spare_megatron.tools.text.corpus_writer import write_corpus

    prefix, generator = tmp_path_factory.mktemp("corpus") / "random", np.random.default_rng(3)
    write_corpus((generator.integers(0, 256, 200, dtype=np.uint8).tobytes() for _ in range(40)), prefix)
    return prefix


@pytest.fixture(scope="session")
def etcd_cluster(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """For tests that leave its members alone."""
    with running_cluster(etcd_binary, tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> "FaultFreeRuns":
    """Runs without faults, shared by all workers of pytest, each of which has a folder below that of all."""
    from tests.integration.fault_free import FaultFreeRuns  # imports Megatron

    folder = tmp_path_factory.getbasetemp()
    return FaultFreeRuns(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
