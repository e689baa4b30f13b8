"""What is done with each of a thousand nodes is done with all at once, or with some."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.process import processes
from spare_megatron.process.processes import Child, stop_children
from spare_megatron.process.reports import StopProcess
from spare_megatron.tools.doctor import node_preflight as examination
from spare_megatron.tools.doctor.diagnosis import Rate


class FakeProcess:
    """A process, and the pipe to it, that write down what is done with them."""

    def __init__(self, calls: list[str], name: str, *, obeys: bool, is_gone: bool = False) -> None:
        self._calls = calls
        self._name = name
        self._obeys = obeys
        self._is_there = not is_gone
        self._is_gone = is_gone

    def send(self, order: object) -> None:
        if self._is_gone:
            raise BrokenPipeError
        assert order == StopProcess()
        self._calls.append(f"stop {self._name}")

    def join(self, timeout_s: float) -> None:
        self._calls.append(f"join {self._name}")
        if self._obeys:
            self._is_there = False

    def is_alive(self) -> bool:
        return self._is_there

    def kill(self) -> None:
        self._calls.append(f"kill {self._name}")
        self._is_there = False

    def close(self) -> None:
        self._calls.append(f"close {self._name}")


def child(calls: list[str], name: str, **kind: Any) -> Child:
    fake: Any = FakeProcess(calls, name, **kind)
    return Child(process=fake, reports=fake)


def test_all_processes_are_asked_to_stop_before_any_is_waited_for() -> None:
    """One after the other took up to four seconds each."""
    calls: list[str] = []
    stop_children([child(calls, name, obeys=name != "b", is_gone=name == "c") for name in "abcd"])
    assert calls[:3] == ["stop a", "stop b", "stop d"]
    assert calls[3:7] == ["join a", "join b", "join c", "join d"]
    assert [word for word in calls if word.startswith("kill")] == ["kill b"]
    assert {f"close {name}" for name in "abcd"} <= set(calls)


def test_all_share_one_time_to_end_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    waited: list[float] = []

    class Deaf(FakeProcess):
        def join(self, timeout_s: float) -> None:
            if self.is_alive():
                waited.append(timeout_s)
                now_s[0] += timeout_s

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    fakes: list[Any] = [Deaf([], str(index), obeys=False) for index in range(100)]
    stop_children([Child(process=fake, reports=fake) for fake in fakes])
    assert not any(fake.is_alive() for fake in fakes)
    assert sum(waited) == now_s[0] == waited[0]


class Asked:
    """Nodes that note who was asked at once."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def ask(self, orders: Mapping[int, object], limit_s: float) -> dict[int, Rate]:
        self.rounds.append(sorted(orders))
        return {node: Rate(bytes_per_s=1.0) for node in orders}


@pytest.mark.parametrize(
    ("num_nodes", "nodes_per_group", "expected"),
    [
        (0, 1, []),
        (3, 1, [[0], [1], [2]]),
        (5, 2, [[0, 1], [2, 3], [4]]),
        (64, 1, [[node] for node in range(64)]),
        (65, 1, [[node] for node in range(0, 65, 2)]),
        (1000, 1, [[node] for node in range(0, 1000, 16)]),
        (1000, 4, [[node, node + 1, node + 2, node + 3] for node in range(0, 1000, 16)]),
    ],
)
def test_of_very_many_nodes_some_that_stand_apart_are_asked_to_write(
    num_nodes: int, nodes_per_group: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand took a second each."""
    monkeypatch.setattr(examination, "nodes_per_group", lambda config: nodes_per_group)
    config = RunConfig(layout=LayoutConfig(num_groups=3), cluster=ClusterConfig(launcher="hand", num_nodes=3))
    nodes: Any = Asked()
    names = [str(node) for node in range(num_nodes)]
    rates = examination._Examination(config, names, Path("checkpoints"), "token", nodes)._write(range(num_nodes))
    assert nodes.rounds == expected
    assert set(rates) == {node for together in expected for node in together}
    assert len(nodes.rounds) <= 64
