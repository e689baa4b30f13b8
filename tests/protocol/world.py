"""A history: groups, observers, a store and a network, in an order that a random generator chooses.

Everything that happens is a move of one process: it goes on to its next moment, its request reaches the store, or the
answer reaches it. Between any two moves a fault may strike. After a while the faults stop, and the rest is bounded.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from spare_megatron.core.audits.audits import AuditPolicy
from spare_megatron.core.controller.controller import ControllerSetup
from spare_megatron.core.controller.restart import RestartLimits
from spare_megatron.core.log.entries import Fence, encode_entry
from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.core.log.votes import RoundResult
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.stacking.paces import Rounds
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import PartitionSetup, hosted_by
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.fencing import fence
from tests.protocol.communicators import Communicators
from tests.protocol.group import Group
from tests.protocol.invariants import Invariants
from tests.protocol.mutations import Protocol
from tests.protocol.partitions import PartitionObserver, PartitionStates
from tests.protocol.post import Post
from tests.protocol.saved import Content
from tests.protocol.scene import Scene
from tests.protocol.slabs import Gradients
from tests.protocol.store import Request, Store, conversation
from tests.protocol.surroundings import Steps, Until
from tests.protocol.undoing import NodeMemory, UndoObserver
from tests.protocol.violation import Violation

MAX_MOVES_AFTER_FAULTS = 5_000
_RETURN_RATE = 0.7
"""Probability that a lost group is started again each time that a process waits in a pause."""


@dataclass(slots=True)
class Process:
    """A group's process, an observer, or a request whose sender died.

    Attributes:
        member: The group whose process it is; None for others.
        steps: What it does.
        weight: How often it moves, beside the others.
        waits_for: What it yielded last.
        answer: The answer to its request, once the store has carried that out.
    """

    name: str
    member: Member | None
    steps: Steps | None
    weight: float
    waits_for: Request | Until | None = None
    answer: tuple[Any, ...] = ()
    is_paused: bool = False


class World:
    """One history.

    Args:
        scene: What it begins with.
        random: Chooses everything else.
        protocol: What is under test.
    """

    def __init__(self, scene: Scene, random: Random, protocol: Protocol) -> None:
        self._placement = make_placement("golomb", scene.num_groups, scene.redundancy)
        self.log_type = protocol.log_type
        self.voice_type, self.votes_type = protocol.voice_type, protocol.votes_type
        self.reliance_type = protocol.reliance_type
        self.evaluation_type = protocol.evaluation_type
        self.audits_type = protocol.audits_type
        self.refusal_in_log = protocol.refusal_in_log
        self.superseded = protocol.superseded
        self.fan_in, self.keep_last = scene.fan_in, scene.keep_last
        self.sync_every = scene.sync_every
        self.rounds: dict[int, RoundResult] = {}
        self.post = Post(random)
        self.suspect_every, self.checks_itself = scene.suspect_every, scene.checks_itself
        self.memory = NodeMemory()
        self.communicators = Communicators()
        r_o = scene.partition_redundancy
        observer = PartitionObserver(make_placement("golomb", scene.num_groups, r_o).hosts if r_o else ())
        every, per_shard = scene.eval_every_steps, scene.eval_microbatches_per_shard
        evaluation = EvaluationPolicy(every_steps=every, microbatches_per_shard=per_shard) if every else None
        hosts = self._placement.hosts if scene.fetch is None else None
        sizes = [size * scene.row_size for size in scene.sizes]
        self.lanes = protocol.lanes_type(scene)
        undos = UndoObserver(self.memory)
        self.invariants = Invariants(
            hosts, scene.num_groups, sizes, scene.num_steps, observer, evaluation, pauses=scene.pauses, undos=undos
        )
        self.invariants.stages_of = self.stages_of
        self.num_moves = 0
        self.num_faults: Counter[str] = Counter()
        self._scene = scene
        self.random = random
        self._budget = Counter(scene.fault_budget)
        self._fault_rate = 3 * sum(self._budget.values()) / scene.fault_moves
        self._store = Store(self.invariants.entry_written)
        self.invariants.ballots.cast_on = self._store.cast_on
        self._processes: list[Process] = []
        self._groups: dict[str, Group] = {}
        self._suspected: list[Member] = []
        self._num_incarnations: Counter[GroupId] = Counter()
        self._clock_skew_s: dict[str, float] = {}
        first = range(scene.num_groups)
        self.groups = tuple(GroupId(group) for group in range(scene.num_groups + scene.num_further))
        self._num_incarnations.update(dict.fromkeys(self.groups[scene.num_groups :], 1))
        # By entries read: what donors give to those who come back.
        self.states: dict[int, dict[Member, Content]] = {}
        self.may_restart = scene.max_restarts > 0
        self.may_pause = scene.pauses
        self.num_announced = 0
        self.is_patience_over = False  # of those who wait for a restart
        self._have_waited: set[Member] = set()
        self._protocol = protocol
        self._setup = self._setup_of(scene, evaluation)
        for group in map(GroupId, first):
            self._start_group(group)

    def _setup_of(self, scene: Scene, evaluation: EvaluationPolicy | None) -> ControllerSetup:
        r_o = scene.partition_redundancy
        return ControllerSetup(
            placement=self._placement,
            last_resort=scene.fetch is not None,
            fetch=scene.fetch or 0,
            microbatches_per_shard=scene.microbatches_per_shard,
            ramp=scene.ramp,
            num_steps=scene.num_steps,
            granularity=scene.granularity,
            rounds=self._rounds(scene),
            num_stages=scene.lengths[0],
            slabs=scene.slabs,
            saves=SavePolicy(interval_s=scene.save_interval_s, saves_last=scene.save_interval_s is not None),
            partitions=PartitionSetup(num_groups=scene.num_groups, redundancy=r_o) if r_o else None,
            evaluation=evaluation,
            restarts=RestartLimits(max_restarts=scene.max_restarts, window_s=math.inf, wait_s=1.0),
            pause_s=1.0 if scene.pauses else None,
            audits=self._audit_policy(scene),
            snapshots=self._snapshot_policy(scene),
        )

    def _snapshot_policy(self, scene: Scene) -> SnapshotPolicy | None:
        layout = Layout(num_groups=scene.num_groups, num_nodes=scene.num_groups)
        every = scene.snapshot_every
        return SnapshotPolicy(every_steps=every, redundancy=1, layout=layout) if every else None

    def _rounds(self, scene: Scene) -> Rounds | None:
        if len(scene.lengths) > 1:
            return Rounds(fill=scene.lengths[0] - 1)
        return None if scene.slow is None else Rounds(fill=1)

    def _audit_policy(self, scene: Scene) -> AuditPolicy | None:
        if not scene.audit_every_steps:
            return None
        rounds = Rounds(lanes=scene.num_lanes // scene.row_size, fill=scene.lengths[0] - 1)
        return AuditPolicy(every_steps=scene.audit_every_steps, seed=7, rounds=rounds)

    def _start_group(self, group: GroupId, *, is_replacing: bool = True) -> None:
        """Starts the next incarnation of a group, in place of another that may still be there."""
        member = Member(group, self._num_incarnations[group])
        self._num_incarnations[group] += 1
        controller = self._protocol.controller_type(self._setup)
        held = None
        if controller.ownership is not None:
            held = self._protocol.partitions_type(member, hosted_by(controller.ownership.hosts, member))
        runner = Group(member, controller, self, held, is_replacing=is_replacing)
        self._groups[runner.name] = runner
        self._clock_skew_s[runner.name] = self.random.uniform(0.0, 300.0)
        self._start(runner.name, member, runner.run())

    def _start(self, name: str, member: Member | None, steps: Steps) -> None:
        self._processes.append(Process(name, member, steps, weight=10 ** self.random.uniform(-1.0, 0.0)))

    # ----------------------------------------------------------------------------------------------- for the groups

    def stages_of(self, member: Member) -> int | None:
        """Its stages, if it has fewer than groups have in the beginning."""
        stages = self._scene.stages_of(member)
        return stages if stages < self._scene.lengths[0] else None

    def gradients_of(self, member: Member, name: str) -> Gradients:
        slabs, stages, protocol = self._scene.slabs, self._scene.stages_of(member), self._protocol
        held = [slabs.of_stage(stage, stages) for stage in range(stages)]
        buckets = [protocol.buckets_type(name, self._scene.num_buckets, protocol.window_type) for _ in slabs.layers]
        return protocol.gradients_type(
            buckets, held, is_shorter=stages == min(self._scene.lengths) < max(self._scene.lengths)
        )

    def pace_ns(self, member: Member, step: int) -> int:
        """What the group measures in a step; no two groups the same."""
        group, slow = member.group, self._scene.slow or ()
        factors = [one.factor for one in slow if one.group == group and one.first <= step < one.end]
        by_stages = self._scene.lengths[0] / self._scene.stages_of(member)
        return int((10_000 + 10 * group) * max(factors, default=1) * by_stages)

    def now_s(self, process: str) -> float:
        return self.num_moves + self._clock_skew_s[process]

    @property
    def num_waiting(self) -> int:
        """Groups that have ever waited for a restart, each counted once per incarnation."""
        return len(self._have_waited)

    def wiped_out(self, member: Member) -> None:
        """A process has found in the log that only a restart helps: all groups that are not there start again.

        Args:
            member: Whose process it is, which goes on only if it has not taken part.
        """
        if not self.may_restart:
            return
        has_ended = member in self.invariants.took_part
        if not has_ended:
            self._have_waited.add(member)
        there = {process.member for process in self._processes if process.member is not None}
        there -= {member} if has_ended else set()
        for group in self.groups:
            if group not in {other.group for other in there}:
                self._start_group(group, is_replacing=False)

    def paused(self) -> None:
        """A process waits for groups to come back: those that have left are started again, now or later."""
        there = {process.member.group for process in self._processes if process.member is not None}
        gone = [group for group in self.groups if group not in there]
        if gone and self.random.random() < _RETURN_RATE:
            self._start_group(self.random.choice(gone), is_replacing=False)

    def is_written(self, index: int) -> bool:
        return self._store.has(keys.entry(index))

    def is_reported_broken(self, index: int) -> bool:
        return self._store.has(keys.broken(index))

    def start_in_background(self, name: str, steps: Steps) -> None:
        self._start(name, None, steps)

    def computes(self, group: GroupId, work: Sequence[Microbatch]) -> None:
        """A group computes some microbatches."""
        cold = [item for item in work if group not in self._placement.hosts[item.shard]]
        if cold and self._scene.fetch is None:
            raise Violation(f"{group} computes {cold}, which it cannot read")
        self.invariants.counts["cold microbatch"] += len(cold)

    def partitions_of(self, member: Member) -> PartitionStates | None:
        """What a member holds, if it is alive."""
        name = f"{member.group}.{member.incarnation}"
        return self._groups[name].held if any(process.name == name for process in self._processes) else None

    def is_there(self, member: Member) -> bool:
        """Whether the member is alive."""
        return any(process.member == member for process in self._processes)

    def has_more(self, donors: Sequence[Member], given: Collection[Member]) -> bool:
        """Whether a living donor has given no state yet."""
        return any(process.member in donors and process.member not in given for process in self._processes)

    def choose(self, *outcomes: str) -> str:
        """How a reduction goes on for a process, of what is possible; connections may break at any time."""
        if self._budget["break"] and self.num_moves < self._scene.fault_moves and self.random.random() < 0.1:
            self._strike("break")
            return "breaks"
        return self.random.choice(outcomes)

    # ------------------------------------------------------------------------------------------------------ history

    def run(self) -> None:
        """Goes on until nothing can move.

        Raises:
            Violation: An invariant does not hold.
        """
        scene = self._scene
        # With evaluations or suspects there are more attempts, with further groups nearly twice as many groups.
        has_more = scene.eval_every_steps or scene.sync_every or scene.num_further or scene.suspect_every
        most_moves = MAX_MOVES_AFTER_FAULTS * (2 if has_more else 1) * len(scene.slabs.layers)
        while True:
            has_faults = self.num_moves < scene.fault_moves
            if has_faults and self.random.random() < self._fault_rate:
                self._fault()
            movable = [process for process in self._processes if self._can_move(process)]
            if movable:
                weights = [process.weight for process in movable]
                self._move(self.random.choices(movable, weights)[0])
                self.num_moves += 1
            elif not (self._end_a_fault() or self._go_on_after_wipe_out() or self._end_patience()):
                break
            if self.random.random() < (0.01 if has_faults else 0.1):
                self._end_a_fault()
            if self.num_moves > scene.fault_moves + most_moves:
                raise Violation(f"no end {most_moves} moves after the last fault")
        running = [process.name for process in self._processes if process.member is not None]
        self.invariants.ended(running, may_restart=self.may_restart)

    def _go_on_after_wipe_out(self) -> bool:
        """Supervisors find that no group is left that could, or time passes. False where neither helps."""
        if not self.may_restart or not self.invariants.awaits_restart:
            return False
        if not any(process.member is not None for process in self._processes):
            for group in self.groups:
                self._start_group(group, is_replacing=False)
        elif self.is_patience_over:
            return False
        else:
            self.is_patience_over = True
        return True

    def _end_patience(self) -> bool:
        """Nothing comes back any more in a pause. False if there is none, or if that is known."""
        if not self.invariants.is_paused or self.is_patience_over:
            return False
        self.is_patience_over = True
        return True

    def _can_move(self, process: Process) -> bool:
        if process.is_paused:
            return False
        waits_for = process.waits_for
        if isinstance(waits_for, Request):
            return bool(process.answer) or self._store.is_applicable(waits_for)
        return waits_for is None or waits_for.is_met()

    def _move(self, process: Process) -> None:
        if isinstance(process.waits_for, Request) and not process.answer:
            process.answer = (self._store.apply(process.waits_for, process.name),)
            if process.steps is None:
                self._processes.remove(process)
            return
        assert process.steps is not None, "no process is left to receive an answer"
        answer = process.answer[0] if process.answer else None
        process.answer = ()
        try:
            process.waits_for = process.steps.send(answer)
        except StopIteration:
            self._gone(process)

    def _gone(self, process: Process) -> None:
        self._processes.remove(process)
        if process.member is not None:
            self.communicators.died(process.member.group, process.name)

    # ------------------------------------------------------------------------------------------------------- faults

    def _fault(self) -> None:
        left = [fault for fault, num in self._budget.items() if num and fault != "break"]
        if not left:
            return
        alive = [process for process in self._processes if process.member is not None]
        match fault := self.random.choice(left):
            case "crash" if alive:
                self._crash(self.random.choice(alive))
            case "suspect" if alive:
                self.observe(self.random.choice(alive).member)
            case "fence again" if self._suspected:
                gone = [
                    member
                    for member in self._suspected
                    if member.incarnation + 1 < self._num_incarnations[member.group]
                ]
                self.observe(self.random.choice(gone or self._suspected), is_late=True)
            case "pause" if alive:
                self.random.choice(alive).is_paused = True
            case "outage" if self._store.is_up:
                self._store.is_up = False
            case "replace":
                self._start_group(self.random.choice(self.groups))
            case "store restart":
                self._restart_store()
            case "corrupt" if alive:
                name = self.random.choice(alive).name
                self._groups[name].corrupt(self.random)
                self.invariants.corrupted(name)
            case "drain" if alive:
                group = self._groups[self.random.choice(alive).name]
                group.leaves = not group.leaves or self.random.random() < 0.5
            case "flip" | "flip always" if alive:
                what = self.random.choice(("sent", "received")) if fault == "flip" else "always"
                self._groups[self.random.choice(alive).name].flip(what)
            case "lack" | "lack everywhere" if alive:
                num_failures = self.random.randint(1, 5)
                for process in alive if fault == "lack everywhere" else [self.random.choice(alive)]:
                    self._groups[process.name].lack(num_failures)
            case "miscompute" if alive:
                self._groups[self.random.choice(alive).name].audits.spoil(self.random)
            case "drift" if alive:
                self._groups[self.random.choice(alive).name].audits.drift(self.random)
            case "unsound" if alive:
                if not self._groups[self.random.choice(alive).name].spoil(self.random):
                    return
            case _:
                return
        self._strike(fault)

    def _strike(self, fault: str) -> None:
        self._budget[fault] -= 1
        self.num_faults[fault] += 1

    def _crash(self, process: Process) -> None:
        """The process is gone. What it sent may still arrive."""
        self._gone(process)
        is_sent = isinstance(process.waits_for, Request) and process.waits_for.operation != "wait"
        if is_sent and not process.answer and self.random.random() < 0.5:
            self._processes.append(Process(process.name, None, None, process.weight, process.waits_for))
        self.observe(process.member)

    def observe(self, member: Member | None, *, is_late: bool = False) -> None:
        """Some process takes the member for lost, rightly or not, and sooner or later writes its fence."""
        assert member is not None, "only groups are fenced"
        self._suspected.append(member)
        # A supervisor reads on from the last entry that its ranks reported; others know of none. The writer of a late
        # fence does not find an earlier one: it is too far back.
        head = len(self.invariants.entries)
        from_index = head if is_late else self.random.choice((0, head))
        log_type, write = self.log_type, _fence_anew if is_late else fence
        steps = conversation(lambda store: write(log_type(store), member, "suspected", from_index))
        self._start(f"observer of {member}", None, steps)
        if is_late:
            self._processes[-1].weight /= 100

    def _restart_store(self) -> None:
        """Nothing is lost but answers on their way: those requests are sent, and carried out, again."""
        self._store.is_up = False
        for process in self._processes:
            process.answer = ()

    def _end_a_fault(self) -> bool:
        """The store comes back, or a paused process wakes up. False if there is neither."""
        paused = [process for process in self._processes if process.is_paused]
        if not self._store.is_up and (not paused or self.random.random() < 0.5):
            self._store.is_up = True
        elif paused:
            self.random.choice(paused).is_paused = False
        else:
            return False
        return True


def _fence_anew(log: DecisionLog, member: Member, reason: str, from_index: int) -> int:
    """What `fence` does where it finds none in the entries that it reads."""
    text = encode_entry(Fence(group=member.group, incarnation=member.incarnation, reason=reason))
    while log.append(from_index, text) != text:
        from_index += 1
    return from_index
