"""The state of slices as parts of a distributed checkpoint, by the names and places that replicated state has there.

A slice is a range of the flat parameter space, a part of a distributed checkpoint is a box of a tensor. So each
fragment is cut into boxes: the end of a row, whole rows, the beginning of a row, and so for every dimension. Whoever
reads the checkpoint need not know of slices: it asks for the boxes that it needs, and finds what these overlap with.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor

from spare_megatron.core.topology import SliceId
from spare_megatron.mcore.stacked_optimizer import StackedOptimizer

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "fp32_param"


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that a range of a flat tensor consists of, in its order, as few as there can be.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    while start < stop:
        first, within = divmod(start, row)
        num_rows = (stop - start) // row
        if within or not num_rows:
            end = min(stop, (first + 1) * row)
            for offsets, sizes in boxes(shape[1:], within, end - first * row):
                yield (first, *offsets), (1, *sizes)
        else:
            end = start + num_rows * row
            yield (first, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
        start = end


class ShardedSlices:
    """Where in the whole model the slices of a rank are.

    Args:
        model: The sharded state of the rank's chunks, with the parameters themselves.
        optimizer: The rank's slices.
    """

    def __init__(self, model: dict[str, Any], optimizer: StackedOptimizer) -> None:
        self._optimizer = optimizer
        self._kinds = (_MAIN, *_MOMENTS) if optimizer.has_main else _MOMENTS
        parameters = optimizer.parameters
        by_index = get_param_id_to_sharded_param_map(model, parameters)
        self._homes = {parameter: list(_homes(parameter, by_index[i])) for i, parameter in enumerate(parameters)}

    def parts(self, number: SliceId, state: Tensor) -> Iterator[ShardedTensor]:
        """The state of a slice, as `StackedOptimizer.whole_slices` has it. The parts are views of it."""
        slices = self._optimizer.slices
        for fragment in slices.fragments(number, slice(0, slices.length(number))):
            for first, home in self._homes[fragment.parameter]:
                start, stop = max(fragment.start, first), min(fragment.stop, first + home.data.numel())
                place = fragment.offset + start - fragment.start
                for offsets, sizes in boxes(home.local_shape, start - first, stop - first) if start < stop else ():
                    yield from self._box(home, offsets, sizes, state[:, place : place + math.prod(sizes)])
                    place += math.prod(sizes)

    def _box(
        self, home: ShardedTensor, offsets: Collection[int], sizes: Collection[int], state: Tensor
    ) -> Iterator[ShardedTensor]:
        """The kinds of numbers that there are of a box of a parameter."""
        num_prepended = home.prepend_axis_num
        origin = home.global_offset
        shape = (*(1 for _ in range(num_prepended)), *sizes)
        offset = (*origin[:num_prepended], *map(sum, zip(origin[num_prepended:], offsets, strict=True)))
        for kind, values in zip(self._kinds, state, strict=True):
            yield ShardedTensor(
                key=f"optimizer.state.{kind}.{home.key}",
                data=values.view(shape),
                dtype=values.dtype,
                local_shape=shape,
                global_shape=home.global_shape,
                global_offset=offset,
                axis_fragmentations=None,  # no regular grid
                replica_id=home.replica_id,
                allow_shape_mismatch=home.allow_shape_mismatch,
            )


def _homes(
    parameter: torch.nn.Parameter, sharded: ShardedTensor | ShardedTensorFactory
) -> Iterator[tuple[int, ShardedTensor]]:
    """The tensors that a parameter is stored as, each with the place in the flat parameter where it begins."""
    tensors = nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for tensor in tensors:
        assert tensor.data.is_contiguous(), f"{tensor.key} is stored as no range of its parameter"
        yield (tensor.data.data_ptr() - parameter.data_ptr()) // parameter.element_size(), tensor
