"""Examines all nodes before a run: the driver's process sends requests to one process on each node. The processes
connect like the supervisors of a run, by files in a folder that all nodes share.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from spare_megatron.config.diagnosis import nodes_per_group, own_etcd_ports
from spare_megatron.config.node_facts import ClockOffset, NodeFacts, NodeMeasurements, Rate
from spare_megatron.config.schema import ControlConfig, RunConfig
from spare_megatron.config.schema_data import DataConfig
from spare_megatron.driver.node_facts import Sink, examine_node, send_speed, write_speed
from spare_megatron.process.node_connection import Listener, connect

_POLL_S = 0.2
_FACTS_S, _WRITE_S, _SEND_S, _TIME_S = 120.0, 60.0, 30.0, 10.0
"""Longest wait for a node's answer to each request."""
_NUM_TIMES = 8
_MOST_ROUNDS = 64
"""Limit of consecutive write tests, about a second each."""
_END_S = 5.0

StartNode = Callable[[int, Path], subprocess.Popen[bytes]]
"""Starts the process of a node, with its output in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FactsWanted:
    data: DataConfig
    control: ControlConfig
    ports: tuple[int, ...]
    folder: Path
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeExamined:
    facts: NodeFacts
    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Send:
    host: str
    port: int
    key: bytes


class _TellTime:
    """Asks for the node's clock."""


def serve_examination(folder: Path, node: int, wait_s: float) -> None:
    """Main function of the process on a node other than the driver's. Raises ValueError if no driver awaits it."""
    with connect(folder, node, wait_s) as driver:
        with socket.socket(fileno=os.dup(driver.fileno())) as same:
            host = str(same.getsockname()[0])
        _answer_requests(driver, host)


def examine(
    config: RunConfig,
    *,
    names: Sequence[str],
    folder: Path,
    checkpoints: Path,
    host: str,
    start: StartNode | None,
    wait_s: float,
) -> list[NodeMeasurements]:
    """Examines all nodes. ValueError: the folder of the checkpoints cannot be written from here.

    Args:
        config: A configuration without problems of its own.
        names: Names of the nodes, in the order of the run.
        folder: Where the nodes meet; all of them share it.
        checkpoints: The folder of the checkpoints; created for the time of the examination if it is missing.
        host: The address of this machine that the others reach.
        start: Starts the process of a node. None: the first node is this one, and a user starts the others.
        wait_s: Longest wait for the nodes to connect.
    """
    with contextlib.ExitStack() as held:
        token = held.enter_context(_token_in(checkpoints))
        nodes = _Nodes()
        if start is None:
            nodes.connections[0] = held.enter_context(_this_node(host))
        held.enter_context(nodes.closed_at_the_end())
        awaited = range(0 if start is not None else 1, len(names))
        held.enter_context(_connected(nodes, awaited, folder, host, start, wait_s))
        return _Examination(config, names, checkpoints, token, nodes).run()


