"""Who computes which microbatch in one step."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from spare_megatron.core.topology import GroupId, ShardId


class Microbatch(NamedTuple):
    """Address of a microbatch inside a step: its shard and its index within the shard."""

    shard: ShardId
    index: int  # type: ignore[assignment]  # hides tuple.index, which an address has no use for


class Work:
    """What each group computes: its microbatches in order of computation. Immutable.

    A step without a loss repeats the work of the step before, so what is derived from it is derived once.

    Args:
        by_group: Group -> its microbatches. Groups may be absent; they compute nothing.
    """

    def __init__(self, by_group: Mapping[GroupId, Sequence[Microbatch]]) -> None:
        self.by_group: Mapping[GroupId, tuple[Microbatch, ...]] = MappingProxyType(
            {group: tuple(by_group[group]) for group in sorted(by_group)}
        )

    def of(self, group: GroupId) -> tuple[Microbatch, ...]:
        """The microbatches of one group; empty when it is absent."""
        return self.by_group.get(group, ())

    @cached_property
    def makespan(self) -> int:
        """The largest load: microbatches of the group that computes most."""
        return max((len(items) for items in self.by_group.values()), default=0)

    @cached_property
    def num_microbatches(self) -> int:
        return sum(len(items) for items in self.by_group.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex, equal on two ranks exactly when their work is."""
        text = ";".join(
            f"{group}:" + ",".join(f"{item.shard}.{item.index}" for item in items)
            for group, items in self.by_group.items()
        )
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step, or of one patch of it.

    Attributes:
        step: The step, from 0.
        epoch: Number of the agreed set of surviving groups the plan was made for.
        work: Who computes what.
        digest: Equal on two ranks exactly when step, epoch, work, and what was planned for the step before are.
    """

    step: int
    epoch: int
    work: Work
    digest: str


def make_plan(step: int, epoch: int, work: Work, *, after: str = "") -> StepPlan:
    """A plan with its digest, which continues the digest of the plan it patches."""
    digest = hashlib.sha256(f"{after}|{step}|{epoch}|{work.digest}".encode()).hexdigest()[:16]
    return StepPlan(step=step, epoch=epoch, work=work, digest=digest)
