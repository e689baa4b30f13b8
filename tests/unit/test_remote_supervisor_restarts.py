"""A remote supervisor that is lost, or has not come, on a cluster that does not always answer."""

import dataclasses
import itertools
import os
import socket
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
from spare_megatron.process.node_connection import connect
from spare_megatron.process.reports import LastReportAcknowledged, NodeEnded, NodeMissing, RanksReady
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import remote_supervisor as module

WAIT_S = 60.0
READY, ENDED = RanksReady(group=GroupId(1)), NodeEnded(node=1, exits={})


class Step:
    """A supervisor as a thread; it has a process that does not end by itself."""

    def __init__(self, run_dir: Path, supervise: Callable[[Connection], None]) -> None:
        self.is_terminated = False
        self._thread = threading.Thread(target=self._run, args=(run_dir, supervise))
        self._thread.start()

    def _run(self, run_dir: Path, supervise: Callable[[Connection], None]) -> None:
        with connect(run_dir, 1, WAIT_S) as driver:
            driver.recv()
            supervise(driver)

    def poll(self) -> int | None:
        return None

    def terminate(self) -> None:
        self.is_terminated = True

    kill = terminate

    def wait(self, timeout_s: float) -> int:
        self._thread.join(WAIT_S)
        return 0


class Broken:
    """A step that has ended at once."""

    is_terminated = False

    def poll(self) -> int | None:
        return 127

    def wait(self, timeout_s: float) -> int:
        return 127

    def terminate(self) -> None:
        pass

    kill = terminate


class Launcher:
    """Starts the given supervisors, one after the other; None is a failure."""

    replaces = True

    def __init__(self, *supervisors: Callable[[Connection], None] | None) -> None:
        self._supervisors = list(supervisors)
        self.calls: list[str] = []
        self.steps: list[Step | Broken] = []

    def lacks(self, node: int) -> bool:
        return False

    def start(self, run_dir: Path, node: int, incarnation: int) -> Any:
        self.calls.append(f"start {incarnation}")
        begin = self._supervisors.pop(0)
        if begin is None:
            raise ValueError("scontrol failed: Socket timed out on send/recv operation")
        if begin is never_connects:
            return None
        self.steps.append(Broken() if begin is broken else Step(run_dir, begin))
        return self.steps[-1]

    def release(self, run_dir: Path, node: int) -> None:
        self.calls.append("ended")


def never_connects(driver: Connection) -> None:
    raise AssertionError("it is not started")


SOON_S = 0.01
"""Between tries of a supervisor."""


def broken(driver: Connection) -> None:
    raise AssertionError("it does not come")


def lost_at_once(driver: Connection) -> None:
    """Before its ranks are ready."""


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

    store = TcpStoreSpec(host="127.0.0.1", port=1)
    return NodeSpec(config=RunConfig(), run_dir=tmp_path, node=1, store=store, faults=(), rank_main=no_main)


def test_a_replacement_that_cannot_be_started_is_tried_again(
    spec: NodeSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """One failed command of Slurm ended the node for the rest of the run."""
    launcher = Launcher(lost_when_ready, None, None, there_to_the_end)
    ours, theirs = Pipe()
    module._RemoteSupervisor(launcher, spec, theirs, retry_s=SOON_S).run()
    starts = [word for word in launcher.calls if word != "ended"]
    assert starts == ["start 0", "start 1", "start 1", "start 1"]
    assert launcher.calls[-1] == "ended"
    assert [ours.recv() for _ in range(3)] == [READY, READY, ENDED]
    assert capsys.readouterr().out.count("its supervisor cannot be started now: scontrol failed: Socket timed out") == 2


def test_a_first_supervisor_that_cannot_be_started_is_reported(spec: NodeSpec) -> None:
    with pytest.raises(ValueError, match="scontrol failed"):
        module._RemoteSupervisor(Launcher(None), spec, Pipe()[1], retry_s=SOON_S).run()


def test_between_tries_it_waits_longer_and_longer(spec: NodeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try asks the cluster's one server, and so do the remote supervisors of all lost nodes."""
    now_s = [0.0]

    def wait(objects: list[Any], timeout_s: float) -> list[Any]:
        now_s[0] += timeout_s
        return []

    class Tried(Exception):
        pass

    tries_s: list[float] = []

    def start(run_dir: Path, node: int, incarnation: int) -> subprocess.Popen[bytes] | None:
        tries_s.append(now_s[0])
        if len(tries_s) == 9:
            raise Tried
        return None

    monkeypatch.setattr(module, "wait", wait)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    launcher = Launcher()
    monkeypatch.setattr(launcher, "start", start)
    run_remote_supervisor = module._RemoteSupervisor(launcher, spec, Pipe()[1], retry_s=2.0)
    run_remote_supervisor._incarnation = 1
    with pytest.raises(Tried):
        run_remote_supervisor._start_supervisor()
    waits_s = [later - earlier for earlier, later in itertools.pairwise(tries_s)]
    assert waits_s == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("first", "cause"),
    [
        (never_connects, "did not connect within control.startup_timeout_s=0.05"),
        (broken, "did not connect: the command that starts it ended with exit code 127"),
        (lost_at_once, "was lost before training began"),
    ],
)
def test_a_supervisor_that_is_missing_before_training_is_reported_and_another_one_awaited(
    spec: NodeSpec, first: Callable[[Connection], None], cause: str
) -> None:
    """The remote supervisor ended, and the run with it."""
    startup_timeout_s = 0.05 if first is never_connects else WAIT_S
    control = dataclasses.replace(spec.config.control, startup_timeout_s=startup_timeout_s)
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, control=control))
    launcher = Launcher(first, never_connects, there_to_the_end)
    ours, theirs = Pipe()
    module._RemoteSupervisor(launcher, spec, theirs, retry_s=SOON_S).run()
    assert [word for word in launcher.calls if word != "ended"] == ["start 0", "start 1", "start 1"]
    missing = NodeMissing(node=1, cause=f"node 1: its supervisor {cause}; look at logs/node-1.log, and at the machine")
    assert [ours.recv() for _ in range(3)] == [missing, READY, ENDED]


def test_one_that_is_lost_later_is_for_the_other_nodes_to_find(spec: NodeSpec) -> None:
    ours, theirs = Pipe()
    module._RemoteSupervisor(
        Launcher(lost_when_ready, lost_at_once, there_to_the_end), spec, theirs, retry_s=SOON_S
    ).run()
    assert [ours.recv() for _ in range(3)] == [READY, READY, ENDED]


@pytest.mark.timeout(60)
def test_a_supervisor_that_reports_to_a_driver_that_is_gone_is_left_to_itself(spec: NodeSpec) -> None:
    """It was terminated, for it was received before the driver's end was seen."""
    ours, theirs = Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as driver:
        driver.shutdown(socket.SHUT_RD)  # nothing can be reported any more, and its end is not seen
    launcher = Launcher(lost_when_ready)
    with pytest.raises(module._Over):
        module._RemoteSupervisor(launcher, spec, theirs, retry_s=SOON_S).run()
    (step,) = launcher.steps
    step.wait(WAIT_S)
    assert not step.is_terminated


@pytest.mark.timeout(60)
def test_a_supervisor_learns_that_the_driver_has_its_last_report(spec: NodeSpec) -> None:
    received: list[object] = []

    def waits(driver: Connection) -> None:
        driver.send(ENDED)
        received.append(driver.recv())

    ours, theirs = Pipe()
    module._RemoteSupervisor(Launcher(waits), spec, theirs, retry_s=SOON_S).run()
    assert (ours.recv(), received) == (ENDED, [LastReportAcknowledged()])
