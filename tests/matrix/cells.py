"""The fault matrix: every kind of fault that takes a group away, at every moment of a step and of a recovery."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from spare_megatron.config.schema import FaultConfig
from spare_megatron.driver.planned_faults import PHASES_AFTER_A_LOSS
from spare_megatron.faults.points import (
    PHASES_BETWEEN_STEPS,
    PHASES_OF_A_BUCKET,
    PHASES_OF_AN_EVALUATION,
    PHASES_WITH_PARTITIONS,
    FaultKind,
    FaultPoint,
)
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.order import Granularity
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership
from spare_megatron.supervisor.rank_exits import INJECTED

NUM_GROUPS = 4
NUM_STAGES = 2
NUM_STEPS = 5
PARTITION_REDUNDANCY = 3
"""Hosts of each state partition, where there are any: one more than groups are lost."""
STEP = 2
"""The step that is hit, or the evaluation before it: operations have been done before, so that their usual duration is
known.
"""

PHASES_OF_EVERY_STEP = tuple(
    phase
    for phase in FaultPoint
    if phase not in PHASES_AFTER_A_LOSS | PHASES_BETWEEN_STEPS | PHASES_OF_AN_EVALUATION | PHASES_WITH_PARTITIONS
    and phase not in PHASES_OF_A_BUCKET
)
"""Phases that some rank of every group reaches in every step; those of single buckets lie around `in_reduce`."""

_BROKEN = "|lost a peer in its group"  # another rank of the group may be seen to end first
CAUSES = {
    "kill": "SIGKILL$" + _BROKEN,
    "stop": "stopped for",
    "raise": re.escape(INJECTED) + _BROKEN,
    "hang": "no progress|no heartbeat",  # on a busy machine its beats may be late, too
    "cut": r"node \d+: no heartbeat",
}
"""Kind -> the pattern of what a victim has to be lost for, as its supervisor or those of other nodes wrote down."""
KINDS = tuple(map(FaultKind, CAUSES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a fault strikes.

    Attributes:
        phase: Moment of the step.
        in_recovery: Whether another group has been killed in a forward pass of this step, or of the evaluation before
            it, so that the moment belongs to the recovery from that: its patch, its rebuild, the second attempt to
            reduce the step, or a copy of a partition that the other group held.
    """

    phase: FaultPoint
    in_recovery: bool

    @property
    def is_again(self) -> bool:
        """Whether it is the same moment of the second attempt."""
        return self.in_recovery and self.phase not in PHASES_AFTER_A_LOSS

    @property
    def is_stacked(self) -> bool:
        """Whether the optimizer state is cut into partitions."""
        return self.phase in PHASES_WITH_PARTITIONS

    def __str__(self) -> str:
        return f"{self.phase}-again" if self.is_again else str(self.phase)


_OF_EACH_ATTEMPT = (FaultPoint.BEFORE_REDUCE, FaultPoint.IN_REDUCE, FaultPoint.AFTER_REDUCE, FaultPoint.AFTER_VOTE)

