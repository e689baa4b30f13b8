"""How a run's processes are ended, and how their exceptions reach the driver."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import Any, NoReturn

import psutil
import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.machine.interrupts import deferred
from spare_megatron.process import processes
from spare_megatron.process.processes import Child, await_exit, end_processes, fork_server, kill, start_child
from spare_megatron.process.reports import NodeEnded, StopProcess, next_report
from spare_megatron.process.specs import NodeSpec
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process

ROOT = Path(__file__).parents[2]
IS_THERE = "the store is there"
PATIENT_S = 30.0
"""How long to wait for a process that has been asked to end."""


def _serve(parent: Connection) -> None:
    parent.recv()


def _note_the_store(file: Path, store_pid: int, driver: Connection) -> None:
    """A supervisor that looks for the control store when it is to end."""
    assert driver.recv() == StopProcess()
    if psutil.Process(store_pid).status() != psutil.STATUS_ZOMBIE:
        file.write_text(IS_THERE)


def _press_again(driver: Connection) -> None:
    """A supervisor that does not end, before a user who loses patience."""
    assert driver.recv() == StopProcess()
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        if child.process.is_alive():
            child.process.kill()
            child.process.join()


def child(children: list[Child], target: Any, *args: Any) -> Child:
    children.append(start_child(multiprocessing.get_context("fork"), "child", target, *args))
    return children[-1]


def _stop(driver: Connection) -> None:
    """A supervisor that is stopped for good."""
    driver.send("about to stop")
    os.kill(os.getpid(), signal.SIGSTOP)


def be_driver() -> None:
    """The main function of a driver that reports its supervisor's process, and waits to be killed."""
    forkserver.ensure_running()
    supervisor = start_child(multiprocessing.get_context("forkserver"), "supervisor", _stop)
    supervisor.reports.recv()
    print(supervisor.pid, flush=True)
    signal.pause()


def be_parent_without_server() -> None:
    """The same, whose child is spawned, as ranks on GPUs are."""
    child = start_child(multiprocessing.get_context("spawn"), "rank", _stop)
    child.reports.recv()
    print(child.pid, flush=True)
    signal.pause()


def be_driver_of_stopped_server() -> None:
    """The same, whose fork server is stopped for good; it reports that process."""
    processes._IMPORTED = ()  # for seconds of a processor
    start_child(fork_server(), "supervisor", _serve)
    server_pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server_pid, signal.SIGSTOP)
    print(server_pid, flush=True)
    signal.pause()


def _await_status(process: psutil.Process, *wanted: str) -> None:
    end_s = time.monotonic() + PATIENT_S
    while (status := process.status()) not in wanted:
        assert time.monotonic() < end_s, status
        time.sleep(0.005)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", [be_driver, be_driver_of_stopped_server, be_parent_without_server])
def test_a_process_that_stays_stopped_does_not_survive_a_driver_that_is_killed(role: Callable[[], None]) -> None:
    """It cannot see that the driver is gone. What a stopped fork server has forked was left behind with it."""
    command = [sys.executable, "-c", f"from {__name__} import {role.__name__} as be; be()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as driver:
        assert driver.stdout is not None
        stopped = psutil.Process(int(driver.stdout.readline()))
        try:
            _await_status(stopped, psutil.STATUS_STOPPED)
            driver.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                _await_status(stopped, psutil.STATUS_ZOMBIE)  # not every container reaps orphans
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped.kill()


@pytest.mark.timeout(60)
def test_the_store_goes_when_the_ranks_are_gone(tmp_path: Path, children: list[Child]) -> None:
    """It went first, and ranks that took it for gone for good were killed while they saved their state."""
    store = child(children, _serve)
    supervisor = child(children, _note_the_store, tmp_path / "status", store.pid)
    end_processes(supervisors=[supervisor], lost=[], stores=[store], hub=None)
    assert (tmp_path / "status").read_text() == IS_THERE
    assert (supervisor.process.exitcode, store.process.exitcode) == (0, -signal.SIGKILL)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_first", [False, True])
def test_ctrl_c_while_a_run_ends_kills_what_is_left_of_it(children: list[Child], *, is_first: bool) -> None:
    """After the first one the command ignores it elsewhere. One that is the first takes effect in the end."""
    store, supervisor = child(children, _serve), child(children, _press_again)
    signal.signal(signal.SIGINT, signal.default_int_handler if is_first else signal.SIG_IGN)
    began_s, ends = time.monotonic(), []
    try:
        with deferred(lambda: kill([supervisor])):
            end_processes(supervisors=[supervisor], lost=[], stores=[store], hub=None)
            ends.append("in order")
        ends.append("goes on")
    except KeyboardInterrupt:
        ends.append("interrupted")
    assert ends == ["in order", "interrupted" if is_first else "goes on"]
    assert time.monotonic() - began_s < PATIENT_S
    assert [ended.process.exitcode for ended in (supervisor, store)] == [-signal.SIGKILL] * 2


@pytest.mark.timeout(60)
def test_a_killed_process_with_much_memory_has_exited_once_it_is_awaited() -> None:
    code = "import sys; memory = bytearray(1 << 29); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        await_exit([process.pid])
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.timeout(60)
def test_a_process_that_is_gone_is_not_awaited() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not psutil.pid_exists(process.pid)
    await_exit([process.pid])


def raise_something(*_: object) -> NoReturn:
    raise MemoryError("there is [none]\nleft")


def serve_and_raise(_address: str, _port: int, pipe: Any) -> NoReturn:
    pipe.send(1234)
    pipe.recv()
    raise_something()


def test_a_store_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user read `exit code 1`."""
    monkeypatch.setattr(processes, "serve", raise_something)
    context: Any = multiprocessing.get_context("fork")
    with pytest.raises(RuntimeError, match=r"the control store died at start: MemoryError: there is \[none\] left$"):
        processes.start_embedded_store(context, "127.0.0.1")


def test_a_store_that_ends_later_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "serve", serve_and_raise)
    context: Any = multiprocessing.get_context("fork")
    child, _ = processes.start_embedded_store(context, "127.0.0.1")
    child.reports.send("end")
    assert processes.why_ended(child) == "MemoryError: there is [none] left"
    processes.end_child(child)


def test_a_supervisor_that_raises_says_so_to_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its driver knew that it had ended with exit code 1, and the user had to find its log."""
    monkeypatch.setattr(node_process.processes, "log_to_file", lambda *_: None)
    monkeypatch.setattr(node_process, "_look_after", raise_something)
    ours, theirs = Pipe()
    spec = NodeSpec(
        node=1,
        config=RunConfig(),
        run_dir=tmp_path,
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        faults=(),
        rank_main=raise_something,
    )
    with pytest.raises(MemoryError):
        node_process.look_after(spec, theirs, Queue())
    assert ours.poll(10.0)
    ended = next_report(ours)
    assert isinstance(ended, NodeEnded)
    assert (ended.node, ended.failure) == (1, "its supervisor raised MemoryError: there is [none] left")


def test_a_supervisor_that_raises_leaves_no_ranks_and_does_not_wait_for_them() -> None:
    code = (
        "import multiprocessing, time\n"
        "from spare_megatron.supervisor.node_process import children_killed_on_error\n"
        "with children_killed_on_error():\n"
        "    multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,)).start()\n"
        "    raise MemoryError('none left')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "MemoryError: none left" in done.stderr
