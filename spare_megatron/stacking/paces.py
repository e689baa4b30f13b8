"""How long a group needs for its units of work: its pace, and the rounds that the pipeline schedule makes of the units.

The pace is the time of one round, in thousandths of the pace of the group's like. Groups without lanes, pipeline fill
and padding need one round per unit: pace x load. A pipeline with fewer stages takes longer for a round, and is filled
in fewer.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Work

LIKE = 1000
"""The pace of a group that is as fast as its like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A group computes u > 0 units in `fill` + k rounds, where k is the least multiple of `multiple` with
    k x `lanes` >= u x `size`; it needs no round for none.
    """

    size: int = 1
    """Microbatches per unit: 1, or all of a shard."""
    lanes: int = 1
    """Microbatches in a round."""
    multiple: int = 1
    """Rounds to which an interleaved schedule pads."""
    fill: int = 0
    """Rounds that filling and draining the pipeline takes."""

    def num_rounds(self, units: int) -> int:
        """Rounds that this many units take.

        >>> Rounds(lanes=2, multiple=3, fill=1).num_rounds(7)  # 4 rounds, padded to 6
        7
        """
        return (self.fill if units else 0) + self.multiple * -(-units * self.size // (self.lanes * self.multiple))

    def num_units(self, rounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The most units that fit into these rounds."""
        full = np.maximum(rounds - self.fill, 0) // self.multiple
        return full * (self.multiple * self.lanes) // self.size


ONE_BY_ONE = Rounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """The paces of all groups: thousandths by group where they are not `LIKE`, and what a round is."""

    permille: Mapping[GroupId, int] = field(default_factory=dict)
    rounds: Rounds = ONE_BY_ONE
    lacking: Mapping[GroupId, int] = field(default_factory=dict)
    """Stages that the pipeline of a group lacks, which is filled in as many rounds fewer."""

    def among(self, is_alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
        """The pace and the lacking stages of each group, lost ones included; None if all surviving groups are alike.

        >>> Paces(permille={GroupId(1): 2000}, lacking={GroupId(0): 1}).among(np.array([True, True, False]))
        array([[1000, 2000, 1000],
               [   1,    0,    0]])
        >>> Paces(permille={GroupId(1): 2000}).among(np.array([True, False, True])) is None
        True
        """
        found = np.repeat([[LIKE], [0]], is_alive.size, axis=1)
        for row, by_group in enumerate((self.permille, self.lacking)):
            for group, value in by_group.items():
                if group < is_alive.size:
                    found[row, group] = value
        present = found[:, is_alive]
        return None if (present == present[:, :1]).all() else found

    def in_units_of(self, size: int) -> "Paces":
        """The same where a unit is as many microbatches."""
        return replace(self, rounds=replace(self.rounds, size=size))


EVEN = Paces()


def slack_of(work: Work, paces: Paces) -> dict[GroupId, int]:
    """Microbatches that each lane of a group could compute beside its own before the slowest group has done its work;
    of groups that compute any. `work` is in units of microbatches or rows, whatever size the rounds have.

    >>> from spare_megatron.stacking.layout import ShardId
    >>> from spare_megatron.stacking.plans import Microbatch, work_of
    >>> some = [Microbatch(ShardId(0), index) for index in range(4)]
    >>> work = work_of({GroupId(0): some[:3], GroupId(1): some[3:]}, (1, 4))
    >>> slack_of(work, EVEN)
    {0: 0, 1: 2}
    >>> slack_of(work, Paces(permille={GroupId(1): 1500}))
    {0: 0, 1: 1}
    """
    rounds = replace(paces.rounds, size=1)
    loads = {GroupId(group): int(load) for group, load in enumerate(work.loads.tolist()) if load}
    pace = np.array([paces.permille.get(group, LIKE) for group in loads], dtype=np.int64)
    lacking = np.array([paces.lacking.get(group, 0) for group in loads], dtype=np.int64)
    times = pace * (np.array([rounds.num_rounds(load) for load in loads.values()], dtype=np.int64) - lacking)
    units = rounds.num_units(times.max(initial=0) // pace + lacking).tolist()
    return {group: (most - load) // rounds.lanes for (group, load), most in zip(loads.items(), units, strict=True)}


def dealt_stacks(num_groups: int, num_microbatches: int, num_slow: int, factor: float) -> float:
    """The least T / m with (N - k) floor(T) + k floor(T / f) >= N m: a step dealt by pace over one without slow groups,
    for k of N groups that take f times as long, m microbatches per shard, any of which any group hosts. Cost: O(log m).

    >>> dealt_stacks(8, 16, 1, 2.0), dealt_stacks(4, 16, 1, 2.0)
    (1.125, 1.1875)
    """
    total, fast = num_groups * num_microbatches, num_groups - num_slow

    def room(time: float) -> int:
        return fast * floor(time + 1e-9) + num_slow * floor(time / factor + 1e-9)

    def least(pace: float) -> float:
        """The least multiple of a pace that suffices."""
        most = ceil(num_microbatches * factor / pace)
        return pace * bisect_left(range(most), total, key=lambda number: room(number * pace))

    return min(least(1.0), least(factor)) / num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What the time of a step follows from where pipelines differ in length, if any group computes any shard. The unit
    of time is that of a round of one layer.
    """

    num_layers: int
    num_shards: int
    num_microbatches: int
    """Of a shard, or rows."""
    lanes: int = 1
    """Microbatches in a round."""
    moves_shards: bool = False
    """Work is dealt in whole shards, not in microbatches."""
    is_dealt: bool = True
    """Work is dealt by pace; else all groups have equally much."""

    def step_time(self, stages: Collection[int]) -> float:
        """The time of a step of groups with these numbers of stages, infinite for none: with p of them a round takes
        ceil(layers / p), and p - 1 fill the pipeline. Cost: O(n + log m) for n groups.

        >>> times = PipelineTimes(num_layers=32, num_shards=4, num_microbatches=16)
        >>> [times.step_time(stages) for stages in ([4] * 4, [4] * 3, [4, 4, 4, 3], [3] * 4, [])]
        [152, 200, 165, 198, inf]
        """
        size = self.num_microbatches if self.moves_shards else 1
        num_units = self.num_shards * self.num_microbatches // size
        kinds = [
            (number, ceil(self.num_layers / length), Rounds(size=size, lanes=self.lanes, fill=length - 1))
            for length, number in Counter(stages).items()
        ]
        if not kinds:
            return inf
        units = num_units if self.is_dealt else ceil(num_units / len(stages))
        most = max(round_time * rounds.num_rounds(units) for _, round_time, rounds in kinds)

        def room(until: int) -> int:
            return sum(number * int(rounds.num_units(np.array(until // time))) for number, time, rounds in kinds)

        return bisect_left(range(most), num_units, key=room) if self.is_dealt else most
