"""What of each bucket of the flat gradient space is the gradient of which slice, and what of it counts for the norm.

Some gradients a rank has only in part until `finalize_model_grads` sums them over ranks of its group: all of them with
context parallelism, those of tied embeddings on the first and the last stage, and with tensor parallelism those of
parameters that all tensor-parallel ranks have. Ranks may have them in different slices, so that every group needs them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_attr_wrapped_model

from spare_megatron.core.topology import SliceId
from spare_megatron.mcore.flat import flat_parameters
from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.slices import Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """A range of a bucket without gaps.

    Attributes:
        number: The slice whose gradients they are; None where every group needs them.
        place: Where in the bucket.
        counted: What of it Megatron counts for the norm, as places in the bucket; none where every group needs them.
    """

    number: SliceId | None
    place: slice
    counted: tuple[slice, ...]


def gradient_parts(
    chunks: Sequence[Chunk], groups: ProcessGroupCollection, slices: Slices, buckets: Sequence[range]
) -> tuple[tuple[GradientPart, ...], ...]:
    """The parts of each bucket, ascending, as few as there can be."""
    ranges = sorted(_ranges(chunks, groups, slices), key=lambda part: part.place.start)
    parts: list[list[GradientPart]] = [[] for _ in buckets]
    index = 0
    for bucket, of_bucket in zip(buckets, parts, strict=True):
        while index < len(ranges) and ranges[index].place.start < bucket.stop:
            part = _within(ranges[index], bucket)
            if of_bucket and of_bucket[-1].number == part.number and of_bucket[-1].place.stop == part.place.start:
                part = _joined(of_bucket.pop(), part)
            of_bucket.append(part)
            if ranges[index].place.stop > bucket.stop:
                break  # the rest is in the next one
            index += 1
    return tuple(map(tuple, parts))


def counts_for_norm(parameter: torch.nn.Parameter, groups: ProcessGroupCollection) -> bool:
    """Whether Megatron counts its gradient on this rank: not if another rank of the group has the same, too."""
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, groups.tp))


def needed_everywhere(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> frozenset[torch.nn.Parameter]:
    """The parameters whose gradients every group needs."""
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    if groups.cp.size() > 1:
        return frozenset(parameters)
    found = set()
    if groups.tp.size() > 1:
        found |= {one for one in parameters if not getattr(one, "tensor_model_parallel", False)}
    if groups.embd is not None and groups.embd.size() > 1:
        for chunk in chunks:
            model = get_attr_wrapped_model(chunk.module, "pre_process", return_model_obj=True)
            if model.share_embeddings_and_output_weights and (chunk.is_first or chunk.is_last):
                found.add(model.shared_embedding_or_output_weight())
    return frozenset(found)


def _ranges(chunks: Sequence[Chunk], groups: ProcessGroupCollection, slices: Slices) -> Iterator[GradientPart]:
    """What each fragment of each slice is of the flat gradient space."""
    starts = {flat.parameter: flat.start for flat in flat_parameters(chunks)}
    everywhere = needed_everywhere(chunks, groups)
    for number in map(SliceId, range(slices.num_slices)):
        for fragment in slices.fragments(number, slice(0, slices.length(number))):
            first = starts[fragment.parameter]
            place = slice(first + fragment.start, first + fragment.stop)
            if fragment.parameter in everywhere:
                yield GradientPart(number=None, place=place, counted=())
            else:
                is_counted = counts_for_norm(fragment.parameter, groups)
                yield GradientPart(number=number, place=place, counted=(place,) if is_counted else ())


def _within(part: GradientPart, bucket: range) -> GradientPart:
    """What of it is in the bucket, by places there."""

    def cut(place: slice) -> slice:
        return slice(max(place.start, bucket.start) - bucket.start, min(place.stop, bucket.stop) - bucket.start)

    return replace(part, place=cut(part.place), counted=tuple(map(cut, part.counted)))


def _joined(first: GradientPart, second: GradientPart) -> GradientPart:
    counted = (*first.counted, *second.counted)
    if first.counted and second.counted and first.counted[-1].stop == second.counted[0].start:
        middle = slice(first.counted[-1].start, second.counted[0].stop)
        counted = (*first.counted[:-1], middle, *second.counted[1:])
    return GradientPart(number=first.number, place=slice(first.place.start, second.place.stop), counted=counted)
