"""Adam divided over the lanes of a group (ZeRO-1, arXiv 1910.02054): a rank has the state of its own strips and updates
them. Every group has all of the state, unlike stacked state, which has the same parts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.flat_gradients import FlatSpace, counts_for_norm, shared_by_stages
from spare_megatron.mcore.gradients.partitions import OWN, StatePartitions
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.mcore.optimizer.fragment_adam import FragmentAdam
from spare_megatron.mcore.optimizer.lane_buffers import LaneBuffers
from spare_megatron.mcore.optimizer.parameters import GradientsForNorm, whole_for_norm


class DividedOptimizer(FragmentAdam):
    """Updates a rank's own strips of the flat `spaces` of its slabs, given in layer order by their chunks, and gathers
    those of the other lanes. With `reduce.mode=reproducible` all lanes have all gradients before, so that their norm
    has the same bits at any number of lanes.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: GroupCollection,
        spaces: Sequence[tuple[Sequence[Chunk], FlatSpace]],
    ) -> None:
        chunks = [chunk for of_slab, _ in spaces for chunk in of_slab]
        self._slabs: dict[int, _SlabState] = {}  # by the first chunk
        first = 0
        for (of_first, *_), space in reversed(spaces):  # as the flat space of all chunks
            own = [[one.own.start, one.own.stop] for one in space.ranges]
            last = first + sum(len(one.own) for one in space.ranges)
            self._slabs[of_first.stage] = _SlabState(own, slice(first, last))
            first = last
        self._shared = LaneBuffers(spaces)
        partitions = StatePartitions(self._shared.own_spans(), 1, piece_elements=None)
        super().__init__(config, chunks, groups, partitions=partitions, hosted=[OWN])
        self.has_all_gradients = config.reduce.mode == "reproducible"
        everything = frozenset(self.parameters)
        self._gathered = everything if self.has_all_gradients else shared_by_stages(chunks, groups)
        self._lanes_and_mp = groups.lanes_and_mp

    def gather_gradients(self) -> None:
        """Gathers the gradients of other lanes that the update needs: in the stages that place tied embeddings
        differently, or all. Collective over: all lanes.
        """
        self._shared.gather_gradients(self._gathered)

    def step(self, norm: float | None = None) -> tuple[float, float]:
        """As `Optimizer.step`."""
        norm = self._norm() if norm is None else norm
        learning_rate = self._update(norm)
        self._shared.gather_parameters()
        return norm, learning_rate

    def _norm(self) -> float:
        parts = self.for_norm()
        norms = [get_grad_norm_fp32([one for _, one in part], grad_stats_parallel_group=ranks) for part, ranks in parts]
        return math.hypot(*norms)

    def for_norm(self) -> Iterator[GradientsForNorm]:
        """As `Optimizer.for_norm`: own strips, or with all gradients parameters that every lane has, and experts if
        lanes divide them.
        """
        if not self.has_all_gradients:
            own = [one for one in self.fragments() if counts_for_norm(one.parameter, self._groups)]
            yield [(one.parameter, one.gradient) for one in own], self._lanes_and_mp
            return
        yield from whole_for_norm(self.parameters, self._groups)

    def strips(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """The own strips of the slabs of some chunks, each in the flat space of its slab."""
        found = [self._slabs[chunk.stage].strips for chunk in chunks if chunk.stage in self._slabs]
        return [strip for strips in found for strip in strips]

    def main_parameters(self, chunks: Sequence[Chunk]) -> list[tuple[str, Tensor]]:
        """The fp32 parameters of the own strips of a slab of a bf16 model, by name; empty otherwise."""
        return [("main parameters of the own strips", self._state_of(chunks)[0])] if self.has_main else []

    def digest(self, chunks: Sequence[Chunk]) -> TensorsDigest:
        """Digest of all optimizer state of a slab, bitwise equal on this rank of every group."""
        return TensorsDigest([("state", self._state_of(chunks))], head=repr(self.num_updates))

    @property
    def state(self) -> Tensor:
        """That of the own strips, rows as in `whole_partitions`."""
        return self.whole_partitions()[OWN]

    def _places_of(self, chunks: Sequence[Chunk]) -> list[slice]:
        """Where the state of the slabs of some chunks is."""
        return [self._slabs[chunk.stage].place for chunk in chunks if chunk.stage in self._slabs]

    def _state_of(self, chunks: Sequence[Chunk]) -> Tensor:
        """The part of `state` of the slabs of some chunks."""
        parts = [self.state[:, place] for place in self._places_of(chunks)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def part(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "strips": self._state_of(chunks)}

    def load_part(self, chunks: Sequence[Chunk], part: dict[str, Any]) -> None:
        whole, places = self.state, self._places_of(chunks)
        sizes = [place.stop - place.start for place in places]
        for place, strips in zip(places, part["strips"].split(sizes, dim=1), strict=True):
            whole[:, place].copy_(strips)
        self.restore(part, {OWN: whole})

    def state_dict(self) -> dict[str, Any]:
        """State of the own strips and the schedule's position."""
        return {"schedule": self.schedule.state_dict(), "strips": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of the same strips, whose tensor is used from here on if it is on the device."""
        self.restore(state, {OWN: state["strips"].to(self.device)})


class _SlabState(NamedTuple):
    """A slab's own strips, and where their state is in that of all."""

    strips: list[list[int]]
    place: slice
