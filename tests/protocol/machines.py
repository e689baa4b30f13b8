"""Machines, their supervisors and the places that they hold, in an order that a random generator chooses.

The store links are real, and so is what stands behind them: fences, rendezvous and the list of assignments. Ranks are
not there: a group trains once each of its places has been joined. The clock goes on by ticks. In a tick each machine
that is not suspended does its work, and after every request to the store any other machine may go on, or be lost.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import Pipe
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, ModelConfig, RunConfig, SpareConfig
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.core.log.entries import Commit, Fence, decode_entry, encode_entry
from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL
from spare_megatron.core.machines.group_starts import RestartBudget
from spare_megatron.core.machines.places import Quarantine
from spare_megatron.core.slow_machines.culprit import Cause
from spare_megatron.core.slow_machines.slow_machine_policy import Situation, decide
from spare_megatron.journal.proofs.check_machines import check_places, check_quarantines
from spare_megatron.journal.records import ExaminationRecord, LadderRecord, PlacesRecord, StartRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.machine import timers
from spare_megatron.machine.timers import Timers
from spare_megatron.slow_machines import examination
from spare_megatron.slow_machines.examination import Examinations, ExaminationWanted
from spare_megatron.stacking.layout import GroupId, MachineId, Member, PlaceId
from spare_megatron.store import decision_log, keys
from spare_megatron.supervisor import restarts, store_watch
from spare_megatron.supervisor.places import group_reforming, group_rendezvous
from spare_megatron.supervisor.places.group_reforming import Assigned, AssignmentList, PlaceTaken
from spare_megatron.supervisor.places.group_rendezvous import PartFenced, PartsReady
from spare_megatron.supervisor.restarts import GroupRestarts
from spare_megatron.supervisor.store_watch import (
    FenceWanted,
    FenceWritten,
    HasLeft,
    NodeReplaced,
    NodeSilent,
    PlaceChanged,
    QuarantineChanged,
    RunsWithout,
)
from tests.protocol.assignments import Assignments
from tests.protocol.turns import Requests, Turns
from tests.protocol.violation import Violation
from tests.unit.memory_store import MemoryStore

INTERVAL_S = 1.0
TICK_S = INTERVAL_S / BEATS_PER_INTERVAL
LONGEST_WAIT_S = 64 * INTERVAL_S


def config_of(
    num_groups: int, size: int, least: int | None = None, reform_after_s: float = 0.0, rejoins: int = 1_000_000
) -> RunConfig:
    """Groups of `size` machines, one for each stage; `least`: fewest stages of a group that lacks some."""
    return RunConfig(
        model=ModelConfig(num_layers=8 * size),
        layout=LayoutConfig(num_groups=num_groups, pipeline_parallel=size, least_pipeline_parallel=least),
        cluster=ClusterConfig(num_nodes=num_groups * size),
        spare=SpareConfig(redundancy=2, reform_after_s=reform_after_s, rejoins=rejoins),
    )


class Store(MemoryStore):
    """Shows each assignment and each new part of an incarnation to the invariants."""

    def __init__(self, assignments: Assignments) -> None:
        super().__init__({keys.ALL_GROUPS_READY: "yes"})
        self._assignments = assignments

    def put(self, key: str, value: str) -> None:
        if self.values.get(key, value) != value and key.startswith("assignment/"):
            raise Violation(f"{key} is given to other machines, and is written once by compare-and-set")
        super().put(key, value)

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        is_new = key.startswith("assignment/") and key not in self.values
        found = super().put_if_absent(key, value, after)
        if is_new:
            self._assignments.written(int(key.removeprefix("assignment/")), value)
        return found


class Clock:
    now_s = 0.0


@contextmanager
def clocked() -> Iterator[Clock]:
    """Has everything that a supervisor uses read this clock."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (timers, group_rendezvous, group_reforming, examination, restarts, store_watch):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
        patch.setattr(decision_log, "time", SimpleNamespace(monotonic=lambda: 0.0))  # no store loses its log here
        yield clock


