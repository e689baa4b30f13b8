"""A stand-in whose supervisor is lost, on a cluster that does not always answer."""

import itertools
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.control.spec import TcpStoreSpec
from spare_megatron.core.topology import GroupId
from spare_megatron.runtime.driver import stand_in as module
from spare_megatron.runtime.driver.node_connection import connect
from spare_megatron.runtime.process.reports import NodeEnded, RanksReady
from spare_megatron.runtime.process.spec import NodeSpec

WAIT_S = 60.0
READY, ENDED = RanksReady(group=GroupId(1)), NodeEnded(node=1, exits={})


class Step:
    """A supervisor as a thread; it has a process that does not end by itself."""

    def __init__(self, run_dir: Path, life: Callable[[Connection], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(run_dir, life))
        self._thread.start()

    def _run(self, run_dir: Path, life: Callable[[Connection], None]) -> None:
        with connect(run_dir, 1, WAIT_S) as driver:
            driver.recv()
            life(driver)

    def poll(self) -> int | None:
        return None

    def terminate(self) -> None:
        pass

    kill = terminate

    def wait(self, timeout_s: float) -> int:
        self._thread.join(WAIT_S)
        return 0


class Launcher:
    """Starts what it is told to, one after the other; None is a failure."""

    replaces = True

    def __init__(self, *lives: Callable[[Connection], None] | None) -> None:
        self._lives = list(lives)
        self.told: list[str] = []

    def start(self, run_dir: Path, node: int, life: int) -> Any:
        self.told.append(f"start {life}")
        begin = self._lives.pop(0)
        if begin is None:
            raise ValueError("scontrol failed: Socket timed out on send/recv operation")
        return Step(run_dir, begin)

    def ended(self, run_dir: Path, node: int) -> None:
        self.told.append("ended")


def lost_when_ready(driver: Connection) -> None:
    driver.send(READY)


def there_to_the_end(driver: Connection) -> None:
    driver.send(READY)
    driver.send(ENDED)


def no_main(spec: object, pipe: Connection) -> None:
    raise AssertionError("no rank is started")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeSpec:
    monkeypatch.setattr(module, "open_store", lambda spec: SimpleNamespace(local_host=lambda: "127.0.0.1"))
    monkeypatch.setattr(module, "_RETRY_S", 0.01)

    store = TcpStoreSpec(host="127.0.0.1", port=1)
    return NodeSpec(config=RunConfig(), run_dir=tmp_path, node=1, store=store, faults=(), rank_main=no_main)


def test_a_replacement_that_cannot_be_started_is_tried_again(
    spec: NodeSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """One failed command of Slurm ended the node for the rest of the run."""
    launcher = Launcher(lost_when_ready, None, None, there_to_the_end)
    ours, theirs = Pipe()
    module._StandIn(launcher, spec, theirs).run()
    starts = [word for word in launcher.told if word != "ended"]
    assert starts == ["start 0", "start 1", "start 1", "start 1"]
    assert launcher.told[-1] == "ended"
    assert [ours.recv() for _ in range(3)] == [READY, READY, ENDED]
    assert capsys.readouterr().out.count("its supervisor cannot be started now: scontrol failed: Socket timed out") == 2


def test_a_first_supervisor_that_cannot_be_started_is_told(spec: NodeSpec) -> None:
    with pytest.raises(ValueError, match="scontrol failed"):
        module._StandIn(Launcher(None), spec, Pipe()[1]).run()


def test_between_tries_it_waits_longer_and_longer(spec: NodeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try asks the cluster's one server, and so do the stand-ins of all nodes that are lost."""
    now_s = [0.0]

    def wait(objects: list[Any], timeout_s: float) -> list[Any]:
        now_s[0] += timeout_s
        return []

    class Tried(Exception):
        pass

    tries_s: list[float] = []

    def start(run_dir: Path, node: int, life: int) -> subprocess.Popen[bytes] | None:
        tries_s.append(now_s[0])
        if len(tries_s) == 9:
            raise Tried
        return None

    monkeypatch.setattr(module, "_RETRY_S", 2.0)
    monkeypatch.setattr(module, "wait", wait)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    launcher = Launcher()
    monkeypatch.setattr(launcher, "start", start)
    stand_in = module._StandIn(launcher, spec, Pipe()[1])
    stand_in._life = 1
    with pytest.raises(Tried):
        stand_in._begin()
    waits_s = [later - earlier for earlier, later in itertools.pairwise(tries_s)]
    assert waits_s == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
