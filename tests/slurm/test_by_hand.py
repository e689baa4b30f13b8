"""The nodes of a run started by hand, without a Slurm: beside the jobs, for it takes as long."""

import signal
from pathlib import Path

import psutil
import pytest

from spare_megatron.journal.check import check_journal
from spare_megatron.journal.files import read_journal
from tests.integration.etcd_cluster import running_cluster
from tests.integration.test_run_nodes import TIMEOUT_S, committed, output_of, started, wait_until, write_preset

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_nodes_started_by_hand_go_on_without_the_driver(text_corpus: Path, tmp_path: Path, etcd_binary: Path) -> None:
    """The driver's machine is lost with the driver and its own supervisor."""
    run_dir = tmp_path / "run"
    with running_cluster(etcd_binary, tmp_path) as etcd:
        preset = write_preset(text_corpus, tmp_path, etcd, "hand")
        with (
            started(tmp_path, "train", "--config", str(preset), "--run-dir", str(run_dir)) as driver,
            started(tmp_path / "other", "supervise", str(run_dir), "--node", "1") as other,
        ):
            wait_until(lambda: committed(run_dir) > 0, driver, other)
            below = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            driver.wait(TIMEOUT_S)
            before = committed(run_dir, 1)
            wait_until(lambda: committed(run_dir, 1) > before + 3, other)
            other.send_signal(signal.SIGUSR1)
            assert other.wait(TIMEOUT_S) == 0, output_of(tmp_path / "other")
        assert psutil.wait_procs(below, timeout=TIMEOUT_S)[1] == []
    verdict = check_journal(read_journal(run_dir))
    assert verdict.verdict == "valid", verdict.reasons
