"""Processes on several nodes that answer a command's requests. They connect like the supervisors of a run, by files in
a folder that all nodes share, and end with their connection.
"""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from spare_megatron.config.schema import RunConfig, SlurmConfig
from spare_megatron.driver.slurm import allocation
from spare_megatron.driver.slurm.steps import node_step, start_step
from spare_megatron.machine.addresses import address_towards, hosts_of, refuse_loopback
from spare_megatron.process.node_connection import Listener

_POLL_S = 0.2
_END_S = 5.0
StartNode = Callable[[int, Path], "subprocess.Popen[bytes]"]
"""Starts the process of a node, with its output in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    folder: Path
    """Where the nodes meet; all of them share it."""
    host: str
    """The address of this machine that the others reach."""
    logs: Path
    """Folder of the output of started processes, removed at the end."""
    words: Callable[[int], Sequence[str]]
    """The command that is the process of a node, behind `spare`."""
    start: StartNode | None
    """Starts the process of a node; None if a user does."""
    wait_s: float
    """Longest wait for the nodes to connect."""


def steps_of(
    slurm: SlurmConfig, names: Mapping[int, str], words: Callable[[int], Sequence[str]], wait_s: float, job: str | None
) -> StartNode:
    """Starts a node's process as a step of a Slurm job, on the Slurm node of this name, by the words behind `spare`."""

    def start(node: int, log: Path) -> "subprocess.Popen[bytes]":
        command, *_ = of_node = words(node)
        return start_step(
            node_step(slurm, f"{command}-{node}", names[node], (*of_node, "--wait-s", str(wait_s)), job), log
        )

    return start


def own_address(config: RunConfig, nodes: Sequence[int], names: Mapping[int, str] | None) -> str:
    """The address of this machine for these nodes, which have names if they are in a Slurm job. ValueError: it has none
    but loopback, and they are other machines.
    """
    if names is None:
        hosts = hosts_of(config.control.endpoints) or [config.control.listen_address]
    else:
        hosts = [allocation.address_of(names[node]) for node in nodes[:2]]  # one of them may be this machine
    host = address_towards(hosts)
    if len(nodes) > (0 if names is None else 1):
        refuse_loopback(host, hosts)
    return host


class NodeProcesses:
    """The connections to the nodes, and why others have none."""

    def __init__(self) -> None:
        self.connections: dict[int, Connection] = {}
        self.failures: dict[int, str] = {}

    def ask(self, orders: Mapping[int, object], limit_s: float) -> dict[int, Any]:
        """Sends the requests and returns the answers. Nodes that do not answer are dropped."""
        answers = self.answers(orders, limit_s, late="a file system or a GPU there may hang")
        return {node: answer for node, answer in answers if node not in self.failures}

    def answers(self, orders: Mapping[int, object], limit_s: float, *, late: str) -> Iterator[tuple[int, Any]]:
        """Sends the requests; yields each node with its answer, or with None as it is dropped, `late` as the advice."""
        pending: dict[Connection, int] = {}
        for node, order in orders.items():
            connection = self.connections.get(node)
            if connection is not None:
                with contextlib.suppress(OSError):  # found gone below
                    connection.send(order)
                pending[connection] = node
        end_s = time.monotonic() + limit_s
        while pending and (left_s := end_s - time.monotonic()) > 0:
            ready = wait(list(pending), left_s)
            for connection in [connection for connection in pending if connection in ready]:
                node = pending.pop(connection)
                answer = None
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._lose(node, "its process ended before its answer; see its output there")
                yield node, answer
        for node in pending.values():
            self._lose(node, f"no answer within {limit_s:g} s; {late}")
            yield node, None

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()

    def _lose(self, node: int, failure: str) -> None:
        self.failures[node] = failure
        self.connections.pop(node).close()


@contextlib.contextmanager
def served_here(serve: Callable[[Connection], None]) -> Iterator[Connection]:
    """Serves a node in a thread, where it is this machine. `serve` returns when its connection is closed."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs,), daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(_END_S)


@contextlib.contextmanager
def connected(nodes: NodeProcesses, awaited: Sequence[int], meeting: Meeting) -> Iterator[None]:
    """Connects the nodes and notes why some are missing. Their processes end with the block."""
    if not awaited:
        yield
        return
    is_new = not meeting.folder.exists()
    meeting.logs.mkdir(parents=True, exist_ok=True)
    steps: dict[int, subprocess.Popen[bytes]] = {}
    listeners = {node: Listener(meeting.folder, node, meeting.host) for node in awaited}
    try:
        if meeting.start is not None:
            for node in awaited:
                steps[node] = meeting.start(node, _log(meeting.logs, node))
        _await(nodes, listeners, steps, meeting)
        for node in listeners:
            missing = f"`spare {' '.join(meeting.words(node))}` did not connect from there within {meeting.wait_s:g} s"
            nodes.failures[node] = f"{missing}; is {meeting.folder} on storage that all nodes share?"
        yield
    finally:
        for listener in listeners.values():
            listener.close()
        nodes.close()
        _end_steps(steps.values())
        _clear(meeting, is_new=is_new)


def _await(
    nodes: NodeProcesses,
    listeners: dict[int, Listener],
    steps: Mapping[int, "subprocess.Popen[bytes]"],
    meeting: Meeting,
) -> None:
    """Waits for the nodes. Removes the listeners of those that have connected or never will."""
    end_s = time.monotonic() + meeting.wait_s
    while listeners and time.monotonic() < end_s:
        ready = wait([listener.fileno() for listener in listeners.values()], _POLL_S)
        for node, listener in list(listeners.items()):
            if listener.fileno() in ready and (connection := listener.accept()) is not None:
                nodes.connections[node] = connection
            elif node in steps and steps[node].poll() is not None:
                printed = _log(meeting.logs, node).read_text(errors="replace").strip().splitlines()
                nodes.failures[node] = f"its step has ended: {printed[-1] if printed else 'it printed nothing'}"
            else:
                continue
            listeners.pop(node).close()


def _log(logs: Path, node: int) -> Path:
    return logs / f"node-{node:04d}.log"


def _end_steps(steps: "Collection[subprocess.Popen[bytes]]") -> None:
    """Waits for the processes to end with their connections, then signals them."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + _END_S
        for step in steps:
            if number is not None:
                step.send_signal(number)  # not to one that has ended
        for step in steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(max(0.0, end_s - time.monotonic()))


def _clear(meeting: Meeting, *, is_new: bool) -> None:
    for log in meeting.logs.glob("node-*.log"):
        log.unlink()
    with contextlib.suppress(OSError):  # other files are there
        meeting.logs.rmdir()
        (meeting.folder / "nodes").rmdir()
        if is_new:
            meeting.folder.rmdir()
