"""The flat gradient space of a rank: Megatron's gradient buffers one after the other, last chunk first.

Megatron lays out the parameters of a buffer from the last to the first. So the space is roughly in the order in which a
backward pass finishes its gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spare_megatron.mcore.model import Chunk


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
