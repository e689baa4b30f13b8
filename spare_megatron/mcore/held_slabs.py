"""The slabs of a rank, each with sums of gradients of its own; with pipelines of one length all its chunks are one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.gradients.gradients import GradientSums, make_gradient_sums
from spare_megatron.mcore.gradients.ready_buckets import ReadyBuckets
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.stacking.layout import Slabs


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlab:
    """A slab on this rank. `position`: the rank that has it in a group each of whose stages is one slab. What groups
    sum, compare and copy is by position.
    """

    position: int
    chunks: Sequence[Chunk]
    gradients: GradientSums
    ready: ReadyBuckets


def held_slabs(
    config: RunConfig,
    chunks: Sequence[Chunk],
    groups: GroupCollection,
    device: torch.device,
    slabs: Slabs | None,
    num_terms: int,
) -> tuple[tuple[HeldSlab, ...], int]:
    """The slabs of a rank, in layer order, and the number of positions. `num_terms`: terms of the loss beside the
    first.
    """
    if slabs is None or len(slabs.lengths) == 1:
        parts, num_slabs = {groups.pp.rank(): tuple(chunks)}, groups.pp.size()
    else:
        parts, num_slabs = {chunk.stage: (chunk,) for chunk in chunks}, len(slabs.layers)
    width = config.parallel.ranks_per_stage
    place, held = dist.get_rank() % width, []
    for number, own in parts.items():
        sums = make_gradient_sums(config, own, groups, device, num_terms)
        ready = ReadyBuckets(own, sums.space.ranges)
        held.append(HeldSlab(position=number * width + place, chunks=own, gradients=sums, ready=ready))
    return tuple(held), num_slabs * width
