"""Every stage of a save, of a load and of a rejoin, and who is killed in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spare_megatron.config.schema import FaultConfig
from spare_megatron.faults.points import (
    PHASES_AFTER_A_WIPE_OUT,
    PHASES_OF_A_JOIN,
    PHASES_OF_A_LOAD,
    PHASES_OF_A_SAVE,
    FaultPoint,
)

NUM_GROUPS = 3
NUM_STAGES = 2
NUM_STEPS = 7
SAVE_EVERY = 2
STEP = 3
"""At or after which the stage is struck, and in which groups are lost where the stage needs that."""
AWAITED = 4
"""The step at whose end the lost group is admitted."""
RETURNING, DONOR, OTHER = 1, 0, 2
"""The group that comes back, who gives it the state, and who does neither."""

Place = Literal["save", "asynchronous_save", "load", "restart", "join"]
PLACES: tuple[Place, ...] = ("save", "asynchronous_save", "load", "restart", "join")

_OF_THE_FIRST_RANK = (FaultPoint.SAVE_MANIFEST, FaultPoint.SAVE_RENAME, FaultPoint.SAVE_DROP)
_OF_THE_RETURNING = (FaultPoint.JOIN_WAIT, FaultPoint.JOIN_DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kill.

    Attributes:
        place: What is under way: a load at the start, one at a restart after a wipe-out, ...
        phase: Its stage.
        group: Whose rank is killed; None: any, by the seed.
        rank: Which rank of the group.
    """

    place: Place
    phase: FaultPoint
    group: int | None
    rank: int

    def __str__(self) -> str:
        whose = "" if self.group is None else f"-group{self.group}"
        return f"{self.place}-{self.phase}{whose}-rank{self.rank}"


def _ranks(phase: FaultPoint) -> range:
    return range(1 if phase in _OF_THE_FIRST_RANK else NUM_STAGES)


def _stages() -> list[tuple[Place, FaultPoint, int | None]]:
    places: list[tuple[Place, frozenset[FaultPoint], Sequence[int | None]]] = [
        ("save", PHASES_OF_A_SAVE, [1]),  # the second to save
        ("asynchronous_save", PHASES_OF_A_SAVE, [1]),
        ("load", PHASES_OF_A_LOAD - PHASES_AFTER_A_WIPE_OUT, [None]),
        ("restart", PHASES_OF_A_LOAD, [None]),
        ("join", PHASES_OF_A_JOIN, [RETURNING]),
        ("join", PHASES_OF_A_JOIN - set(_OF_THE_RETURNING), [DONOR]),
        ("join", frozenset({FaultPoint.JOIN_CONFIRM}), [OTHER]),
    ]
    return [(place, phase, group) for place, phases, groups in places for phase in sorted(phases) for group in groups]


CELLS: tuple[Cell, ...] = tuple(
    Cell(place=place, phase=phase, group=group, rank=rank)
    for place, phase, group in _stages()
    for rank in _ranks(phase)
)


def draw_faults(cell: Cell, seed: int) -> tuple[FaultConfig, ...]:
    """The faults of a cell. The one that it is about comes last."""
    drawn = int(np.random.default_rng([seed, CELLS.index(cell)]).integers(NUM_GROUPS))
    step = 0 if cell.place == "load" else STEP
    fault = FaultConfig(phase=cell.phase, step=step, group=drawn if cell.group is None else cell.group, rank=cell.rank)
    lost = {"restart": range(NUM_GROUPS), "join": (RETURNING,)}.get(cell.place, ())
    before = [FaultConfig(phase=FaultPoint.FORWARD, step=STEP, group=group, rank=0) for group in lost]
    return (*before, fault)


def sample_cells(size: int, seed: int) -> list[Cell]:
    """So many cells of different places."""
    generator = np.random.default_rng(seed)
    chosen = []
    for number in generator.permutation(len(PLACES))[:size]:
        there = [cell for cell in CELLS if cell.place == PLACES[number]]
        chosen.append(there[generator.integers(len(there))])
    return chosen
