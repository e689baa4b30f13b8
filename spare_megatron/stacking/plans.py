"""Work and plans: which group computes which microbatch in a step or in a patch of it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.layout import GroupId, ShardId

Owners = npt.NDArray[np.int32]
"""Shape (num_shards, m): the group that computes each microbatch."""

NO_OWNER = -1
"""Marks a microbatch without an owner."""


class Microbatch(NamedTuple):
    """Address of a unit of work inside a step: its shard and its index within the shard.

    A unit is a microbatch, or with experts a row: as many consecutive microbatches of the shard as a group has lanes.
    """

    shard: ShardId
    index: int  # type: ignore[assignment]  # hides tuple.index, which an address has no use for


class Numbered(NamedTuple):
    """A microbatch that a lane of a group computes: its unit of work, and its linear number in the batch."""

    unit: Microbatch
    number: int


def share_of(
    work: Sequence[Microbatch], *, lane: int, num_lanes: int, row_size: int, units_per_shard: int
) -> list[Numbered]:
    """The microbatches of a group's work that one of its lanes computes, in order.

    A unit of work is a row of `row_size` microbatches, of which as many consecutive lanes compute one each; several
    such sets of lanes take turns. Those of a shard have consecutive numbers, so that equal batches of other numbers of
    groups and lanes have equal microbatches.

    >>> work = [Microbatch(ShardId(0), 2), Microbatch(ShardId(1), 0), Microbatch(ShardId(1), 1)]
    >>> [one.number for one in share_of(work, lane=0, num_lanes=2, row_size=1, units_per_shard=4)]
    [2, 5]
    >>> [one.number for one in share_of(work, lane=1, num_lanes=2, row_size=2, units_per_shard=4)]
    [5, 9, 11]
    >>> [one.number for one in share_of(work, lane=2, num_lanes=4, row_size=2, units_per_shard=4)]
    [8]
    """
    own = work[lane // row_size :: num_lanes // row_size]
    first = lane % row_size
    return [Numbered(unit, (unit.shard * units_per_shard + unit.index) * row_size + first) for unit in own]


class Work:
    """What each group computes in a step or a patch. Immutable. Microbatches outside the work have NO_OWNER."""

    def __init__(self, owners: Owners) -> None:
        self.owners = owners

    def of(self, group: GroupId) -> tuple[Microbatch, ...]:
        """Microbatches of one group in order of computation: ascending. Cost: O(N m)."""
        shards, indices = np.nonzero(self.owners == group)
        return tuple(Microbatch(ShardId(s), k) for s, k in zip(shards.tolist(), indices.tolist(), strict=True))

    @cached_property
    def loads(self) -> npt.NDArray[np.int64]:
        """Microbatches per group, up to the last group that computes any."""
        return np.bincount(self.owners[self.owners != NO_OWNER].ravel()).astype(np.int64)

    @property
    def num_shards(self) -> int:
        return len(self.owners)

    @property
    def makespan(self) -> int:
        return int(self.loads.max(initial=0))

    @property
    def num_microbatches(self) -> int:
        return int(self.loads.sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex; equal on two ranks exactly if their work is."""
        shape = f"{self.owners.shape}|".encode()
        return hashlib.sha256(shape + np.ascontiguousarray(self.owners, dtype="<i4").tobytes()).hexdigest()


def work_of(by_group: Mapping[GroupId, Sequence[Microbatch]], shape: tuple[int, int]) -> Work:
    """Work of this shape (shards, microbatches per shard) from the microbatches of each group."""
    owners = np.full(shape, NO_OWNER, dtype=np.int32)
    for group, items in by_group.items():
        for item in items:
            owners[item.shard, item.index] = group
    return Work(owners)


class Audit(NamedTuple):
    """A microbatch that a group computes beside its owner, to compare."""

    auditor: GroupId
    owner: GroupId
    microbatch: Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step or evaluation, or of one patch of it, for the epoch's set of surviving groups.

    The digest is equal on two ranks exactly if step, epoch, work, audits and all earlier plans of the step are; no
    evaluation has that of a step.
    """

    step: int
    epoch: int
    work: Work
    digest: str
    is_evaluation: bool = False
    audits: tuple[Audit, ...] = ()

    def audited_by(self, group: GroupId) -> tuple[Microbatch, ...]:
        """Microbatches of other groups that this one computes to compare."""
        return tuple(audit.microbatch for audit in self.audits if audit.auditor == group)

    def audited_of(self, group: GroupId) -> frozenset[Microbatch]:
        """Microbatches of this group that others compute to compare."""
        return frozenset(audit.microbatch for audit in self.audits if audit.owner == group)


def make_plan(
    step: int, epoch: int, work: Work, *, after: str = "", is_evaluation: bool = False, audits: tuple[Audit, ...] = ()
) -> StepPlan:
    """A plan whose digest extends `after`: that of the plan that it patches, or what marks it off an earlier one."""
    kind = "evaluation|" if is_evaluation else ""
    audited = "".join(f"|{one.auditor}:{one.microbatch.shard}.{one.microbatch.index}" for one in audits)
    digest = hashlib.sha256(f"{kind}{after}|{step}|{epoch}|{work.digest}{audited}".encode()).hexdigest()[:16]
    return StepPlan(step=step, epoch=epoch, work=work, digest=digest, is_evaluation=is_evaluation, audits=audits)
