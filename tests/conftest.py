"""What all tests share: hardware they may need, a corpus, an etcd binary."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

from spare_megatron.machine.gpus import visible_gpus
from tests.integration.etcd_cluster import find_etcd
from tests.search_path import put_checkout_first

# The same examples every time, and none fails for the time it takes: a busy machine may have others to serve first.
settings.register_profile(
    "spare", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.load_profile("spare")


def pytest_configure() -> None:
    """Undoes what the caller of pytest leaves to its processes.

    In the background of a shell they ignore Ctrl-C, and so would all that tests start and interrupt; where tests run
    in parallel, COLUMNS is set to 80.
    """
    os.environ.pop("COLUMNS", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if find_spec("triton") is None and Version(version("megatron-core")) >= Version("0.18"):
        import spare_megatron.mcore  # noqa: F401  (tests import megatron first, which needs triton unless this did)
    gc.disable()  # until all tests are found: to examine what is imported takes nearly as long as to import it


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=["gpu", "slurm", "cuda_build"],
        help="what must be there, a GPU, a Slurm, or a torch for GPUs: tests skipped for lack of it fail",
    )


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command may leave signals ignored or blocked, as its process ends with it. What later tests start would inherit
    that, and a shell cannot trap a signal that was ignored when it started.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def _handlers() -> None:
    """Default handlers of signals that the caller of pytest ignores, as a shell has some in a background job."""
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """No doctests of tests: there are none, and the search takes longer than all else that is done to find tests."""
    return [collector for collector in (yield) if type(collector) is pytest.Module]


_LONGEST = ("test_gpu_check.py", "test_tour.py", "test_run_campaign.py")
"""They start first: at the end one alone would leave the other workers idle."""


_NIGHTLY = Path(__file__).with_name("nightly.txt")
"""How the ids of tests begin that `./launch/test` leaves to the night."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    nightly = tuple(_NIGHTLY.read_text().splitlines())
    for item in items:
        if item.nodeid.startswith(nightly):
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not visible_gpus():
        pytest.skip("needs an NVIDIA GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_required = any(map(item.get_closest_marker, item.config.getoption("--require")))
    if report.skipped and is_required:
        report.outcome = "failed"
        report.longrepr = f"--require: {item.nodeid} was skipped: {call.excinfo and call.excinfo.value}"
    return report


@pytest.fixture(scope="session")
def warm_fork_server() -> None:
    """For all tests that fork ranks, before any of them does: only the first list of modules to import counts."""
    from spare_megatron.process.processes import fork_server

    put_checkout_first()
    fork_server()


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path prefix of a corpus of some of Python's own sources, as bytes."""
    from tests.integration.text_corpus import (
        write_text_corpus,
    )  # imports Megatron, which the process that hands out tests lacks

    prefix = tmp_path_factory.mktemp("text") / "python"
    write_text_corpus(prefix)
    return prefix


@pytest.fixture(scope="session")
def etcd_binary(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return find_etcd(pytestconfig.cache.mkdir("etcd"))
