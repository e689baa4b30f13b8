"""Machines of broken groups take places of others: histories of supervisors that come and go, on real store links."""

import random
from collections import Counter, defaultdict
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig, SpareConfig
from spare_megatron.core.failure_detector import BEATS_PER_INTERVAL
from spare_megatron.core.reforming import MachineId
from spare_megatron.core.rejoin import RestartBudget
from spare_megatron.journal.check_places import check_places
from spare_megatron.journal.records import PlacesRecord
from spare_megatron.process import timers
from spare_megatron.process.timers import Timers
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store import keys
from spare_megatron.supervisor import group_reforming, group_rendezvous, restarts, store_link
from spare_megatron.supervisor.group_reforming import Assigned, AssignmentList, GroupReforming, PlaceTaken
from spare_megatron.supervisor.group_rendezvous import PartFenced, PartsReady
from spare_megatron.supervisor.restarts import GroupRestarts
from spare_megatron.supervisor.store_link import (
    FenceWanted,
    FenceWritten,
    HasLeft,
    NodeReplaced,
    NodeSilent,
    PlaceChanged,
    StoreLink,
)
from tests.unit.memory_store import MemoryStore

INTERVAL_S = 1.0
TICK_S = INTERVAL_S / BEATS_PER_INTERVAL
LONGEST_WAIT_S = 64 * INTERVAL_S


