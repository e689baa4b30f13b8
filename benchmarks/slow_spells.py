"""Runs whose passes sleep, and groups that are slow for some seconds: the same seconds whichever way trains."""

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

PROGRAM = Path(__file__).with_name("slow_group_program.py")
FACTORS = (1.5, 3.0)
"""Between these the factor of a spell is drawn."""
_HORIZON_S = 1000.0


class Spell(NamedTuple):
    """A group's passes take `factor` times as long, in seconds since the first pass of the run."""

    group: int
    from_s: float
    to_s: float
    factor: float


def draw_spells(seed: int, *, num_groups: int, quiet_s: float, mean_gap_s: float, mean_s: float) -> list[Spell]:
    """One after the other, for longer than any run takes: exponential gaps, lengths from half to 3/2 of the mean."""
    draw = np.random.default_rng(seed)

    def spells() -> Iterator[Spell]:
        end_s = quiet_s
        while True:
            from_s = end_s + float(draw.exponential(mean_gap_s))
            end_s = from_s + mean_s * float(draw.uniform(0.5, 1.5))
            yield Spell(int(draw.integers(num_groups)), from_s, end_s, float(draw.uniform(*FACTORS)))

    return list(takewhile(lambda spell: spell.from_s < _HORIZON_S, spells()))


def write_program(
    file: Path, *, sleep_s: float, spells: Sequence[Spell] = (), block: int = 0, is_per_layer: bool = False
) -> None:
    """Writes the program of one run, with the seconds that a microbatch sleeps in a stage, or in each layer of it, and
    when it sleeps for longer.

    `block`: steps in blocks of which paces are measured by turns; 0 measures them in all.
    """
    shutil.copy(PROGRAM, file)
    figures = {"sleep_s": sleep_s, "spells": spells, "block": block, "is_per_layer": is_per_layer}
    file.with_suffix(".json").write_text(json.dumps(figures))


def began_s(file: Path) -> float:
    """The wall clock at the first pass of the run with this program; it must have made it."""
    return float(file.with_suffix(".began").read_text())
