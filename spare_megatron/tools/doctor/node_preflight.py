"""Examines all nodes before a run: the driver's process sends requests to one process on each node."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.frames import Address
from spare_megatron.process.node_connection import connect
from spare_megatron.tools.doctor.diagnosis import (
    ClockOffset,
    NodeFacts,
    NodeMeasurements,
    Rate,
    nodes_per_group,
    own_etcd_ports,
)
from spare_megatron.tools.doctor.node_processes import Meeting, NodeProcesses, connected, served_here
from spare_megatron.tools.doctor.node_survey import FactsWanted, Sink, examine_node, send_speed, write_speed

_FACTS_S, _WRITE_S, _SEND_S, _TIME_S = 120.0, 60.0, 30.0, 10.0
"""Longest wait for a node's answer to each request."""
_NUM_TIMES = 8
_MOST_ROUNDS = 64
"""Limit of consecutive write tests, about a second each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeExamined:
    facts: NodeFacts
    sink: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Send:
    to: Address


class _TellTime:
    """Asks for the node's clock."""


def serve_examination(folder: Path, node: int, wait_s: float) -> None:
    """Main function of the process on a node other than the driver's. Raises ValueError if no driver awaits it."""
    with connect(folder, node, wait_s) as driver:
        with socket.socket(fileno=os.dup(driver.fileno())) as same:
            host = str(same.getsockname()[0])
        _answer_requests(driver, host)


def examine(config: RunConfig, names: Sequence[str], checkpoints: Path, meeting: Meeting) -> list[NodeMeasurements]:
    """Examines all nodes, named in the order of the run. ValueError: `checkpoints` cannot be written from here.

    The folder `checkpoints` is created for the time of the examination if it is missing. If the meeting starts no
    processes, the first node is this one.
    """
    with contextlib.ExitStack() as held:
        token = held.enter_context(_token_in(checkpoints))
        nodes = NodeProcesses()
        if meeting.start is None:
            nodes.connections[0] = held.enter_context(served_here(partial(_answer_requests, host=meeting.host)))
        held.callback(nodes.close)
        held.enter_context(connected(nodes, range(0 if meeting.start is not None else 1, len(names)), meeting))
        return _Examination(config, names, checkpoints, token, nodes).run()


@dataclass(frozen=True, slots=True)
class _Examination:
    _config: RunConfig
    _names: Sequence[str]
    _checkpoints: Path
    _token: str
    _nodes: NodeProcesses

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
            node: FactsWanted(
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
        orders = {node: _Send(to=examined[to].sink) for node, to in targets.items()}
        return targets, self._nodes.ask(orders, _SEND_S)


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


def _answer_requests(driver: Connection, host: str) -> None:
    with Sink(host) as sink, contextlib.suppress(EOFError, OSError):
        while True:
            match driver.recv():
                case FactsWanted() as wanted:
                    facts = examine_node(wanted)
                    driver.send(_NodeExamined(facts=facts, sink=sink.address))
                case _TellTime():
                    driver.send(time.time())
                case _Write(file=file):
                    driver.send(write_speed(file))
                case _Send(to=to):
                    driver.send(send_speed(to))
