"""What all tests share: hardware they may need, a corpus, an etcd binary."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.integration.etcd_cluster import find_etcd
from tests.integration.text_corpus import write_text_corpus

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=["gpu"],
        help="hardware that must be there: tests that would be skipped for lack of it fail",
    )
    parser.addoption("--slurm", action="store_true", help="also run jobs on a Slurm, started here (root, minutes)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not NVIDIA_DRIVER.exists():
        pytest.skip("needs an NVIDIA GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_required = "gpu" in item.config.getoption("--require")
    if report.skipped and is_required and item.get_closest_marker("gpu") is not None:
        report.outcome = "failed"
        report.longrepr = f"--require=gpu: {item.nodeid} was skipped: {call.excinfo and call.excinfo.value}"
    return report


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path prefix of a corpus of some of Python's own sources, as bytes."""
    prefix = tmp_path_factory.mktemp("text") / "python"
    write_text_corpus(prefix)
    return prefix


@pytest.fixture(scope="session")
def etcd_binary(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return find_etcd(pytestconfig.cache.mkdir("etcd"))
