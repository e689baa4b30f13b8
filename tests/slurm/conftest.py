"""A real Slurm of four nodes on this machine."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster.sh"
NUM_NODES = 4
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")


@pytest.fixture(scope="session", autouse=True)
def _slurm_is_there(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--slurm"):
        pytest.skip("starts a Slurm and takes minutes; ask for it with --slurm")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(
            f"needs a Slurm, and there is no {', '.join(missing)}: "
            f"apt install --no-install-recommends slurmctld slurmd slurm-client munge"
        )
    if os.geteuid() != 0:
        pytest.skip("needs root, for nodes of Slurm in namespaces of their own")
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        pytest.skip(
            f"needs the line `127.0.0.1 {socket.gethostname()}` in /etc/hosts, for Slurm to stay on this machine"
        )


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A cluster whose nodes are all up; takes `off NODE` and `on NODE`."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)

    def order(what: str, *words: str) -> None:
        command = ["bash", str(CLUSTER), what, str(folder), *words]
        with (folder / "orders.log").open("ab") as log:  # a pipe would be held by the daemons
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=90, check=False)
        assert done.returncode == 0, (folder / "orders.log").read_text()

    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    try:
        order("up", str(NUM_NODES), str(_free_ports()))
        yield order
    finally:
        order("down")


def _free_ports() -> int:
    """The first of a thousand ports, of which some were free a moment ago: the daemons must know each other's."""
    for first in range(17000, 30000, 1000):
        try:
            for port in (*range(first, first + NUM_NODES + 1), *range(first + 900, first + 906)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no thousand ports are free")
