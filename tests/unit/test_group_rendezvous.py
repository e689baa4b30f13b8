"""Groups whose ranks span several nodes start each incarnation on all of them together."""

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL, ENDED
from spare_megatron.core.machines.group_starts import PartReadiness, RestartBudget
from spare_megatron.core.machines.places import Assignment, Holding, Places
from spare_megatron.machine import timers
from spare_megatron.machine.timers import Timers
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member, PlaceId
from spare_megatron.store import keys
from spare_megatron.supervisor import restarts
from spare_megatron.supervisor.places import group_rendezvous
from spare_megatron.supervisor.places.group_rendezvous import GroupRendezvous, PartFenced, PartsReady, is_without
from spare_megatron.supervisor.restarts import GroupRestarts
from tests.unit.memory_store import MemoryStore

GROUP = GroupId(0)
INTERVAL_S = 1.0
TICK_S = INTERVAL_S / BEATS_PER_INTERVAL
LAYOUT = Layout(num_groups=2, pipeline_parallel=2, num_nodes=4)


def places_in(store: MemoryStore, layout: Layout) -> Places:
    """What the list of assignments says if each supervisor of a node is on a machine of that number."""
    places = Places(layout)
    for node, text in enumerate(store.get([f"life/{node}" for node in range(layout.num_nodes)])):
        places.apply(Assignment(holdings=(Holding(MachineId(node), PlaceId(node), int(text or 0)),)))
    return places


# ----------------------------------------------------------------------------------------------------- who is there


def looks(*beats: tuple[str | None, str | None], ready: Sequence[int] = (4, 5)) -> list[bool]:
    """What is found of nodes 4 and 5 with these beats, a tick apart."""
    gathering = PartReadiness(INTERVAL_S)
    return [gathering.poll(ready, {4: a, 5: b}, TICK_S * tick) for tick, (a, b) in enumerate(beats)]


def test_nodes_are_present_that_have_reported_and_beat() -> None:
    assert looks(("1", "7"), ("2", "8")) == [False, True]
    assert looks(("1", "7"), ("2", "8"), ready=(4,)) == [False, False]
    assert looks(("1", None), ("2", None)) == [False, False]


def test_a_heartbeat_that_does_not_change_is_no_sign_of_life() -> None:
    """Neither the last one of a node that is gone, nor one that has moved an interval ago."""
    assert looks(*[(str(beat), "7") for beat in range(8)]) == [False] * 8
    assert looks(*[(str(beat), str(min(beat, 1))) for beat in range(8)]) == [False] + [True] * 4 + [False] * 3


def test_a_node_that_begins_to_beat_or_beats_again_is_there() -> None:
    assert looks(("1", None), ("2", "1"), ("3", "2")) == [False, True, True]
    still = [(str(beat), "7") for beat in range(6)]
    assert looks(*still, ("6", None), ("7", "1"))[-2:] == [False, True]


# ---------------------------------------------------------------------------------------------- what is reported


