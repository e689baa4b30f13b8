"""What all tests share: hardware they may need."""

from collections.abc import Generator
from pathlib import Path

import pytest

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