class World:
    """A run of supervisors without their ranks.

    `slowness`: how often a machine stands still for the rest of a tick, after any of its requests. `faults` are
    methods of this class, each as often as it is named, one with probability `fault_rate` after any request.
    """

    def __init__(self, clock: Clock, seed: int, config: RunConfig, *, slowness: float = 0.0) -> None:
        self.clock, self.random, self.config = clock, Random(seed), config
        self.layout = config.parallel
        self.budgets = defaultdict[int, RestartBudget](lambda: RestartBudget(config.spare.rejoins, INTERVAL_S))
        hosts = config.placement.hosts
        self.assignments = Assignments(self.layout, self._trains, hosts)
        self.store = Store(self.assignments)
        self.lines: list[tuple[str, PlacesRecord | ExaminationRecord | StartRecord | LadderRecord]] = []
        self.num_moves = 0
        self.left_out: frozenset[GroupId] = frozenset()
        self.joined = defaultdict[Member, set[tuple[int, int]]](set)
        self.stages: dict[Member, int] = {}  # of incarnations that have been started again
        self.training = {GroupId(group): Member(GroupId(group)) for group in range(self.layout.num_groups)}
        self.is_whole: Callable[[World, Member], bool] = World.has_all_places
        self.faults: list[Callable[[World], None]] = []
        self.fault_rate = 0.0
        self._slowness = slowness
        self._num_entries = 0
        self._fenced: set[Member] = set()
        self.suspended: set[int] = set()
        self.dead: set[int] = set()
        machines = map(MachineId, range(self.layout.num_nodes))
        self.machines = {int(machine): Supervisor(self, machine, is_replacing=False) for machine in machines}

    def close(self) -> None:
        for one in self.machines.values():
            one.turns.end()

    @property
    def active(self) -> list["Supervisor"]:
        return [one for machine, one in self.machines.items() if machine not in self.suspended]

    def tick(self, num_ticks: int = 1) -> None:
        for _ in range(num_ticks):
            self.clock.now_s += TICK_S
            busy = list(self.active)
            for one in busy:
                one.begin_tick()
            while busy:
                one = self.random.choice(busy)
                is_there = one in self.machines.values() and one.machine not in self.suspended
                if not is_there or not one.turns.go_on() or self.random.random() < self._slowness:
                    busy.remove(one)
                if self.faults and self.random.random() < self.fault_rate:
                    self.random.choice(self.faults)(self)
            self._admit()

    def whole(self) -> set[int]:
        """The groups that have all of their ranks, in one incarnation."""
        running = Counter(one.member for one in self.active if one.runs)
        return {member.group for member, number in running.items() if number == len(self.places_of(member))}

    def places_of(self, member: Member) -> list[int]:
        """Those of the stages that the incarnation has."""
        return self.layout.nodes_of(member.group, self.stages.get(member))

    def has_all_places(self, member: Member) -> bool:
        """Whether each place has joined the incarnation: none of its ranks is ready before."""
        return {place for place, _ in self.joined[member]} == set(self.places_of(member))

    def _admit(self) -> None:
        """The others admit groups that are ready, in a commit of the log, and those train that are not fenced."""
        self._read_log()
        for one in self.active:
            is_known = one.member in self._fenced or one.member in self.training.values()
            if one.runs and not is_known and self.is_whole(self, one.member):
                commit = Commit(step=self._num_entries, attempt=self._num_entries, admit=(one.member,))
                self.store.put_if_absent(keys.entry(self._num_entries), encode_entry(commit))
                self._read_log()
        for one in self.active:
            if one.runs and one.member in self.training.values():
                one.on_ready()
        for group in {group for one in self.active for group in one.leaving}:
            self.let_group_leave(group)

    def _read_log(self) -> None:
        while (text := self.store.values.get(keys.entry(self._num_entries))) is not None:
            self._num_entries += 1
            entry = decode_entry(text)
            if isinstance(entry, Fence):
                fenced = Member(entry.group, entry.incarnation)
                self._fenced.add(fenced)
                if self.training.get(entry.group) == fenced:
                    del self.training[entry.group]
            if isinstance(entry, Commit):
                for member in entry.admit:
                    self.assignments.admitted(member.group, self.places_of(member), self.joined[member])
                    self.training[member.group] = member

    @property
    def records(self) -> list[PlacesRecord]:
        return [record for _, record in self.lines if isinstance(record, PlacesRecord) and record.holdings]

    def _trains(self, group: int) -> bool:
        self._read_log()
        return GroupId(group) in self.training

    # ------------------------------------------------------------------------------------------------- what happens

    def lose_machine(self, machine: int | None = None) -> None:
        if self.machines:
            machine = self.random.choice(sorted(self.machines)) if machine is None else machine
            self.end(self.machines[machine])
            self.dead.add(machine)

    def end(self, one: "Supervisor") -> None:
        """The machine's supervisor is no more."""
        del self.machines[one.machine]
        self.suspended.discard(one.machine)
        one.turns.end()

    def replace_machine(self, machine: int | None = None) -> None:
        """What a proxy does once it has lost its supervisor, which may be cut off only."""
        gone = sorted(self.dead | self.suspended)
        if gone:
            machine = self.random.choice(gone) if machine is None else machine
            self.dead.discard(machine)
            new = MachineId(machine + self.layout.num_nodes)
            self.machines[new] = Supervisor(self, new, is_replacing=True)
            if machine in self.suspended:
                self.machines[machine].is_superseded = True

    def suspend_machine(self) -> None:
        self.suspended |= {one.machine for one in self.random.sample(self.active, min(1, len(self.active)))}

    def resume_machine(self) -> None:
        if self.suspended:
            self.suspended.discard(self.random.choice(sorted(self.suspended)))

    def drain_group(self, group: int) -> None:
        """It leaves with a commit, and its ranks end."""
        self.left_out |= {GroupId(group)}
        del self.training[GroupId(group)]
        for one in self.machines.values():
            one.on_asked()
            if one.group == group:
                one.leave_run()

    def ask_for_groups(self) -> None:
        """All of them are to take part."""
        self.left_out = frozenset()
        for one in self.machines.values():
            one.on_asked()

    def outvote_machine(self, machine: int | None = None) -> None:
        """It has computed wrongly, and will, and the others fence its group, whose ranks end as they read that."""
        running = [one for one in self.active if one.runs and one.member in self.training.values()]
        if machine is not None:
            running = [one for one in running if one.machine == machine]
        if not running or len(self.assignments.sick) > 1:
            return
        one = self.random.choice(running)
        positions = tuple(rank for _, rank in self.layout.ranks_on(one.place))
        if self.config.slabs is not None:
            stages = self.stages.get(one.member, self.layout.pipeline_parallel)
            positions = tuple(self.config.slabs.of_stage(positions[0], stages))
        group, incarnation = one.member
        fence = Fence(group=group, incarnation=incarnation, is_outvoted=True, wrong_positions=positions)
        self._read_log()
        self.store.put_if_absent(keys.entry(self._num_entries), encode_entry(fence))
        self._read_log()
        self.assignments.sick.add(one.machine % self.layout.num_nodes)
        for other in self.active:
            if other.runs and other.member == one.member:
                other.lose(is_own=True)

    def cure_machines(self) -> None:
        self.assignments.sick.clear()

    def call_slow(self, machine: int | None = None) -> None:
        """What the driver does with a machine that it replaces: its group leaves with a commit."""
        running = [one for one in self.active if one.runs and one.member in self.training.values()]
        if machine is not None:
            running = [one for one in running if one.machine == machine]
        if running and not self.assignments.quarantined:
            one = self.random.choice(running)
            self.lines.append(("driver", decision_to_drain(one.machine)))
            AssignmentList(self.store, self.layout).quarantine(Quarantine(one.machine, one.place, "slow", "its link"))

    def let_group_leave(self, group: GroupId) -> None:
        """Its ranks end after the commit that they have asked for."""
        if group in self.training:
            member = self.training.pop(group)
            for one in self.active:
                if one.runs and one.member == member:
                    one.leave_run()

    def lose_rank(self) -> None:
        running = [one for one in self.active if one.runs]
        if running:
            self.random.choice(running).lose(is_own=True)