class Clock:
    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (timers, group_rendezvous, restarts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


class OneNode:
    """A node that beats and polls when the test says so. `stages`: of the group, as the node has read the list."""

    def __init__(
        self,
        store: MemoryStore,
        clock: Clock,
        node: int,
        incarnation: int = 0,
        layout: Layout = LAYOUT,
        stages: int | None = None,
    ) -> None:
        self.events: list[PartsReady | PartFenced] = []
        self.parts = GroupRendezvous(layout, node, incarnation, INTERVAL_S, self.on_event)
        self.store, self.clock, self.node = store, clock, node
        self.layout, self.stages = layout, stages
        if incarnation:
            store.put(f"life/{node}", str(incarnation))

    def on_event(self, event: PartsReady | PartFenced) -> None:
        self.events.append(event)

    def look(self, num_looks: int = 1, beat: str = "") -> None:
        for _ in range(num_looks):
            self.clock.now_s += TICK_S / 2  # the other node beats as often
            self.store.put(f"beat/{self.node}", beat or str(self.clock.now_s))
            self.parts.poll(self.store, self.places)  # type: ignore[arg-type]

    def places(self) -> Places:
        places = places_in(self.store, self.layout)
        if self.stages is not None:
            places.apply(Assignment(holdings=(), stages=((GROUP, self.stages),)))
        return places

    def wait(self, member: Member) -> None:
        self.parts.publish_ready(self.store, member)  # type: ignore[arg-type]

    def fenced(self, member: Member) -> None:
        self.parts.publish_fence(self.store, member, 7, 1, "SIGKILL")  # type: ignore[arg-type]


def look_both(one: OneNode, other: OneNode) -> None:
    for _ in range(3):
        one.look()
        other.look()


NEXT = Member(GROUP, 1)


def test_all_nodes_start_as_soon_as_the_last_is_ready_and_name_the_incarnation_first(clock: Clock) -> None:
    store = MemoryStore()
    one, other = OneNode(store, clock, 0), OneNode(store, clock, 1)
    one.wait(NEXT)
    look_both(one, other)
    assert one.events == other.events == []
    assert store.get([keys.group_incarnation(GROUP)]) == [None]
    other.wait(NEXT)
    look_both(one, other)
    assert one.events == other.events == [PartsReady(member=NEXT)]
    assert store.get([keys.group_incarnation(GROUP)]) == ["1"]


def test_a_loss_is_reported_to_the_other_nodes_of_the_group_for_its_incarnation_alone(clock: Clock) -> None:
    store = MemoryStore()
    one, other, stranger = OneNode(store, clock, 0), OneNode(store, clock, 1), OneNode(store, clock, 2)
    one.fenced(Member(GROUP))
    for node in (one, other, stranger):
        node.look(2)
    assert other.events == [PartFenced(member=Member(GROUP), rank=1, cause="SIGKILL")]
    assert one.events == stranger.events == []
    found = [stranger.parts.find_fence(store, Member(GROUP, incarnation)) for incarnation in (0, 1)]  # type: ignore[arg-type]
    assert found == [7, None], "it need not be written again"
    other.parts.note_started(NEXT, None)
    other.look(2)
    assert len(other.events) == 1
    stranger.fenced(NEXT)  # it watches the first node
    one.parts.note_started(NEXT, None)
    look_both(one, other)
    assert one.events == [other.events[1]] == [PartFenced(member=NEXT, rank=1, cause="SIGKILL")]


def test_reports_of_a_lost_supervisor_do_not_count_even_when_its_node_is_back(clock: Clock) -> None:
    store = MemoryStore()
    one, lost = OneNode(store, clock, 0), OneNode(store, clock, 1)
    lost.wait(NEXT)
    lost.look(4)
    one.look(8)  # while the other is silent
    one.wait(NEXT)
    one.look(8)
    assert one.events == []
    back = OneNode(store, clock, 1, incarnation=1)
    look_both(one, back)
    assert one.events == []
    back.wait(NEXT)
    look_both(one, back)
    assert one.events == back.events == [PartsReady(member=NEXT)]


def test_no_node_starts_with_a_node_that_has_ended(clock: Clock) -> None:
    store = MemoryStore()
    one, other = OneNode(store, clock, 0), OneNode(store, clock, 1)
    other.wait(NEXT)
    one.wait(NEXT)
    other.look()
    one.look()
    other.look(beat=ENDED)
    one.look(2)
    assert one.events == []


# --------------------------------------------------------------------------------------------------- fewer stages

SHAPED = Layout(num_groups=2, pipeline_parallel=3, least_pipeline_parallel=2, num_nodes=6)


def shaped_nodes(store: MemoryStore, clock: Clock, *stages: int) -> list[OneNode]:
    return [OneNode(store, clock, node, layout=SHAPED, stages=number) for node, number in enumerate(stages)]


def look_all(nodes: Sequence[OneNode]) -> None:
    for _ in range(3):
        for node in nodes:
            node.look()


def test_a_smaller_group_starts_on_its_first_nodes_and_the_others_wait_for_its_end(clock: Clock) -> None:
    store = MemoryStore()
    nodes = shaped_nodes(store, clock, 2, 2, 2)
    for node in nodes:
        node.wait(NEXT)
    look_all(nodes)
    assert [node.events for node in nodes] == [[PartsReady(member=NEXT, stages=2)]] * 2 + [[]]
    assert [is_without(store, SHAPED, NEXT, node) for node in range(3)] == [False, False, True]  # type: ignore[arg-type]
    store.put(keys.has_left(NEXT, 0), "yes")
    look_all(nodes)
    assert nodes[2].events == [PartFenced(member=NEXT, rank=-1, cause="it has left the run")]


def test_the_first_node_to_start_decides_for_those_that_have_read_more_or_less_of_the_list(clock: Clock) -> None:
    store = MemoryStore()
    nodes = shaped_nodes(store, clock, 2, 3, 2)
    for node in nodes[:2]:
        node.wait(NEXT)
    look_all(nodes[1:2])
    assert nodes[1].events == [], "it has read that the third node is in the group, which is not ready"
    look_all(nodes)
    assert [node.events for node in nodes] == [[PartsReady(member=NEXT, stages=2)]] * 2 + [[]]


def test_a_smaller_group_grows_once_the_list_says_so(clock: Clock) -> None:
    store = MemoryStore()
    (node,) = shaped_nodes(store, clock, 2)
    assert node.parts.growing(node.places()) == frozenset(), "it has the whole pipeline"
    node.parts.note_started(NEXT, 2)
    assert node.parts.growing(node.places()) == frozenset()
    node.stages = 3
    assert node.parts.growing(node.places()) == {GROUP}
    node.parts.note_started(Member(GROUP, 2), None)
    assert node.parts.growing(node.places()) == frozenset()


# ------------------------------------------------------------------------------------------------------ histories


NUM_NODES = 3


class World:
    """A group of as many nodes, whose supervisors come and go, with what each of them does at a loss."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock, self.random, self.store = clock, random.Random(seed), MemoryStore()
        self.layout = Layout(num_groups=1, pipeline_parallel=NUM_NODES, num_nodes=NUM_NODES)
        self.nodes: list[Node | None] = [Node(self, node, 0) for node in range(NUM_NODES)]
        self.gone_at_s = dict.fromkeys(range(NUM_NODES), -1.0)
        self.num_incarnations = dict.fromkeys(range(NUM_NODES), 1)
        self.watcher = GroupRendezvous(self.layout, NUM_NODES, 0, INTERVAL_S, lambda _: None)  # a node of another group
        self.begun: dict[int, set[int]] = {}

    @property
    def present(self) -> list["Node"]:
        return [node for node in self.nodes if node is not None]

    def tick(self) -> None:
        self.clock.now_s += TICK_S
        for number, gone_at_s in self.gone_at_s.items():
            silent_ticks = round((self.clock.now_s - gone_at_s) / TICK_S)
            if self.nodes[number] is None and silent_ticks == 6:
                (named,) = self.store.get([keys.group_incarnation(GROUP)])
                self.watcher.publish_fence(self.store, Member(GROUP, int(named or 0)), 0, -1, "silent")  # type: ignore[arg-type]
        for node in self.random.sample(self.present, len(self.present)):
            node.tick()
        incarnations = {node.incarnation if node.runs else None for node in self.nodes if node is not None}
        if len(self.present) == NUM_NODES and len(incarnations) == 1 and None not in incarnations:
            for node in self.present:
                node.up()

    def lose_rank(self) -> None:
        running = [node for node in self.present if node.runs]
        if running:
            self.random.choice(running).lose()

    def lose_node(self) -> None:
        if self.present:
            number = self.random.choice(self.present).number
            self.nodes[number], self.gone_at_s[number] = None, self.clock.now_s

    def bring_node(self) -> None:
        gone = [number for number, node in enumerate(self.nodes) if node is None]
        if gone:
            number = self.random.choice(gone)
            self.nodes[number] = Node(self, number, self.num_incarnations[number])
            self.num_incarnations[number] += 1

    def begins(self, node: "Node", incarnation: int) -> None:
        """No incarnation begins beside an earlier one, nor without a node that has been gone for long."""
        for other in self.present:
            assert other.incarnation in (incarnation - 1, incarnation)
            assert other is node or not other.runs or other.incarnation == incarnation
        for number, gone_at_s in self.gone_at_s.items():
            assert self.nodes[number] is not None or self.clock.now_s - gone_at_s <= 2 * INTERVAL_S
        self.begun.setdefault(incarnation, set()).add(node.number)


class Node:
    def __init__(self, world: World, number: int, incarnation: int) -> None:
        self.world, self.number = world, number
        self.incarnation, self.runs, self.is_up, self.beats = 0, incarnation == 0, False, 0
        self.events: list[PartsReady | PartFenced] = []
        self.timers = Timers()
        self.parts = GroupRendezvous(world.layout, number, incarnation, INTERVAL_S, self.events.append)
        self.restarts = GroupRestarts(
            budget=RestartBudget(1_000_000, INTERVAL_S),
            restarts_all=False,
            whole_groups=frozenset(),
            timers=self.timers,
            wait_for_parts=self.wait,
            start_ranks=self.start,
        )
        if incarnation:
            world.store.put(f"life/{number}", str(incarnation))
            (named,) = world.store.get([keys.group_incarnation(GROUP)])
            self.incarnation = int(named or 0)
            self.fenced()

    @property
    def member(self) -> Member:
        return Member(GROUP, self.incarnation)

    def tick(self) -> None:
        self.timers.run_due()
        self.beats += 1
        self.world.store.put(f"beat/{self.number}", str(self.beats))
        self.parts.poll(self.world.store, lambda: places_in(self.world.store, self.world.layout))  # type: ignore[arg-type]
        while self.events:
            event = self.events.pop(0)
            if isinstance(event, PartsReady):
                self.restarts.start(GROUP)
            elif event.member == self.member:
                if self.runs:
                    self.lose()
            else:
                assert event.member == Member(GROUP, self.incarnation + 1)
                self.incarnation += 1
                self.restarts.on_missed(GROUP)

    def lose(self) -> None:
        self.runs = False
        self.fenced()

    def fenced(self) -> None:
        self.parts.publish_fence(self.world.store, self.member, 0, 0, "lost")  # type: ignore[arg-type]
        assert self.restarts.on_fenced(GROUP)

    def wait(self, group: GroupId) -> None:
        self.parts.publish_ready(self.world.store, Member(group, self.incarnation + 1))  # type: ignore[arg-type]

    def start(self, group: GroupId, takes_spares: bool) -> None:
        self.world.begins(self, self.incarnation + 1)
        self.incarnation, self.runs, self.is_up = self.incarnation + 1, True, False
        self.parts.note_started(self.member, None)

    def up(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.restarts.on_ready(GROUP)


def test_whatever_is_lost_when_the_group_is_back_on_all_nodes_once_they_are_there(clock: Clock) -> None:
    num_incarnations = num_cut_short = 0
    for seed in range(100):
        clock.now_s = 0.0
        world = World(clock, seed)
        for _ in range(120):
            if world.random.random() < 0.15:
                world.random.choice([world.lose_rank, world.lose_node, world.bring_node, world.bring_node])()
            world.tick()
        while len(world.present) < NUM_NODES:
            world.bring_node()
        for _ in range(round(140.0 / TICK_S)):  # the longest wait is 64 s, and what it began with may be lost once
            world.tick()
        assert {(node.incarnation, node.runs) for node in world.present} == {(max(world.begun, default=0), True)}
        num_incarnations += len(world.begun)
        num_cut_short += sum(len(nodes) < NUM_NODES for nodes in world.begun.values())
    assert num_incarnations > 300, "of all histories"
    assert num_cut_short > 0, "some begin on a few nodes only, and are lost"
