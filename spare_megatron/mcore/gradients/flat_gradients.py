"""The flat gradient space of a rank: Megatron's gradient buffers one after the other, last chunk first.

It roughly follows the order in which a backward pass finishes gradients. The space is cut into scatter ranges, each
shared by lanes that hold the same parameters. A range is divided into one strip per lane, which that lane sums over
groups, as a bucket, and updates: the rank's own strips. With one lane a range is its strip.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from torch import Tensor

from spare_megatron.core.log.bucket_window import cut
from spare_megatron.mcore.model.compatibility import is_counted_on_tensor_rank
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One of Megatron's gradient buffers, with its range in the flat space."""

    gradients: Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """A parameter, its part of Megatron's gradient buffer (flat), and its range in the flat space."""

    parameter: torch.nn.Parameter
    gradients: Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def buffers(chunks: Sequence[Chunk]) -> list[Any]:
    """Megatron's gradient buffers in the order of the flat space: of a chunk those of divided experts first, as
    embeddings are ready last.
    """
    wrappers = [chunk.module for chunk in reversed(chunks)]
    return [buffer for wrapper in wrappers for buffer in (*wrapper.expert_parallel_buffers, *wrapper.buffers)]


def segments(chunks: Sequence[Chunk]) -> Iterator[Segment]:
    stop = 0
    for buffer in buffers(chunks):
        start, stop = stop, stop + buffer.grad_data.numel()
        yield Segment(gradients=buffer.grad_data, start=start, stop=stop)