MOMENTS: tuple[Moment, ...] = (
    *(Moment(phase=phase, in_recovery=False) for phase in PHASES_OF_EVERY_STEP),
    *(Moment(phase=phase, in_recovery=True) for phase in (FaultPoint.PATCH, FaultPoint.REBUILD, *_OF_EACH_ATTEMPT)),
    *(Moment(phase=phase, in_recovery=False) for phase in (FaultPoint.BEFORE_GATHER, FaultPoint.IN_GATHER)),
    Moment(phase=FaultPoint.REPAIR, in_recovery=True),
    *(
        Moment(phase=phase, in_recovery=phase is FaultPoint.EVALUATION_PATCH)
        for phase in FaultPoint
        if phase in PHASES_OF_AN_EVALUATION
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the matrix."""

    kind: FaultKind
    moment: Moment

    def __str__(self) -> str:
        return f"{self.kind}-{self.moment}"

    @property
    def needs_root(self) -> bool:
        """Whether the fault needs nodes with networks of their own."""
        return self.kind == "cut"


def exists(cell: Cell) -> bool:
    """Whether the fault is noticed: a copy is made in a thread that no one waits for."""
    return (cell.kind, cell.moment.phase) != ("hang", FaultPoint.REPAIR)


CELLS: tuple[Cell, ...] = tuple(
    cell for kind in KINDS for moment in MOMENTS if exists(cell := Cell(kind=kind, moment=moment))
)


HOSTS = (0, 1)
"""Of shard 1, where each of four shards has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseCell:
    """The moment at which both hosts are killed, the unit of work that moves, and whether state is partitioned.

    `is_reformed`: a machine of each host is lost for good, and one of them comes back with a machine of the other.
    """

    phase: FaultPoint
    granularity: Granularity
    is_stacked: bool
    is_reformed: bool = False

    @property
    def kind(self) -> str:
        return "reform" if self.is_reformed else "pause"

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.granularity}{'-stacked' if self.is_stacked else ''}"


_PHASES = (
    *PHASES_OF_EVERY_STEP,
    *(phase for phase in FaultPoint if phase in PHASES_OF_AN_EVALUATION - {FaultPoint.EVALUATION_PATCH}),
)
_GRANULARITIES: tuple[Granularity, ...] = ("microbatch", "stack")
PAUSE_CELLS: tuple[PauseCell, ...] = (
    *(
        PauseCell(phase=phase, granularity=granularity, is_stacked=is_stacked)
        for phase in _PHASES
        for granularity in _GRANULARITIES
        for is_stacked in (False, True)
    ),
    *(
        PauseCell(phase=phase, granularity="microbatch", is_stacked=True)
        for phase in (FaultPoint.BEFORE_GATHER, FaultPoint.IN_GATHER)
    ),
)


REFORM_CELLS: tuple[PauseCell, ...] = tuple(
    replace(cell, is_reformed=True) for cell in PAUSE_CELLS if cell.granularity == "microbatch"
)


LEAVING, JOINING, OTHER = 3, 4, 1
"""The group that is asked to leave, the further group that is asked for, and one that stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipCell:
    """The moment at which a group is killed in the step that ends with a drain or an admission.

    With partitioned state the group that leaves hands its part over from this step on, and leaves later. `is_own`: the
    group that leaves is killed, or the further group in its first step.
    """

    change: Literal["drain", "grow"]
    phase: FaultPoint
    is_stacked: bool
    is_own: bool

    @property
    def kind(self) -> str:
        return self.change

    @property
    def victim(self) -> int:
        return {"drain": LEAVING, "grow": JOINING}[self.change] if self.is_own else OTHER

    @property
    def step(self) -> int:
        """The step of the fault."""
        return STEP + (self.change == "grow" and self.is_own)

    def __str__(self) -> str:
        own = "-own" if self.is_own else ""
        return f"{self.change}-{self.phase}{own}{'-stacked' if self.is_stacked else ''}"


def _membership_phases(change: str, *, is_stacked: bool, is_own: bool) -> Sequence[FaultPoint]:
    if change == "grow" and is_own:  # so small a batch has no work for it
        return (*_OF_EACH_ATTEMPT, FaultPoint.AFTER_COMMIT)
    if change == "grow" and is_stacked:
        # A gather that breaks before an admission leaves no group whose state the newcomer could take: it is lost, too.
        return [
            phase for phase in PHASES_OF_EVERY_STEP if phase not in (FaultPoint.AFTER_VOTE, FaultPoint.AFTER_COMMIT)
        ]
    return (*PHASES_OF_EVERY_STEP, *((FaultPoint.BEFORE_GATHER, FaultPoint.IN_GATHER) if is_stacked else ()))


MEMBERSHIP_CELLS: tuple[MembershipCell, ...] = tuple(
    MembershipCell(change=change, phase=phase, is_stacked=is_stacked, is_own=is_own)
    for change in ("drain", "grow")
    for is_own in (False, True)
    for is_stacked in (False, True)
    for phase in _membership_phases(change, is_stacked=is_stacked, is_own=is_own)
)


def draw_faults(cell: Cell, seed: int) -> tuple[FaultConfig, ...]:
    """The faults of a cell: whose they are follows from the seed. The fault that the cell is about comes last."""
    generator = np.random.default_rng([seed, CELLS.index(cell)])
    first, victim = (int(group) for group in generator.permutation(NUM_GROUPS)[:2])
    ranks = [int(rank) for rank in generator.integers(NUM_STAGES, size=2)]
    if cell.moment.phase is FaultPoint.REPAIR:
        victim = int(generator.choice(_receivers(first)))
    forward = FaultPoint.EVALUATION if cell.moment.phase in PHASES_OF_AN_EVALUATION else FaultPoint.FORWARD
    before = FaultConfig(phase=forward, step=STEP, group=first, rank=ranks[0])
    fault = FaultConfig(phase=cell.moment.phase, step=STEP, group=victim, rank=ranks[1], kind=cell.kind)
    return (before, fault) if cell.moment.in_recovery else (fault,)


def _receivers(lost: int) -> list[int]:
    """The groups that copy partitions of one that is lost."""
    all_members = [Member(GroupId(group)) for group in range(NUM_GROUPS)]
    setup = PartitionSetup(num_groups=NUM_GROUPS, redundancy=PARTITION_REDUNDANCY)
    left = first_ownership(setup, all_members).for_members([member for member in all_members if member.group != lost])
    return sorted({int(repair.receiver.group) for repair in left.repairs})


def sample_cells(size: int, seed: int) -> Sequence[Cell]:
    """Some cells in the order of the matrix: each kind equally often, no moment twice.

    Args:
        size: How many: a multiple of the kinds, and no more than there are moments.
        seed: Which.
    """
    moments = np.random.default_rng([seed, size]).permutation(len(MOMENTS))[:size]
    kinds = [KINDS[i % len(KINDS)] for i in range(size)]
    cells = [Cell(kind=kind, moment=MOMENTS[moment]) for kind, moment in zip(kinds, moments, strict=True)]
    if not all(map(exists, cells)):  # two of them change their kinds
        at = list(map(exists, cells)).index(False)
        cells[at - 1], cells[at] = replace(cells[at - 1], kind=kinds[at]), replace(cells[at], kind=kinds[at - 1])
    chosen = set(cells)
    return [cell for cell in CELLS if cell in chosen]
