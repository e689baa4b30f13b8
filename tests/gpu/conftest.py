"""What tests of devices share with whole runs: a fork server."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _forks_ranks(warm_fork_server: None) -> None:
    """From a server that has torch and Megatron."""
