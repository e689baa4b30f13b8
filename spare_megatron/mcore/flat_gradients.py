"""The flat gradient space of a rank: Megatron's gradient buffers one after the other, last chunk first.

Megatron lays out the parameters of a buffer from the last to the first. So the space is roughly in the order in which a
backward pass finishes its gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.partitions import Slices
from spare_megatron.stacking.layout import SliceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One of Megatron's gradient buffers.

    Attributes:
        gradients: The buffer, flat.
        start: Where it begins in the flat space.
        stop: Where it ends.
    """

    gradients: Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """A parameter and its place.

    Attributes:
        parameter: The parameter.
        gradients: Its part of Megatron's gradient buffer, flat.
        start: Where it begins in the flat space.
        stop: Where it ends.
    """

    parameter: torch.nn.Parameter
    gradients: Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def segments(chunks: Sequence[Chunk]) -> Iterator[Segment]:
    """The buffers in the order of the flat space."""
    stop = 0
    for chunk in reversed(chunks):
        for buffer in chunk.module.buffers:
            start, stop = stop, stop + buffer.grad_data.numel()
            yield Segment(gradients=buffer.grad_data, start=start, stop=stop)


def flat_parameters(chunks: Sequence[Chunk]) -> Iterator[FlatParameter]:
    """The parameters in the order of the flat space."""
    buffers = [buffer for chunk in reversed(chunks) for buffer in chunk.module.buffers]
    for buffer, segment in zip(buffers, segments(chunks), strict=True):
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            yield FlatParameter(
                parameter=parameter,
                gradients=segment.gradients[start:stop],
                start=segment.start + start,
                stop=segment.start + stop,
            )


def size_of(of: Sequence[Segment]) -> int:
    """Elements of the flat space."""
    return of[-1].stop


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


Tell = Callable[[int], None]
"""Told how many buckets, from the first on, have all of their gradients. Whatever it raises ends the backward pass."""


class ReadyBuckets:
    """Counts the backward passes of every parameter.

    Args:
        chunks: The rank's part of the model.
        buckets: The ranges of its flat gradient space.
    """

    def __init__(self, chunks: Sequence[Chunk], buckets: Sequence[range]) -> None:
        self._buckets_of = {
            flat.parameter: [
                index for index, bucket in enumerate(buckets) if bucket.start < flat.stop and flat.start < bucket.stop
            ]
            for flat in flat_parameters(chunks)
        }
        self._num_buckets = len(buckets)
        self._tell: Tell | None = None
        self._passes_left: dict[object, int] = {}
        self._num_awaited: list[int] = []
        self._num_ready = 0
        for chunk in chunks:
            # The nodes at which Megatron adds gradients to its buffers; its hooks were there first, so they run first.
            for node in chunk.module.grad_accs:
                node.register_hook(lambda *_, parameter=node.variable: self._passed(parameter))

    @contextmanager
    def telling(self, num_passes: int, tell: Tell | None) -> Iterator[None]:
        """Inside the block, a parameter has its gradient after this many backward passes, and `tell` hears of it."""
        self._tell = tell
        self._passes_left = dict.fromkeys(self._buckets_of, num_passes)
        self._num_awaited = [0] * self._num_buckets
        for touched in self._buckets_of.values():
            for bucket in touched:
                self._num_awaited[bucket] += 1
        self._num_ready = 0
        try:
            yield
        finally:
            self._tell = None

    def _passed(self, parameter: object) -> None:
        if self._tell is None:
            return
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter]:
            return
        for bucket in self._buckets_of[parameter]:
            self._num_awaited[bucket] -= 1
        while self._num_ready < self._num_buckets and not self._num_awaited[self._num_ready]:
            self._num_ready += 1
        if self._num_ready:
            self._tell(self._num_ready)
