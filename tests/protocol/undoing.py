"""Lasting faults, what they have spoiled, and snapshots in the memory of nodes to which a history can go back.

The observer knows which processes compute wrongly; what is audited it counts by the votes alone. Steps that a process
has spoiled are undone once it is fenced for it, if a member has a snapshot of audited steps.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random

from spare_megatron.core.log.actions import TakeSnapshot
from spare_megatron.core.log.entries import Undo
from spare_megatron.core.log.votes import Held, Vote
from spare_megatron.stacking.layout import GroupId
from tests.protocol.incarnations import Incarnation
from tests.protocol.saved import Content
from tests.protocol.scene import Scene
from tests.protocol.violation import Violation


class NodeMemory:
    """Snapshots in the memory of each group's node, by the attempt that they are of; they outlive processes."""

    def __init__(self) -> None:
        self.of: dict[GroupId, dict[int, Content]] = defaultdict(dict)

    def take(self, group: GroupId, action: TakeSnapshot, content: Content) -> None:
        held = self.of[group]
        for attempt in [one for one in held if one < action.attempt and one not in action.kept]:
            del held[attempt]
        if any(group in holders for holders in action.holders):
            held[action.attempt] = content

    def held(self, group: GroupId) -> tuple[Held, ...]:
        return tuple(Held(attempt, 0, repr(content)) for attempt, content in sorted(self.of[group].items()))


@dataclass(frozen=True, slots=True)
class _Spoiled:
    """A committed step that a process has computed wrongly."""

    step: int
    process: Incarnation


class UndoObserver:
    """`memory` of nodes; `attempts` that are about an undo."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self.attempts: set[int] = set()
        self._lasting: dict[int, set[Incarnation]] = defaultdict(set)  # by attempt, who computes wrongly
        self._spoiled: list[_Spoiled] = []
        self._audited: dict[int, int] = {}  # committed steps with a group's last audit
        self._left_by: dict[int, int] = {}  # groups that were fenced -> audited steps
        self._committed: dict[int, int] = {}  # attempt -> steps
        self._members: Collection[Incarnation] = ()
        self._is_due = False

    def voted(self, process: Incarnation, attempt: int, *, is_lasting: bool) -> None:
        if is_lasting:
            self._lasting[attempt].add(process)

    def found_wrong(self, group: int, step: int) -> None:
        audited = self._audited.get(group, 0)
        if audited < step:
            self._left_by[group] = min(audited, self._left_by.get(group, audited))
            self._is_due = True

    def committed(self, writer: str, step: int, attempt: int, votes: Mapping[Incarnation, Vote]) -> None:
        members = {group for group, _ in votes}
        if self._is_due:
            self._must_not_go_on(writer, members)
        self._is_due = False
        self._members = list(votes)
        self._committed[attempt] = step + 1
        self._spoiled += [_Spoiled(step, one) for one in self._lasting[attempt] & set(votes)]
        by_microbatch = defaultdict(set)
        for (group, _), vote in votes.items():
            for item in vote.audits:
                by_microbatch[item.microbatch].add(group)
        for groups in by_microbatch.values():
            self._audited |= dict.fromkeys(groups if len(groups) > 1 else (), step + 1)

    def _must_not_go_on(self, writer: str, members: Collection[int]) -> None:
        of_members = [self._audited.get(group, 0) for group, _ in self._members] or [0]
        audited = min(*of_members, *self._left_by.values())
        for group in members:
            held = [one for one in self._memory.of[GroupId(group)] if self._committed.get(one, audited + 1) <= audited]
            if held:
                raise Violation(f"{writer} goes on without going back, and {group} has the states of attempts {held}")

    def undone(self, writer: str, entry: Undo, members: Collection[Incarnation]) -> None:
        if not self._is_due:
            raise Violation(f"{writer} goes back to {entry.step} steps, and no group was found wrong since")
        if self._committed.get(entry.snapshot) != entry.step:
            raise Violation(f"{writer} goes back to {entry}, which is void")
        known = {group for group, _ in members} | self._left_by.keys()
        wrong = [one for one in self._spoiled if one.step < entry.step and one.process[0] in known]
        if wrong:
            raise Violation(f"{writer} goes back to {entry.step} steps, which hold {wrong}")
        self._is_due = False
        self._spoiled = [one for one in self._spoiled if one.step < entry.step]
        self._committed = {attempt: steps for attempt, steps in self._committed.items() if steps <= entry.step}
        self._audited = {group: min(steps, entry.step) for group, steps in self._audited.items()}
        self._left_by.clear()


def draw_undos(random: Random) -> Scene:
    """One with audits and snapshots, in which a group computes wrongly from some step on, and others come and go.

    The fault `drift` is none of `FAULTS`: a group computes wrongly from now on.
    """
    num_groups, num_steps = random.randint(4, 6), random.randint(6, 9)
    return Scene(
        num_groups=num_groups,
        redundancy=num_groups,
        microbatches_per_shard=random.randint(1, 2),
        num_steps=num_steps,
        granularity="microbatch",
        save_interval_s=random.choice((None, 20.0, 150.0, 300.0)),
        fault_moves=80 * num_groups * num_steps,
        fault_budget={
            "drift": random.randint(1, 2),
            "crash": random.choice((0, 0, 1)),
            "suspect": random.choice((0, 0, 1)),
            "replace": random.choice((0, 1, 3)),
            "break": random.choice((0, 0, 1)),
            "pause": random.choice((0, 1)),
        },
        num_buckets=random.choice((1, 5)),
        fan_in=random.choice((1, 2)),
        keep_last=random.choice((1, 9)),
        eval_every_steps=random.choice((0, 0, 2)),
        audit_every_steps=random.choice((1, 2, 2, 3)),
        snapshot_every=random.choice((2, 2, 3)),
        ramp_steps=0 if num_steps % 2 else num_steps - 1,
    )