class Clock:
    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (timers, group_rendezvous, group_reforming, restarts, store_link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def config_of(num_groups: int, size: int, reform_after_s: float = 0.0, rejoins: int = 1_000_000) -> RunConfig:
    return RunConfig(
        layout=LayoutConfig(num_groups=num_groups, pipeline_parallel=size),
        cluster=ClusterConfig(num_nodes=num_groups * size),
        spare=SpareConfig(reform_after_s=reform_after_s, rejoins=rejoins),
    )


class World:
    """A run of supervisors without their ranks, in one thread."""

    def __init__(self, clock: Clock, seed: int, config: RunConfig) -> None:
        self.clock, self.random, self.config = clock, random.Random(seed), config
        self.budgets = defaultdict[int, RestartBudget](lambda: RestartBudget(config.spare.rejoins, INTERVAL_S))
        self.layout = config.parallel
        self.store: Any = MemoryStore({keys.ALL_GROUPS_READY: "yes"})
        self.records: list[PlacesRecord] = []
        self.num_moves = 0
        self.left_out: frozenset[GroupId] = frozenset()
        self.machines = {
            machine: Supervisor(self, MachineId(machine), None) for machine in range(self.layout.num_nodes)
        }
        self.suspended: set[int] = set()
        self.dead: set[int] = set()

    @property
    def active(self) -> list["Supervisor"]:
        return [one for machine, one in self.machines.items() if machine not in self.suspended]

    def tick(self, num_ticks: int = 1) -> None:
        for _ in range(num_ticks):
            self.clock.now_s += TICK_S
            for one in self.random.sample(self.active, len(self.active)):
                one.tick()
            for group in self.whole():
                for one in self.active:
                    if one.group == group:
                        one.on_ready()
            running = Counter((one.place, one.member) for one in self.active if one.runs)
            assert max(running.values(), default=0) <= 1, "no place is taken by two"

    def whole(self) -> set[int]:
        """The groups that have all of their ranks, in one incarnation."""
        running = Counter(one.member for one in self.active if one.runs)
        size = self.layout.num_nodes // self.layout.num_groups
        return {member.group for member, number in running.items() if number == size}

    # ------------------------------------------------------------------------------------------------- what happens

    def lose_machine(self, machine: int | None = None) -> None:
        if self.machines:
            machine = self.random.choice(sorted(self.machines)) if machine is None else machine
            del self.machines[machine]
            self.suspended.discard(machine)
            self.dead.add(machine)

    def replace_machine(self, machine: int | None = None) -> None:
        """What a proxy does once it has lost its supervisor, which may be cut off only."""
        gone = sorted(self.dead | self.suspended)
        if gone:
            machine = self.random.choice(gone) if machine is None else machine
            self.dead.discard(machine)
            new = MachineId(machine + self.layout.num_nodes)
            self.machines[new] = Supervisor(self, new, taken_by(self, new))
            if machine in self.suspended:
                self.machines[machine].is_superseded = True

    def suspend_machine(self) -> None:
        self.suspended |= {one.machine for one in self.random.sample(self.active, min(1, len(self.active)))}

    def resume_machine(self) -> None:
        if self.suspended:
            self.suspended.discard(self.random.choice(sorted(self.suspended)))

    def drain_group(self, group: int | None = None) -> None:
        """It leaves with a commit, and its ranks end."""
        whole = sorted(self.whole())
        if len(whole) > 1:
            group = self.random.choice(whole) if group is None else group
            self.left_out |= {GroupId(group)}
            for one in self.machines.values():
                one.on_asked()
                if one.group == group:
                    one.leave()

    def ask_for_groups(self) -> None:
        """All of them are to take part."""
        self.left_out = frozenset()
        for one in self.machines.values():
            one.on_asked()

    def lose_rank(self) -> None:
        running = [one for one in self.active if one.runs]
        if running:
            self.random.choice(running).lose(is_own=True)


def taken_by(world: World, machine: MachineId) -> PlaceTaken:
    taken = GroupReforming(world.config, machine).take_place(world.store, AssignmentList(world.store, world.layout))
    world.records.append(taken.by.record(world.layout))
    return taken


class Supervisor:
    """One machine and the supervisor of its present place: what the main thread does with the events of the link."""

    def __init__(self, world: World, machine: MachineId, taken: PlaceTaken | None) -> None:
        self.world, self.machine = world, machine
        self.is_superseded = self.has_given_up = False
        self._coming: PlaceTaken | None = None
        self._num_away = 0
        self._begin(taken)

    def _begin(self, taken: PlaceTaken | None) -> None:
        world = self.world
        self.place, incarnation = (self.machine, 0) if taken is None else taken.holding[1:]
        (self.group,) = world.layout.groups_on(self.place)
        self.incarnation, self.runs, self.is_foreign, self.is_up = 0, taken is None, taken is not None, taken is None
        self.is_lost, self.is_own_loss = taken is not None, False
        world.budgets[self.machine].hold([self.group])
        self.timers = Timers()
        self.inbox, outbox = Pipe(duplex=False)
        self.link = StoreLink(
            node=self.place,
            layout=world.layout,
            interval_s=INTERVAL_S,
            connect=lambda: world.store,
            outbox=outbox,
            incarnation=incarnation,
            machine=self.machine,
            reforming=GroupReforming(world.config, self.machine, lambda: world.left_out),
        )
        self.log = self.link._begin(world.store)
        self.restarts = GroupRestarts(
            budget=world.budgets[self.machine],
            restarts_all=True,
            whole_groups=frozenset(),
            timers=self.timers,
            wait_for_parts=lambda group: self.link.wait_for_parts(Member(group, self.incarnation + 1)),
            start=self.start,
        )
        self.on_asked()
        if taken is not None:
            self.want_fence(self.group, None)

    @property
    def member(self) -> Member:
        return Member(self.group, self.incarnation)

    def _move(self, taken: PlaceTaken) -> None:
        """A machine needs some time to end what it has, before it begins in its new place."""
        self.runs, self._coming, self._num_away = False, taken, self.world.random.randrange(1, 4)

    def tick(self) -> None:
        if self._coming is not None:
            self._num_away -= 1
            if self._num_away < 0:
                taken, self._coming = self._coming, None
                self._begin(taken)
            return
        self.timers.run_due()
        self.link._beat_at_s = self.world.clock.now_s
        is_on = self.link._handle_next(self.world.store, self.log)
        self.link._beat_at_s = self.world.clock.now_s + TICK_S
        while is_on and not self.link._wanted.empty():
            is_on = self.link._handle_next(self.world.store, self.log)
        while self._coming is None and self.inbox.poll():
            self.handle(self.inbox.recv())

    def handle(self, event: object) -> None:
        match event:
            case NodeSilent(members=members):
                for member in members:
                    if member.group != self.group:
                        self.want_fence(member.group, member)
                    elif self.runs:
                        self.lose()
            case PartFenced(member=member):
                if member == self.member and self.runs:
                    self.lose()
                elif member == Member(self.group, self.incarnation + 1):
                    self.incarnation += 1
                    self.restarts.on_missed(self.group)
            case FenceWritten(member=member):
                if self.is_foreign and member.group == self.group:
                    self.incarnation, self.is_foreign = member.incarnation, False
                if member == self.member and self.is_lost:
                    self.has_given_up = not self.restarts.on_fenced(self.group, is_own=self.is_own_loss)
                    if self.has_given_up:
                        self.link.give_place_up()
            case HasLeft(member=member):
                self.incarnation, self.is_foreign = member.incarnation, False
                self.restarts.on_left(member.group)
            case PartsReady():
                self.restarts.start(self.group)
            case Assigned():
                self.world.records.append(event.record(self.world.layout))
            case NodeReplaced():
                assert self.is_superseded
                del self.world.machines[self.machine]
            case PlaceChanged() if self.has_given_up:
                del self.world.machines[self.machine]
            case PlaceChanged(to=taken):
                self.world.num_moves += 1
                try:
                    self._move(taken or taken_by(self.world, self.machine))
                except ValueError:
                    assert self.is_superseded
                    del self.world.machines[self.machine]

    def want_fence(self, group: GroupId, member: Member | None) -> None:
        self.link.fence(FenceWanted(group=group, member=member, rank=-1, cause="lost", error="", from_index=0))

    def on_asked(self) -> None:
        self.restarts.on_asked(self.world.left_out)

    def leave(self) -> None:
        self.runs = False
        self.link.publish_left(self.member)
        self.restarts.on_left(self.group)

    def lose(self, *, is_own: bool = False) -> None:
        self.runs, self.is_lost, self.is_own_loss = False, True, is_own
        self.want_fence(self.group, self.member)

    def start(self, group: GroupId, takes_spares: bool) -> None:
        self.incarnation, self.runs, self.is_lost, self.is_up = self.incarnation + 1, True, False, False
        self.link.publish_incarnation(self.member)

    def on_ready(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.restarts.on_ready(self.group)


def settle(world: World) -> None:
    """Waits until as many groups are whole as there are machines for."""
    size = world.layout.num_nodes // world.layout.num_groups
    for _ in range(round(3 * LONGEST_WAIT_S / TICK_S)):
        if len(world.whole()) == len(world.active) // size:
            return
        world.tick()
    raise AssertionError(f"{world.whole()} of {len(world.active)} machines")


def found_in(world: World) -> list[str]:
    """What `spare check` finds in the assignments."""
    view: Any = SimpleNamespace(rare=[SimpleNamespace(record=record) for record in world.records])
    run: Any = SimpleNamespace(most_groups=world.layout.num_groups)
    return [finding.reason for finding in check_places(view, run)]


def test_machines_of_two_broken_groups_make_one_whole(clock: Clock) -> None:
    world = World(clock, 0, config_of(4, 2))
    world.tick(8)
    world.lose_machine(0)
    world.tick(24)
    assert world.whole() == {1, 2, 3}
    assert world.records == [], "one group alone has no use for its machine"
    world.lose_machine(3)
    lost_at_s = clock.now_s
    settle(world)
    assert world.whole() == {0, 2, 3}
    assert clock.now_s - lost_at_s <= 4 * INTERVAL_S
    (record,) = {record.index: record for record in world.records}.values()
    assert record.holdings == [[2, 0, 1]]
    assert record.places == [[0, None], [1, 1], [2, 2], [3, None]]
    assert found_in(world) == []


def test_a_group_that_is_asked_to_leave_is_not_made_whole_and_gives_no_machine(clock: Clock) -> None:
    world = World(clock, 0, config_of(4, 2))
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
    clock: Clock,
) -> None:
    world = World(clock, 0, config_of(4, 2))
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
    clock: Clock,
) -> None:
    world = World(clock, 0, config_of(4, 2, rejoins=2))
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