def flat_parameters(chunks: Sequence[Chunk]) -> Iterator[FlatParameter]:
    for buffer, segment in zip(buffers(chunks), segments(chunks), strict=True):
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            yield FlatParameter(
                parameter=parameter,
                gradients=segment.gradients[start:stop],
                start=segment.start + start,
                stop=segment.start + stop,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterRange:
    """A range of the flat space that is summed over `num_lanes` ranks as a unit, and this rank's number among them."""

    start: int
    stop: int
    lane: int = 0
    num_lanes: int = 1

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def strip_length(self) -> int:
        """Elements of every strip but the last ones, which may be shorter or empty."""
        return -(-len(self) // self.num_lanes)

    def strip(self, lane: int) -> range:
        """The strip of a lane, in the flat space.

        >>> [list(ScatterRange(start=10, stop=15, num_lanes=3).strip(lane)) for lane in range(3)]
        [[10, 11], [12, 13], [14]]
        """
        first = min(self.start + lane * self.strip_length, self.stop)
        return range(first, min(first + self.strip_length, self.stop))

    @property
    def own(self) -> range:
        return self.strip(self.lane)


def scatter_ranges(shared: Sequence[ScatterRange], strip_elements: int) -> tuple[ScatterRange, ...]:
    """The ranges that the same lanes share, cut so that strips have at most `strip_elements`, ascending without gaps.
    Where no other lane shares any of `shared`, which are adjacent and ascending, a range may go on into the next.
    """
    if all(one.num_lanes == 1 for one in shared):
        shared = [ScatterRange(start=shared[0].start, stop=shared[-1].stop)]
    return tuple(
        replace(one, start=one.start + part.start, stop=one.start + part.stop)
        for one in shared
        for part in cut(len(one), one.num_lanes * strip_elements)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSpace:
    """The flat space divided over lanes: a bucket is this rank's own strip of one of the `ranges`, which `lanes` share.
    `own_segments`: what the segments hold of own strips.
    """

    segments: tuple[Segment, ...]
    ranges: tuple[ScatterRange, ...]
    lanes: tuple[dist.ProcessGroup, ...]
    own_segments: tuple[Segment, ...]


def flat_space(chunks: Sequence[Chunk], groups: GroupCollection, strip_elements: int) -> FlatSpace:
    """The space in strips of at most `strip_elements`."""
    whole = tuple(segments(chunks))
    lanes = [groups.expert_lanes if is_divided_expert(one.params[0]) else groups.lanes for one in buffers(chunks)]
    shared = [
        ScatterRange(start=one.start, stop=one.stop, lane=sharing.rank(), num_lanes=sharing.size())
        for one, sharing in zip(whole, lanes, strict=True)
    ]
    ranges = scatter_ranges(shared, strip_elements)
    of_ranges = [lanes[bisect_right(whole, one.start, key=lambda segment: segment.start) - 1] for one in ranges]
    own = whole if groups.lanes.size() == 1 else tuple(part for one in ranges for part in parts_of(whole, one.own))
    return FlatSpace(segments=whole, ranges=ranges, lanes=tuple(of_ranges), own_segments=own)


def parts_of(whole: Sequence[Segment], elements: range) -> Iterator[Segment]:
    """The parts of some segments that lie in a range of the flat space."""
    for segment in whole:
        start, stop = max(segment.start, elements.start), min(segment.stop, elements.stop)
        if start < stop:
            gradients = segment.gradients[start - segment.start : stop - segment.start]
            yield Segment(gradients=gradients, start=start, stop=stop)


@contextmanager
def diverted(parameters: Sequence[FlatParameter], kept_end: int) -> Iterator[None]:
    """In this context, gradients added before `kept_end` of the flat space are discarded: whole parameters accumulate
    into scratch memory, the kept part of others is restored afterwards.
    """
    kept = [flat for flat in parameters if flat.stop <= kept_end]
    scratch = torch.zeros(max((len(flat) for flat in kept), default=0), device=parameters[0].parameter.device)
    in_part = [flat for flat in parameters if flat.start < kept_end < flat.stop]
    saved = [
        (flat.gradients[: kept_end - flat.start], flat.gradients[: kept_end - flat.start].clone()) for flat in in_part
    ]
    own = [flat.parameter.main_grad for flat in kept]
    for flat in kept:
        flat.parameter.main_grad = scratch[: len(flat)].view(flat.parameter.shape)
    try:
        yield
    finally:
        for flat, gradients in zip(kept, own, strict=True):
            flat.parameter.main_grad = gradients
        for gradients, values in saved:
            gradients.copy_(values)


# ------------------------------------------------------------------------------------------------------ inside a group
# Megatron sums gradients of tied embeddings, and of what several ranks hold whole, inside a group. Every group needs
# them whole, and one rank counts them for the norm.


def sum_inside_group(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> None:
    """Sums gradients over context-parallel ranks, tied embeddings, and sequence-parallel norms, in place: after the
    commit. Collective over: all ranks of the group.
    """
    finalize_model_grads([chunk.module for chunk in chunks], None, pg_collection=groups)


def tied_embedding(chunk: Chunk) -> torch.nn.Parameter | None:
    """The chunk's copy of the embedding table, on the first and last stage of a model whose last one needs it, too: for
    tied embeddings, or to predict several tokens.
    """
    model = unwrap_model(chunk.module)
    ties = getattr(model, "share_embeddings_and_output_weights", False) or model.config.mtp_num_layers
    if not ties or not (chunk.is_first or chunk.is_last):
        return None
    weight: torch.nn.Parameter = model.shared_embedding_or_output_weight()
    return weight


def shared_by_stages(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> frozenset[torch.nn.Parameter]:
    """The parameters whose gradients are summed over ranks that lay out their parameters in another way."""
    if groups.embd is None or groups.embd.size() == 1:
        return frozenset()
    return frozenset(weight for weight in map(tied_embedding, chunks) if weight is not None)


def needed_everywhere(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> frozenset[torch.nn.Parameter]:
    """The parameters whose gradients every group needs: those that may be summed inside a group."""
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    if groups.cp.size() > 1:
        return frozenset(parameters)
    found: set[torch.nn.Parameter] = set()
    if groups.tp.size() > 1:
        found |= {one for one in parameters if not getattr(one, "tensor_model_parallel", False)}
    return shared_by_stages(chunks, groups).union(found)


def is_divided_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether it belongs to an expert that not every lane has; Megatron marks such parameters."""
    return not getattr(parameter, "allreduce", True)


def counts_for_norm(parameter: torch.nn.Parameter, groups: ProcessGroupCollection) -> bool:
    """Whether Megatron counts the gradient on this rank for the norm; it skips duplicates within the group."""
    return bool(param_is_not_shared(parameter)) and is_counted_on_tensor_rank(parameter, groups)
