"""What a machine keeps when it takes another place, and what a supervisor leaves out when it re-forms groups."""

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.core.log.entries import Halt, encode_entry
from spare_megatron.core.machines.places import Assignment, Holding, Quarantine
from spare_megatron.core.slow_machines.examination_rules import Figures
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import ExaminationRecord
from spare_megatron.machine.gpus import XidWatch
from spare_megatron.process.reports import EndAsked, NodeEnded
from spare_megatron.process.requests import request
from spare_megatron.process.specs import NodeSpec
from spare_megatron.slow_machines.examination import ExaminationWanted
from spare_megatron.stacking.layout import GroupId, MachineId, PlaceId
from spare_megatron.store import keys
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process, supervisor
from spare_megatron.supervisor.places.group_reforming import Assigned, AssignmentList, PlaceTaken
from spare_megatron.supervisor.store_watch import PlaceChanged
from tests.unit.memory_store import MemoryStore

NUM_NODES = 6
TAKEN = PlaceTaken(
    holding=Holding(MachineId(2), PlaceId(1), 1),
    by=Assigned(index=0, assignment=Assignment(holdings=(Holding(MachineId(2), PlaceId(1), 1),))),
)
"""Machine 2 takes place 1."""


def spec_of(run_dir: Path, *, node: int = 2, rejoins: int = 3, minutes: float | None = None) -> NodeSpec:
    """Groups of two machines: two from the start, and a further one."""
    config = RunConfig(
        layout=LayoutConfig(num_groups=2, max_groups=3, pipeline_parallel=2),
        cluster=ClusterConfig(device="cpu", num_nodes=NUM_NODES, notice_file="/run/notice-{node}"),
        spare=SpareConfig(redundancy=2, rejoins=rejoins),
        train=TrainConfig(max_minutes=minutes),
    )
    return NodeSpec(
        config=config,
        run_dir=run_dir,
        node=node,
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        faults=(),
        rank_main=lambda spec, reports: None,
    )


