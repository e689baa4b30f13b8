"""Who computes which microbatch in one step."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.core.topology import GroupId, ShardId


class Microbatch(NamedTuple):
    """Address of a microbatch inside a step: its shard and its index within the shard."""

    shard: ShardId
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The ordered microbatches each group computes and owns in one step, or in one patch of it.

    Attributes:
        step: The step the plan belongs to, from 0.
        epoch: Number of the agreed set of surviving groups the plan was made for.
        work: For each surviving group, in ascending order of ids, its microbatches in order of computation.
    """

    step: int
    epoch: int
    work: tuple[tuple[GroupId, tuple[Microbatch, ...]], ...]

    def of(self, group: GroupId) -> tuple[Microbatch, ...]:
        """The microbatches of one group; empty when the plan does not name it."""
        return dict(self.work).get(group, ())

    @property
    def makespan(self) -> int:
        """The largest load: microbatches of the group that computes most."""
        return max((len(items) for _, items in self.work), default=0)

    @property
    def num_microbatches(self) -> int:
        return sum(len(items) for _, items in self.work)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that are equal on two ranks exactly when their plans are."""
        text = f"{self.step}|{self.epoch}|" + ";".join(
            f"{group}:" + ",".join(f"{item.shard}.{item.index}" for item in items) for group, items in self.work
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(step: int, epoch: int, work: Mapping[GroupId, Sequence[Microbatch]]) -> StepPlan:
    """A plan from a mapping, with groups in ascending order and each group's order kept."""
    ordered = tuple((group, tuple(work[group])) for group in sorted(work))
    return StepPlan(step=step, epoch=epoch, work=ordered)
