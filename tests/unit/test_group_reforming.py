"""Machines of broken groups take places of others, and what they keep when they do: small histories, drawn by hand."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue
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
from spare_megatron.stacking.layout import GroupId, MachineId, Member, PlaceId
from spare_megatron.store import keys
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process, supervisor
from spare_megatron.supervisor.places.group_reforming import Assigned, AssignmentList, GroupReforming, PlaceTaken
from spare_megatron.supervisor.store_watch import PlaceChanged
from tests.protocol.machines import INTERVAL_S, TICK_S, World, clocked, config_of, found_in, settle
from tests.unit.memory_store import MemoryStore

MakeWorld = Callable[[RunConfig], World]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    worlds: list[World] = []
    with clocked() as clock:

        def make(config: RunConfig) -> World:
            worlds.append(World(clock, 0, config))
            return worlds[-1]

        yield make
        for world in worlds:
            world.close()


def test_machines_of_two_broken_groups_make_one_whole(make_world: MakeWorld) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    world.lose_machine(0)
    world.tick(24)
    assert world.whole() == {1, 2, 3}
    assert world.records == [], "one group alone has no use for its machine"
    world.lose_machine(3)
    lost_at_s = world.clock.now_s
    settle(world)
    assert world.whole() == {0, 2, 3}
    assert world.clock.now_s - lost_at_s <= 4.5 * INTERVAL_S
    (record,) = {record.index: record for record in world.records}.values()
    assert record.holdings == [[2, 0, 1]]
    assert record.places == [[0, None], [1, 1], [2, 2], [3, None]]
    assert found_in(world) == []


def test_a_group_that_is_asked_to_leave_is_not_made_whole_and_gives_no_machine(make_world: MakeWorld) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    world.left_out = frozenset({GroupId(0)})
    for machine in (0, 3):
        world.lose_machine(machine)
    world.tick(24)
    assert world.records == []
    world.lose_machine(5)
    world.tick(24)
    assert world.whole() == {1, 3}
    assert [record.holdings for record in world.records[:1]] == [[[4, 3, 1]]]


def test_machines_of_groups_that_have_left_go_without_a_fence_and_the_groups_are_re_formed_if_asked_for(
    make_world: MakeWorld,
) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    world.drain_group(0)
    world.tick(8)
    world.lose_machine(0)
    world.tick(24)
    world.replace_machine(0)
    world.tick(8)
    assert not world.store.exists(keys.entry(0)), "a fence costs the others a reduction"
    assert world.whole() == {1, 2, 3}
    world.lose_machine(8)
    world.lose_machine(3)
    world.tick(24)
    assert world.whole() == {2, 3}
    world.ask_for_groups()
    settle(world)
    assert world.whole() == {0, 2, 3}
    assert found_in(world) == []


def test_a_machine_that_loses_its_group_again_and_again_leaves_its_place_and_the_others_lose_no_restart(
    make_world: MakeWorld,
) -> None:
    world = make_world(config_of(4, 2, rejoins=2))
    world.tick(8)
    for group, machine in ((0, 0), (1, 3)):
        for num_losses in range(1, 4):
            assert group in world.whole()
            world.machines[machine].lose(is_own=True)
            world.tick(round((4 + 2**num_losses) * INTERVAL_S / TICK_S))
    settle(world)
    world.tick(8)
    assert set(world.machines) == {1, 2, 3, 4, 5, 6, 7}, "machine 2 has the place of machine 0"
    assert len(world.whole()) == 3
    assert found_in(world) == []
    survivors = [world.machines[machine] for machine in (1, 2)]
    for _ in range(2):
        survivors[0].lose(is_own=True)
        settle(world)
    assert len(world.whole()) == 3, "losses that began on the other machine do not count on this one"


def test_a_replacement_is_waited_for_as_long_as_it_may_take(make_world: MakeWorld) -> None:
    world = make_world(config_of(2, 2, reform_after_s=20.0))
    world.tick(8)
    world.lose_machine(0)
    world.lose_machine(3)
    world.tick(round(19.0 / TICK_S))
    assert world.records == []
    world.replace_machine()
    world.tick(round(8.0 / TICK_S))
    assert len(world.whole()) == 1
    assert {len(record.places) for record in world.records} == {0}, "it has its machine's place, and no group moves"


def test_a_machine_that_is_lost_on_its_way_is_replaced_by_another(make_world: MakeWorld) -> None:
    world = make_world(config_of(4, 2))
    world.tick(8)
    for machine in (0, 3, 5):
        world.lose_machine(machine)
    while not world.records:
        world.tick()
    (mover,) = {machine for record in world.records for machine, *_ in record.holdings}
    world.lose_machine(mover)
    settle(world)
    assert world.num_moves > 0
    assert len(world.whole()) == 2
    assert found_in(world) == []


def test_one_that_comes_back_to_a_taken_place_takes_the_one_that_was_left(make_world: MakeWorld) -> None:
    world = make_world(config_of(2, 2))
    world.tick(8)
    world.suspended.add(0)
    world.lose_machine(3)
    settle(world)
    assert world.whole() == {0}
    world.resume_machine()
    world.tick(16)
    assert world.whole() == {0}
    assert {one.place for one in world.active} == {0, 1, 2}
    world.replace_machine()
    settle(world)
    assert world.whole() == {0, 1}
    assert found_in(world) == []


def test_a_group_waits_for_a_machine_until_it_has_come_whatever_the_former_one_of_its_place_published(
    make_world: MakeWorld,
) -> None:
    """The one that left the place was ready for the same incarnation, and the place is given a beat before it comes."""
    world = make_world(config_of(2, 2))
    world.tick(8)
    world.suspended.add(0)
    world.lose_machine(3)
    settle(world)
    world.replace_machine(3)
    world.tick(16)
    assert world.whole() == {0}
    world.resume_machine()
    settle(world)
    assert world.whole() == {0, 1}
    assert {one.member for one in world.active} == {Member(GroupId(0), 1), Member(GroupId(1), 1)}


def test_a_machine_lost_while_places_are_read_is_not_counted_on() -> None:
    """Its successor took it for lost, as whom to leave the assignment to, and for alive, as the holder of a place."""
    config = config_of(4, 2)
    nodes = range(config.parallel.num_nodes)

    class Store(MemoryStore):
        def get(self, wanted: Sequence[str]) -> list[str | None]:
            found = super().get(wanted)
            if len(wanted) > 1 and keys.last_beat(1) in wanted and self.lose_next:
                self.values[keys.last_beat(1)] = self.values[keys.beat(1)]
            return found

        lose_next = False

    store = Store({keys.ALL_GROUPS_READY: "1", **{keys.beat(node): "7" for node in nodes}})
    for node in (0, 3, 5):
        store.put(keys.last_beat(node), "7")
    for group in range(3):
        store.put(keys.part_fenced(Member(GroupId(group), 0)), '[0, 0, ""]')
    assignments = AssignmentList(store, config.parallel)
    reforming = GroupReforming(config, MachineId(2))
    store.lose_next = True
    assert reforming.poll(store, assignments, PlaceId(2)) is None, "by what was read machine 1 is to do it"
    assigned = reforming.poll(store, assignments, PlaceId(2))
    assert assigned is not None
    assert assigned.assignment.holdings == (Holding(MachineId(4), PlaceId(3), 1),)


def sizes_of(world: World) -> dict[int, int]:
    """The stages of the groups that train."""
    return {group: len(world.places_of(member)) for group, member in sorted(world.training.items())}


def test_a_group_goes_on_with_fewer_stages_and_grows_with_the_machine_that_comes(make_world: MakeWorld) -> None:
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.lose_machine(1)
    world.tick(40)
    assert sizes_of(world) == {0: 3, 1: 4, 2: 4}
    world.replace_machine(1)
    settle(world)
    assert sizes_of(world) == {0: 4, 1: 4, 2: 4}
    assert world.training[GroupId(0)].incarnation == 2
    assert [[record.holdings, record.stages] for record in {one.index: one for one in world.records}.values()] == [
        [[[3, 1, 1]], [[0, 3]]],
        [[[13, 3, 1]], [[0, 4]]],
    ]
    assert found_in(world) == []


def test_a_machine_that_was_only_silent_lets_its_group_grow_again(make_world: MakeWorld) -> None:
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.suspended.add(3)
    world.tick(40)
    assert sizes_of(world) == {0: 3, 1: 4, 2: 4}
    world.suspended.clear()
    settle(world)
    assert sizes_of(world) == {0: 4, 1: 4, 2: 4}
    assert found_in(world) == []


def test_a_machine_that_its_group_does_without_takes_a_place_of_a_broken_group(make_world: MakeWorld) -> None:
    """Machine 3 comes back while two machines of group 1 are lost, before either has written anything."""
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.suspended.add(3)
    world.tick(40)
    places = AssignmentList(world.store, world.layout).read()
    reforming = GroupReforming(world.config, MachineId(4))
    world.suspended.clear()
    world.tick(1)
    assert reforming._idle(world.store, places, places.smaller_groups) == (3,)
    assert places.reform([PlaceId(6), PlaceId(7)], 1, {}, (MachineId(3),), world.config.pipeline_times).holdings == (
        Holding(MachineId(3), PlaceId(6), 1),
    )


def test_a_slow_machine_that_its_group_does_without_holds_nobody_up(make_world: MakeWorld) -> None:
    """Its group was asked to leave in each of its incarnations, since a place of it has a slow machine."""
    world = make_world(config_of(3, 4, 3))
    world.tick(8)
    world.call_slow(3)
    world.suspended.add(3)
    world.tick(60)
    assert sizes_of(world) == {0: 3, 1: 4, 2: 4}
    assert world.training[GroupId(0)].incarnation == 1
    assert world.assignments.counts["quarantine, slow"] == 1


def test_a_machine_that_comes_to_a_further_place_moves_to_the_next_one_of_its_group(make_world: MakeWorld) -> None:
    """Machines 6 and 7 are lost, and 7 is replaced: group 1 has three machines, but not in its first places."""
    world = make_world(config_of(3, 4, 2))
    world.tick(8)
    world.lose_machine(6)
    world.lose_machine(7)
    world.tick(60)
    assert sizes_of(world) == {0: 4, 1: 2, 2: 4}
    world.replace_machine(7)
    settle(world)
    assert sizes_of(world) == {0: 4, 1: 3, 2: 4}
    records = {record.index: record for record in world.records}
    assert [record.holdings for record in records.values()] == [[[19, 7, 1]], [[19, 6, 1]]]
    assert found_in(world) == []


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
    node_process.look_after(spec_of(tmp_path, minutes=2.0), None, Queue())  # type: ignore[arg-type]
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
