"""Parameters and gradients that the lanes of a group exchange around an update: each lane updates its own strips."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spare_megatron.mcore.gradients.flat_gradients import FlatSpace, ScatterRange, buffers, flat_parameters, segments
from spare_megatron.mcore.gradients.partitions import ParameterRange
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import all_gather


class LaneBuffers:
    """Flat parameters of a rank, laid out as Megatron's gradient buffers: they are moved, and stay the same objects.
    No range that the lanes of one of the flat `spaces` share crosses buffers.
    """

    def __init__(self, spaces: Sequence[tuple[Sequence[Chunk], FlatSpace]]) -> None:
        """The spaces of a rank's slabs, in layer order, with their chunks."""
        chunks = [chunk for of_slab, _ in spaces for chunk in of_slab]
        ranges: list[ScatterRange] = []
        start = 0
        for _, space in reversed(spaces):  # as the flat space of all chunks
            ranges += [replace(one, start=start + one.start, stop=start + one.stop) for one in space.ranges]
            start += space.ranges[-1].stop
        lanes = [of_range for _, space in reversed(spaces) for of_range in space.lanes]
        self._flat = sorted(flat_parameters(chunks), key=lambda flat: flat.start)
        self._ranges = ranges
        homes = list(zip(segments(chunks), _moved_parameters(chunks), strict=True))
        self._shared: list[_Shared] = []
        for scatter, group in zip(ranges, lanes, strict=True):
            if scatter.num_lanes > 1:
                [(home, values)] = [one for one in homes if one[0].start <= scatter.start < one[0].stop]
                place = slice(scatter.start - home.start, scatter.stop - home.start)
                self._shared.append(_Shared(scatter, group, values[place], home.gradients[place]))

    def own_spans(self) -> list[ParameterRange]:
        """What the own strips have of parameters, in the order of the flat space."""
        spans = []
        for own in (scatter.own for scatter in self._ranges):
            for flat in self._flat:
                start, stop = max(own.start, flat.start), min(own.stop, flat.stop)
                if start < stop:
                    spans.append(ParameterRange(flat.parameter, start - flat.start, stop - flat.start))
        return spans

    def gather_parameters(self) -> None:
        """Brings all parameters here from the lanes that updated them. Collective over: all lanes of each range."""
        _await(_StripGather(one.values, one.scatter, one.group) for one in self._shared)

    def gather_gradients(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """The same of the gradients in all ranges that have any of these parameters."""
        wanted = [flat for flat in self._flat if flat.parameter in parameters]
        _await(
            _StripGather(one.gradients, one.scatter, one.group)
            for one in self._shared
            if any(flat.start < one.scatter.stop and one.scatter.start < flat.stop for flat in wanted)
        )


class _Shared(NamedTuple):
    """A range that several lanes share: their process group, and its parameters and gradients on this rank."""

    scatter: ScatterRange
    group: dist.ProcessGroup
    values: Tensor
    gradients: Tensor


class _StripGather:
    """Fills a range from the strips of all lanes: in place if these are equally long, else beside it."""

    def __init__(self, values: Tensor, scatter: ScatterRange, group: dist.ProcessGroup) -> None:
        own = values[scatter.own.start - scatter.start : scatter.own.stop - scatter.start]
        self._values = self._out = values
        if len(scatter) % scatter.num_lanes:
            self._out = values.new_empty(scatter.strip_length * scatter.num_lanes)
            padded = self._out[scatter.lane * scatter.strip_length :][: scatter.strip_length]
            padded[: own.numel()].copy_(own)
            own = padded
        self._work = all_gather(self._out, own, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._out is not self._values:
            self._values.copy_(self._out[: self._values.numel()])


def _await(gathers: Iterable[_StripGather]) -> None:
    """Waits for each once the next has begun: gloo has a copy of every range that is under way."""
    before = None
    for gather in gathers:
        if before is not None:
            before.wait()
        before = gather
    if before is not None:
        before.wait()


def _moved_parameters(chunks: Sequence[Chunk]) -> Iterator[Tensor]:
    """Moves the parameters into one flat tensor per gradient buffer, in the order of the flat space."""
    for buffer in buffers(chunks):
        values = torch.zeros(buffer.numel, dtype=buffer.param_dtype, device=buffer.grad_data.device)
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            place = values[start:stop].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
        yield values