class _Examination:
    def __init__(self, config: RunConfig, names: Sequence[str], checkpoints: Path, token: str, nodes: "_Nodes") -> None:
        self._config = config
        self._names = names
        self._checkpoints = checkpoints
        self._token = token
        self._nodes = nodes

    def run(self) -> list[NodeMeasurements]:
        examined = self._collect_facts()
        clocks = {node: self._clock(node) for node in examined}
        writes = self._write([node for node, seen in examined.items() if seen.facts.sees_folder])
        targets, links = self._links(examined)
        reports = []
        for node, name in enumerate(self._names):
            failure = self._nodes.failures.get(node, "")
            if failure:
                reports.append(NodeMeasurements(name=name, failure=failure))
                continue
            reports.append(
                NodeMeasurements(
                    name=name,
                    facts=examined[node].facts,
                    clock=clocks[node],
                    write=writes.get(node),
                    link_to=self._names[targets[node]] if node in targets else "",
                    link=links.get(node),
                )
            )
        return reports

    def _collect_facts(self) -> dict[int, _NodeExamined]:
        num_nodes = len(self._names)
        orders = {
            node: _FactsWanted(
                data=self._config.data,
                control=self._config.control,
                ports=own_etcd_ports(self._config, node, num_nodes),
                folder=self._checkpoints,
                token=self._token,
            )
            for node in range(num_nodes)
        }
        return self._nodes.ask(orders, _FACTS_S)

    def _clock(self, node: int) -> ClockOffset | None:
        """The quickest of several readings of the node's clock, because it has the smallest error."""
        readings = []
        for _ in range(_NUM_TIMES):
            before_s = time.time()
            answer = self._nodes.ask({node: _TellTime()}, _TIME_S)
            after_s = time.time()
            if node in answer:
                ahead_s = answer[node] - (before_s + after_s) / 2
                readings.append(ClockOffset(ahead_s=ahead_s, error_s=(after_s - before_s) / 2))
        return min(readings, key=lambda clock: clock.error_s, default=None)

    def _write(self, nodes: Sequence[int]) -> dict[int, Rate]:
        """Write speeds with as many nodes at once as write a checkpoint together; of very many nodes a sample."""
        at_once = nodes_per_group(self._config)
        rounds = [nodes[first : first + at_once] for first in range(0, len(nodes), at_once)]
        rates: dict[int, Rate] = {}
        for together in rounds[:: -(-len(rounds) // _MOST_ROUNDS) or 1]:
            orders = {node: _Write(file=self._checkpoints / f"{self._token}-{node}") for node in together}
            rates |= self._nodes.ask(orders, _WRITE_S)
        return rates

    def _links(self, examined: Mapping[int, _NodeExamined]) -> tuple[dict[int, int], dict[int, Rate]]:
        """Each node sends to the next one in a ring, all at once. Returns the targets and the speeds."""
        ring = sorted(node for node in examined if node not in self._nodes.failures)
        if len(ring) < 2:
            return {}, {}
        targets = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
        orders = {
            node: _Send(host=examined[to].host, port=examined[to].port, key=examined[to].key)
            for node, to in targets.items()
        }
        return targets, self._nodes.ask(orders, _SEND_S)


class _Nodes:
    """The driver's connections to the nodes, and why others have none."""

    def __init__(self) -> None:
        self.connections: dict[int, Connection] = {}
        self.failures: dict[int, str] = {}

    def ask(self, orders: Mapping[int, object], limit_s: float) -> dict[int, Any]:
        """Sends the requests and returns the answers. Nodes that do not answer are dropped."""
        pending: dict[Connection, int] = {}
        for node, order in orders.items():
            connection = self.connections.get(node)
            if connection is not None:
                with contextlib.suppress(OSError):  # found gone below
                    connection.send(order)
                pending[connection] = node
        answers, end_s = {}, time.monotonic() + limit_s
        while pending and (left_s := end_s - time.monotonic()) > 0:
            ready = wait(list(pending), left_s)
            for connection in [connection for connection in pending if connection in ready]:
                node = pending.pop(connection)
                try:
                    answers[node] = connection.recv()
                except (EOFError, OSError):
                    self._lose(node, "its process ended during the examination; see its output there")
        for node in pending.values():
            self._lose(node, f"no answer within {limit_s:g} s; a file system or a GPU there may hang")
        return answers

    @contextlib.contextmanager
    def closed_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            for connection in self.connections.values():
                connection.close()

    def _lose(self, node: int, failure: str) -> None:
        self.failures[node] = failure
        self.connections.pop(node).close()


@contextlib.contextmanager
def _connected(
    nodes: _Nodes, awaited: Sequence[int], folder: Path, host: str, start: StartNode | None, wait_s: float
) -> Iterator[None]:
    """Connects the nodes and notes why some are missing. Their processes end with the block."""
    if not awaited:
        yield
        return
    logs = folder / "doctor"
    is_new = not folder.exists()
    logs.mkdir(parents=True, exist_ok=True)
    steps: dict[int, subprocess.Popen[bytes]] = {}
    listeners = {node: Listener(folder, node, host) for node in awaited}
    try:
        if start is not None:
            steps = {node: start(node, _log(logs, node)) for node in awaited}
        _await(nodes, listeners, steps, logs, wait_s)
        for node in listeners:
            missing = f"`spare doctor --node {node} --folder {folder}` did not connect from there within {wait_s:g} s"
            nodes.failures[node] = f"{missing}; is {folder} on storage that all nodes share?"
        yield
    finally:
        for listener in listeners.values():
            listener.close()
        for connection in nodes.connections.values():
            connection.close()
        _end_steps(steps.values())
        _clear(folder, logs, is_new=is_new)


def _await(
    nodes: _Nodes,
    listeners: dict[int, Listener],
    steps: Mapping[int, subprocess.Popen[bytes]],
    logs: Path,
    wait_s: float,
) -> None:
    """Waits for the nodes. Removes the listeners of those that have connected or never will."""
    end_s = time.monotonic() + wait_s
    while listeners and time.monotonic() < end_s:
        ready = wait([listener.fileno() for listener in listeners.values()], _POLL_S)
        for node, listener in list(listeners.items()):
            if listener.fileno() in ready and (connection := listener.accept()) is not None:
                nodes.connections[node] = connection
            elif node in steps and steps[node].poll() is not None:
                printed = _log(logs, node).read_text(errors="replace").strip().splitlines()
                nodes.failures[node] = f"its step has ended: {printed[-1] if printed else 'it printed nothing'}"
            else:
                continue
            listeners.pop(node).close()


def _log(logs: Path, node: int) -> Path:
    return logs / f"node-{node:04d}.log"


def _end_steps(steps: Collection[subprocess.Popen[bytes]]) -> None:
    """Waits for the processes to end with their connections, then signals them."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + _END_S
        for step in steps:
            if number is not None:
                step.send_signal(number)  # not to one that has ended
        for step in steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(max(0.0, end_s - time.monotonic()))


def _clear(folder: Path, logs: Path, *, is_new: bool) -> None:
    for log in logs.glob("node-*.log"):
        log.unlink()
    with contextlib.suppress(OSError):  # other files are there
        logs.rmdir()
        (folder / "nodes").rmdir()
        if is_new:
            folder.rmdir()


@contextlib.contextmanager
def _token_in(folder: Path) -> Iterator[str]:
    """Creates a file by which other nodes recognize the folder. Removes it and new folders at the end."""
    token = f".doctor-{secrets.token_hex(8)}"
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / token).touch(exist_ok=False)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written from here: {error.strerror}; change its owner, or set checkpoint.folder or "
            f"--folder to another"
        ) from error
    try:
        yield token
    finally:
        with contextlib.suppress(OSError):
            (folder / token).unlink()
            for path in made:
                path.rmdir()


@contextlib.contextmanager
def _this_node(host: str) -> Iterator[Connection]:
    """Serves the first node in a thread, where it is this machine."""
    ours, theirs = Pipe()
    threading.Thread(target=_answer_requests, args=(theirs, host), daemon=True).start()
    yield ours


def _answer_requests(driver: Connection, host: str) -> None:
    with Sink(host) as sink, contextlib.suppress(EOFError, OSError):
        while True:
            match driver.recv():
                case _FactsWanted(data=data, control=control, ports=ports, folder=folder, token=token):
                    facts = examine_node(data=data, control=control, ports=ports, folder=folder, token=token)
                    driver.send(_NodeExamined(facts=facts, host=host, port=sink.port, key=sink.key))
                case _TellTime():
                    driver.send(time.time())
                case _Write(file=file):
                    driver.send(write_speed(file))
                case _Send(host=to, port=port, key=key):
                    driver.send(send_speed(to, port, key))
