"""The fault matrix: every kind of fault that takes a group away, at every moment of a step and of a recovery."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spare_megatron.config.schema import FaultConfig, FaultKind
from spare_megatron.core.phases import Phase
from spare_megatron.faults.trace import PHASES_AFTER_A_LOSS, PHASES_OF_EVERY_STEP

NUM_GROUPS = 4
NUM_STAGES = 2
NUM_STEPS = 5
STEP = 2
"""The step that is hit: operations have been done before, so that their usual duration is known."""

KINDS: tuple[FaultKind, ...] = ("kill", "stop", "raise", "hang", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a fault strikes.

    Attributes:
        phase: Moment of the step.
        in_recovery: Whether another group has been killed in a forward pass of this step, so that the moment belongs to
            the recovery from that: its patch, its rebuild, or the second attempt to reduce the step.
    """

    phase: Phase
    in_recovery: bool

    @property
    def is_again(self) -> bool:
        """Whether it is the same moment of the second attempt."""
        return self.in_recovery and self.phase not in PHASES_AFTER_A_LOSS

    def __str__(self) -> str:
        return f"{self.phase}-again" if self.is_again else str(self.phase)


_OF_EACH_ATTEMPT = (Phase.BEFORE_REDUCE, Phase.IN_REDUCE, Phase.AFTER_REDUCE, Phase.AFTER_VOTE)

MOMENTS: tuple[Moment, ...] = (
    *(Moment(phase=phase, in_recovery=False) for phase in PHASES_OF_EVERY_STEP),
    *(Moment(phase=phase, in_recovery=True) for phase in (Phase.PATCH, Phase.REBUILD, *_OF_EACH_ATTEMPT)),
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


CELLS: tuple[Cell, ...] = tuple(Cell(kind=kind, moment=moment) for kind in KINDS for moment in MOMENTS)


def draw_faults(cell: Cell, seed: int) -> tuple[FaultConfig, ...]:
    """The faults of a cell: whose they are follows from the seed. The fault that the cell is about comes last."""
    generator = np.random.default_rng([seed, CELLS.index(cell)])
    first, victim = (int(group) for group in generator.permutation(NUM_GROUPS)[:2])
    ranks = [int(rank) for rank in generator.integers(NUM_STAGES, size=2)]
    before = FaultConfig(phase=Phase.FORWARD, step=STEP, group=first, rank=ranks[0])
    fault = FaultConfig(phase=cell.moment.phase, step=STEP, group=victim, rank=ranks[1], kind=cell.kind)
    return (before, fault) if cell.moment.in_recovery else (fault,)


def sample_cells(size: int, seed: int) -> Sequence[Cell]:
    """Some cells in the order of the matrix: each kind equally often, no moment twice.

    Args:
        size: How many: a multiple of the kinds, and no more than there are moments.
        seed: Which.
    """
    moments = np.random.default_rng([seed, size]).permutation(len(MOMENTS))[:size]
    chosen = {Cell(kind=KINDS[i % len(KINDS)], moment=MOMENTS[moment]) for i, moment in enumerate(moments)}
    return [cell for cell in CELLS if cell in chosen]