class Supervisor:
    """One machine and the supervisor of its present place: what the main thread does with the events of the link."""

    def __init__(self, world: World, machine: MachineId, *, is_replacing: bool) -> None:
        self.world, self.machine = world, machine
        self.turns = Turns()
        self.store: Any = Requests(world.store, self.turns)
        self.is_superseded = self.has_given_up = self.runs = self._is_busy = False
        self.place, self.group, self.incarnation = PlaceId(0), GroupId(0), 0
        self._coming: PlaceTaken | None = None
        self.stages: int | None = None  # of the group's pipeline, if fewer than usual
        self._is_away, self._num_away = is_replacing, 0
        self.is_quarantined = False
        self.leaving: frozenset[GroupId] = frozenset()
        self._examinations: Examinations | None = None
        self._num_places = 0
        if not is_replacing:
            self._begin(None)

    def _begin(self, taken: PlaceTaken | None) -> None:
        world = self.world
        self._num_places += 1
        self.is_quarantined, self.leaving = False, frozenset()
        self.place, incarnation = (PlaceId(self.machine), 0) if taken is None else taken.holding[1:]
        (self.group,) = world.layout.groups_on(self.place)
        self.incarnation, self.runs, self.is_foreign, self.is_up = 0, taken is None, taken is not None, taken is None
        self.is_lost, self.is_own_loss = taken is not None, False
        world.budgets[self.machine].hold([self.group])
        self.timers = Timers()
        self.inbox, outbox = Pipe(duplex=False)
        self.link = store_watch.StoreLink(
            node=self.place,
            layout=world.layout,
            interval_s=INTERVAL_S,
            connect=lambda: self.store,
            outbox=outbox,
            incarnation=incarnation,
            machine=self.machine,
            reforming=group_reforming.GroupReforming(world.config, self.machine, lambda: world.left_out),
        )
        self.log = self.link._begin(self.store)
        self.restarts = GroupRestarts(
            budget=world.budgets[self.machine],
            restarts_all=True,
            whole_groups=frozenset(),
            timers=self.timers,
            wait_for_parts=lambda group: self.link.wait_for_parts(Member(group, self.incarnation + 1)),
            start_ranks=self.start,
        )
        self.on_asked()
        if taken is not None:
            self.want_fence(self.group, None)

    @property
    def member(self) -> Member:
        return Member(self.group, self.incarnation)

    def begin_tick(self) -> None:
        """Begins the work of a tick, unless the machine is still busy with that of an earlier one."""
        if not self._is_busy:
            self._is_busy = True
            self.turns.begin(self._tick)

    def _tick(self) -> None:
        holder, member = self.world.assignments.holder_of(self.place), self.member
        is_fenced = keys.part_fenced(member) in self.world.store.values
        try:
            if self._is_away:
                self._come()
            else:
                self._work()
                if self.runs and self.machine in self.world.machines and self.member == member and is_fenced:
                    self.world.assignments.runs_on(self.machine, self.place, holder)
        finally:
            self._is_busy = False

    def _leave(self, taken: PlaceTaken | None) -> None:
        """A machine needs some time to end what it has, before it begins in its new place."""
        self.runs, self._is_away, self._coming = False, True, taken
        self._num_away = self.world.random.randrange(1, 4)

    def _come(self) -> None:
        self._num_away -= 1
        if self._num_away >= 0 or not (self._coming or self._passes()):
            return
        try:
            taken = self._coming or self._take_place()
        except ValueError:
            self._end_as_replaced()
            return
        self._is_away, self._coming = False, None
        self._begin(taken)

    def _end_as_replaced(self) -> None:
        if not self.is_superseded:
            raise Violation(f"machine {self.machine} ends for another that there is not")
        self.world.end(self)

    def _passes(self) -> bool:
        """As a machine without a place does before it takes one."""
        assignments = AssignmentList(self.store, self.world.layout)
        if assignments.read().quarantine_of(self.machine) is None:
            return True
        self._examinations = self._examinations or Examinations(self.machine, INTERVAL_S, self.examine)
        examined = self._examinations.poll(self.store, assignments.read())
        if examined is not None:
            self.world.lines.append((f"machine-{self.machine}", examined))
        return examined is not None and not examined.reason

    def examine(self, wanted: ExaminationWanted) -> None:
        """A process of this machine does, and it may be lost or suspended before."""
        is_sick = self.machine % self.world.layout.num_nodes in self.world.assignments.sick
        digests = (f"wrong on {self.machine}" if is_sick else "right",)
        figures = {"digests": digests, "product_s": 1.0, "copy_s": 1.0, "answer_s": 0.1, "exchange_s": 0.1}
        self.store.put(keys.examined(wanted.examined, wanted.number, self.machine), json.dumps(figures))

    def _take_place(self) -> PlaceTaken:
        reforming = group_reforming.GroupReforming(self.world.config, self.machine)
        taken = reforming.take_place(self.store, store_watch.AssignmentList(self.store, self.world.layout))
        self._examinations = None
        self._journal(taken.by.record(self.world.layout))
        return taken

    def _journal(self, record: PlacesRecord | ExaminationRecord | StartRecord) -> None:
        self.world.lines.append((f"supervisor-{self.machine}-{self._num_places}", record))

    def _work(self) -> None:
        self.timers.run_due()
        self.link._beat_at_s = self.world.clock.now_s
        is_on = self.link._handle_next(self.store, self.log)
        self.link._beat_at_s = self.world.clock.now_s + TICK_S
        while is_on and not self.link._wanted.empty():
            is_on = self.link._handle_next(self.store, self.log)
        while not self._is_away and self.machine in self.world.machines and self.inbox.poll():
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
            case RunsWithout(member=member):
                self.incarnation, self.is_foreign = member.incarnation - 1, False
                self.world.assignments.counts["machine that a group does without"] += 1
                self.restarts.on_missed(self.group)
            case PartsReady(stages=stages):
                self.stages = stages
                self.restarts.start(self.group)
            case Assigned():
                self._journal(event.record(self.world.layout))
            case QuarantineChanged(own=own, by=by, leaving=leaving):
                self.is_quarantined = own is not None
                (self.restarts.release if own is None else self.restarts.hold)()
                if by is not None:
                    self._journal(by.record(self.world.layout))
                self.leaving = leaving
                for group in leaving:
                    self.world.let_group_leave(group)
            case ExaminationWanted():
                self.examine(event)
            case ExaminationRecord():
                self._journal(event)
            case NodeReplaced():
                self._end_as_replaced()
            case PlaceChanged() if self.has_given_up:
                self.world.end(self)
            case PlaceChanged(to=taken):
                self.world.num_moves += 1
                self._leave(taken)

    def want_fence(self, group: GroupId, member: Member | None) -> None:
        self.link.fence(FenceWanted(group=group, member=member, rank=-1, cause="lost", error="", from_index=0))

    def on_asked(self) -> None:
        self.restarts.on_asked(self.world.left_out)

    def leave_run(self) -> None:
        self.runs = False
        self.link.publish_left(self.member)
        self.restarts.on_left(self.group)

    def lose(self, *, is_own: bool = False) -> None:
        self.runs, self.is_lost, self.is_own_loss = False, True, is_own
        self.want_fence(self.group, self.member)

    def start(self, group: GroupId, takes_spares: bool) -> None:
        self.world.assignments.starts(self.machine, self.place)
        self._journal(StartRecord(group=group, incarnation=self.incarnation + 1, num_ranks=1, num_spares=0))
        self.incarnation, self.runs, self.is_lost, self.is_up = self.incarnation + 1, True, False, False
        stages = self.stages or self.world.layout.pipeline_parallel
        if self.world.stages.setdefault(self.member, stages) != stages:
            raise Violation(
                f"{self.member} starts with {stages} stages here, and {self.world.stages[self.member]} there"
            )
        self.world.joined[self.member].add((self.place, self.machine))
        self.link.publish_incarnation(self.member, self.stages)

    def on_ready(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.restarts.on_ready(self.group)


def decision_to_drain(machine: MachineId) -> LadderRecord:
    """By these figures a machine is drained: `tests/unit/test_slow_machine_drains.py` draws others."""
    situation = Situation(
        machine=machine,
        cause=Cause.LINK,
        excess_s=1.0,
        mended_ratio=0.0,
        step_s=2.0,
        lost_steps=100,
        steps_left=100,
        num_members=4,
        num_leaving=1,
        least_hosts=2,
        replacement="group",
        admission_s=10.0,
    )
    decision = decide(situation)
    fields = {**asdict(situation), "cause": str(situation.cause)}
    return LadderRecord(rule=decision.rule, gain_s=decision.gain_s, cost_s=decision.cost_s, **fields)


def settle(world: World) -> None:
    """Waits until the machines of groups that do not train are too few for one, and the others have the stages that the
    list says and do without none of their machines. Raises Violation if that does not come about.
    """
    for _ in range(round(3 * LONGEST_WAIT_S / TICK_S)):
        training = world.whole() & world.training.keys()
        used = sum(len(world.places_of(world.training[GroupId(group)])) for group in training)
        are_settled = {*training} == world.training.keys() and all(
            world.stages.get(member, world.layout.pipeline_parallel) == world.assignments.stages_of(member.group)
            for member in world.training.values()
        )
        idle = [one for one in world.active if not one.runs or one.member not in world.training.values()]
        are_settled &= all(one.group not in training and not one._is_away for one in idle)
        is_enough = len(training) == world.layout.num_groups or len(world.active) - used < min(world.layout.lengths)
        if is_enough and are_settled:
            return
        world.tick()
    raise Violation(f"no end: groups {world.whole()} of {len(world.active)} machines are whole, {world.training} train")


def found_in(world: World) -> list[str]:
    """What `spare check` finds in the assignments, and in what supervisors do by them."""
    view: Any = SimpleNamespace(rare=[SimpleNamespace(source=source, record=record) for source, record in world.lines])
    run = RunRecord(**terms_of_run(world.config), faults=[])
    return [finding.reason for finding in (*check_places(view, run), *check_quarantines(view))]