def test_the_clock_of_a_run_and_a_request_to_end_it_last_when_a_machine_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train.max_minutes` would begin anew with each place, and a request to end the run be lost with the last one."""
    now_s, ends_at_s = [100.0], []
    asked: list[tuple[int, EndAsked]] = []

    class TwoPlaces:
        budget = None

        def __init__(self, spec: NodeSpec, *_: object) -> None:
            self.place = spec.node
            self.end_requests = self
            self.asked: EndAsked | None = None
            ends_at_s.append((spec.node, spec.ends_at_s))

        def run(self) -> str | PlaceChanged:
            now_s[0] += 50.0
            return PlaceChanged(to=TAKEN) if len(ends_at_s) == 1 else ""

        def leave(self) -> None:
            listeners[-1](signal.SIGTERM)  # the signal comes now

        def close(self, end: str) -> bool:
            return False

        def on_signal(self, number: signal.Signals) -> None:
            self.on_asked(EndAsked(by=number.name, limit_s=20.0))

        def on_asked(self, request: EndAsked) -> None:
            self.asked = request
            asked.append((self.place, request))

        def poll(self) -> EndAsked | None:
            return self.asked

    listeners: list[Callable[[signal.Signals], None]] = []

    monkeypatch.setattr(node_process, "Supervisor", TwoPlaces)
    monkeypatch.setattr(node_process, "DriverLink", lambda *_, **__: None)
    monkeypatch.setattr(node_process.processes, "log_to_file", lambda *_: None)
    monkeypatch.setattr(node_process, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(node_process.end_signal, "listen", listeners.append)
    node_process.look_after(spec_of(tmp_path, minutes=2.0), None)  # type: ignore[arg-type]
    assert ends_at_s == [(2, 220.0), (1, 220.0)]
    request = EndAsked(by="SIGTERM", limit_s=20.0)
    assert asked == [(2, request), (1, request)]


class Waiting:
    """A machine that has lost its place to another one in quarantine, and the examinations that it starts."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = replace(spec_of(tmp_path, node=1), run_dir=tmp_path)
        control = replace(self.spec.config.control, heartbeat_interval_s=0.02)
        self.spec = replace(self.spec, config=replace(self.spec.config, control=control))
        self.store = MemoryStore({keys.beat(place): "1" for place in range(NUM_NODES)})
        self.list = AssignmentList(self.store, self.spec.config.parallel)  # type: ignore[arg-type]
        self.list.quarantine(Quarantine(MachineId(1), PlaceId(1), "outvoted", "audit"))
        self.list.append(Assignment(holdings=(Holding(MachineId(2), PlaceId(1), 1),)))
        self.products = ["wrong", "right"]
        self.closed: list[object] = []
        self.reports: list[object] = []
        monkeypatch.setattr(node_process, "open_store", lambda _: self.store)

    def start(self, wanted: ExaminationWanted) -> None:
        """Answers for all machines; this one computes wrongly the first time."""
        for machine in range(NUM_NODES):
            product = self.products[min(wanted.number, 1)] if machine == 1 else "right"
            figures = Figures(digests=(product,), product_s=1.0, copy_s=1.0, answer_s=0.01, exchange_s=0.1)
            self.store.put(keys.examined(wanted.examined, wanted.number, machine), json.dumps(asdict(figures)))

    def take_place(self) -> PlaceTaken | None:
        link = SimpleNamespace(pipes=[], report=self.reports.append, close=self.closed.append)
        examiner = SimpleNamespace(start=self.start, end_all=lambda: None)
        return node_process._take_place(self.spec, MachineId(1), link, examiner)  # type: ignore[arg-type]


def test_a_machine_in_quarantine_takes_a_place_once_it_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Waiting(tmp_path, monkeypatch)
    taken = machine.take_place()
    assert taken is not None
    assert (taken.holding.machine, taken.holding.place) == (1, 2), "that which the other one has left"
    assert taken.by.assignment.released == (1,), "by the same entry"
    found = read_journal(tmp_path).of(ExaminationRecord)
    assert [record.reason == "" for record in found] == [False, True]
    assert len(machine.reports) == 2
    assert machine.closed == []


def test_a_machine_in_quarantine_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Waiting(tmp_path, monkeypatch)
    machine.products = ["wrong", "wrong"]
    halt = encode_entry(Halt(step=0, reason="diverged"))
    put = machine.store.put

    def put_and_halt(key: str, value: str) -> None:
        put(key, value)
        if key == keys.examination(1):
            put(keys.entry(0), halt)

    machine.store.put = put_and_halt  # type: ignore[method-assign]
    assert machine.take_place() is None
    assert machine.closed == [NodeEnded(node=1, exits={})]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a supervisor gives to its threads."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(supervisor.store_watch, "StoreLink", lambda **parts: found.update(parts))
    monkeypatch.setattr(supervisor, "RequestWatch", lambda *parts: found.update(requests=parts))
    return found


def supervise(spec: NodeSpec, taken: PlaceTaken | None = None) -> None:
    driver = SimpleNamespace(report=lambda report: None, listener=None)
    supervisor.Supervisor(spec, driver, None, SimpleNamespace(), XidWatch(()), taken)  # type: ignore[arg-type]


def test_the_notice_of_a_machine_is_its_own_in_each_place(tmp_path: Path, parts: dict[str, Any]) -> None:
    """Its groups are those of its present place."""
    supervise(spec_of(tmp_path, node=2))
    assert parts["requests"][1:3] == ([1], "/run/notice-2")
    supervise(spec_of(tmp_path, node=1), TAKEN)
    assert parts["requests"][1:3] == ([0], "/run/notice-2")
    replaced = Holding(MachineId(2 + NUM_NODES), PlaceId(1), 2)
    taken = PlaceTaken(holding=replaced, by=Assigned(index=1, assignment=Assignment(holdings=(replaced,))))
    supervise(spec_of(tmp_path, node=1), taken)
    assert parts["requests"][2] == "/run/notice-2", "the machine that stands for it is on the same node"


@pytest.mark.parametrize(("rejoins", "is_on"), [(0, False), (1, True)])
def test_without_rejoins_no_group_is_re_formed(
    tmp_path: Path, parts: dict[str, Any], rejoins: int, is_on: bool
) -> None:
    supervise(spec_of(tmp_path, rejoins=rejoins))
    assert (parts["reforming"] is not None) == is_on


def test_further_groups_that_are_not_asked_for_are_left_out_of_what_is_re_formed(
    tmp_path: Path, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both where groups are re-formed and where a machine takes a place; also if the requests cannot be read."""
    further = frozenset({GroupId(2)})
    spec = spec_of(tmp_path)
    supervise(spec)
    assert parts["reforming"]._left_out() == node_process._left_out(spec) == further
    request(tmp_path, [GroupId(2)], "grow")
    request(tmp_path, [GroupId(0)], "drain")
    assert node_process._left_out(spec) == {0}

    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(node_process, "asked_to_leave", fail)
    assert node_process._left_out(spec) == further
