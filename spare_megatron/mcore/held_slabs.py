"""The slabs of a rank, each with sums of gradients of its own; with pipelines of one length all its chunks are one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.gradients.flat_gradients import ScatterRange, flat_parameters
from spare_megatron.mcore.gradients.gradients import GradientSums, make_gradient_sums
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.stacking.layout import Slabs

OnReady = Callable[[int], None]
"""Called with the number of leading buckets whose gradients are complete."""


class ReadyBuckets:
    """Counts the backward passes of every parameter to find buckets that are complete, given their ranges."""

    def __init__(self, chunks: Sequence[Chunk], buckets: Sequence[ScatterRange]) -> None:
        self._buckets_of = {
            flat.parameter: [
                index for index, bucket in enumerate(buckets) if bucket.start < flat.stop and flat.start < bucket.stop
            ]
            for flat in flat_parameters(chunks)
        }
        self._names = {one: name for chunk in chunks for name, one in unwrap_model(chunk.module).named_parameters()}
        self._num_buckets = len(buckets)
        self._nodes = [node for chunk in chunks for node in chunk.module.grad_accs]
        self._passes_left: dict[object, int] = {}
        self._num_awaited: list[int] = []
        self._num_ready = 0

    @contextmanager
    def reporting(self, num_passes: int, on_ready: OnReady | None) -> Iterator[None]:
        """In this context, reports buckets whose parameters have all had `num_passes` backward passes."""
        if on_ready is None:
            yield
            return
        self._passes_left = dict.fromkeys(self._buckets_of, num_passes)
        self._num_awaited = [0] * self._num_buckets
        for touched in self._buckets_of.values():
            for bucket in touched:
                self._num_awaited[bucket] += 1
        self._num_ready = 0
        # Megatron's hooks on these nodes add gradients to its buffers; registered earlier, they run earlier.
        hooks = [node.register_hook(partial(self._passed, node.variable, on_ready)) for node in self._nodes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _passed(self, parameter: object, on_ready: OnReady, *_gradients: object) -> None:
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] < 0:
            raise RuntimeError(
                f"{self._names[parameter]} gets its gradient in parts within a backward pass, and reduce.overlap sends "
                f"it before the last one; set reduce.overlap=false, or use_reentrant=False in checkpoints that share it"
            )
        if self._passes_left[parameter]:
            return
        for bucket in self._buckets_of[parameter]:
            self._num_awaited[bucket] -= 1
        while self._num_ready < self._num_buckets and not self._num_awaited[self._num_ready]:
            self._num_ready += 1
        if self._num_ready:
            on_ready(self._num_ready)


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