def test_a_replacement_is_waited_for_as_long_as_it_may_take(clock: Clock) -> None:
    world = World(clock, 0, config_of(2, 2, reform_after_s=20.0))
    world.tick(8)
    world.lose_machine(0)
    world.lose_machine(3)
    world.tick(round(19.0 / TICK_S))
    assert world.records == []
    world.replace_machine()
    world.tick(round(8.0 / TICK_S))
    assert len(world.whole()) == 1
    assert {len(record.places) for record in world.records} == {0}, "it has its machine's place, and nobody moves"


def test_a_machine_that_is_lost_on_its_way_is_replaced_by_another(clock: Clock) -> None:
    world = World(clock, 0, config_of(4, 2))
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


def test_one_that_comes_back_to_a_taken_place_takes_the_one_that_was_left(clock: Clock) -> None:
    world = World(clock, 0, config_of(2, 2))
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
    clock: Clock,
) -> None:
    """The one that left the place was ready for the same incarnation, and the place is given a beat before it comes."""
    world = World(clock, 0, config_of(2, 2))
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


@pytest.mark.parametrize(("num_groups", "size"), [(4, 2), (3, 3)])
def test_whatever_is_lost_when_as_many_groups_are_whole_as_there_are_machines_for(
    clock: Clock, num_groups: int, size: int
) -> None:
    num_moves = num_reformed = 0
    for seed in range(12):
        clock.now_s = 0.0
        world = World(clock, seed, config_of(num_groups, size))
        happens = [
            world.lose_rank, world.lose_machine, world.lose_machine, world.replace_machine, world.suspend_machine,
            world.resume_machine, world.resume_machine, world.drain_group, world.ask_for_groups,
        ]  # fmt: skip
        for _ in range(150):
            if world.random.random() < 0.12:
                world.random.choice(happens)()
            world.tick()
        world.ask_for_groups()
        while world.suspended:
            world.resume_machine()
        settle(world)
        world.tick(8)
        assert found_in(world) == []
        num_moves += world.num_moves
        num_reformed += sum(bool(record.places) for record in world.records)
    assert num_moves > 20
    assert num_reformed > 20
