"""Adam divided over the lanes of a group (ZeRO-1, arXiv 1910.02054): a rank has the state of its own strips and updates
them. Every group has all of the state, unlike stacked state, which has the same parts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.flat_gradients import ScatterRange
from spare_megatron.mcore.gradients.partitions import OWN, StatePartitions
from spare_megatron.mcore.gradients.tied_parameters import counts_for_norm, is_divided_expert, shared_by_stages
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.mcore.optimizer.fragment_adam import FragmentAdam
from spare_megatron.mcore.optimizer.lane_buffers import LaneBuffers


class DividedOptimizer(FragmentAdam):
    """Updates a rank's own strips of `ranges`, and gathers those of the other `lanes`. With `reduce.mode=reproducible`
    all lanes have all gradients before, so that their norm has the same bits at any number of lanes.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[Chunk],
        groups: GroupCollection,
        ranges: Sequence[ScatterRange],
        lanes: Sequence[dist.ProcessGroup],
    ) -> None:
        self._shared = LaneBuffers(chunks, ranges, lanes)
        self.strips = [[one.own.start, one.own.stop] for one in ranges]
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

    def step(self) -> tuple[float, float]:
        """As `Optimizer.step`."""
        norm = self._norm()
        learning_rate = self._update(norm)
        self._shared.gather_parameters()
        return norm, learning_rate

    def _norm(self) -> float:
        if self.has_all_gradients:
            counted = [one for one in self.parameters if counts_for_norm(one, self._groups)]
            norms = [
                get_grad_norm_fp32([one.main_grad for one in part], grad_stats_parallel_group=group)
                for part, group in self._by_replicas(counted)
            ]
            return math.hypot(*norms)
        own = [one.gradient for one in self.fragments() if counts_for_norm(one.parameter, self._groups)]
        return float(get_grad_norm_fp32(own, grad_stats_parallel_group=self._lanes_and_mp))

    def _by_replicas(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> Iterator[tuple[list[torch.nn.Parameter], dist.ProcessGroup]]:
        """Parameters that every lane has, and experts if lanes divide them, with the ranks that have all of each."""
        yield [one for one in parameters if not is_divided_expert(one)], self._groups.mp
        if self._groups.ep.size() > 1:
            yield [one for one in parameters if is_divided_expert(one)], self._groups.tp_ep_pp

    def main_parameters(self) -> list[tuple[str, Tensor]]:
        """The fp32 parameters of the own strips of a bf16 model, by name; empty otherwise."""
        return [("main parameters of the own strips", self.state[0])] if self.has_main else []

    def digest(self) -> TensorsDigest:
        """Digest of all optimizer state, bitwise equal on this rank of every group."""
        return TensorsDigest([("state", self.state)], head=repr(self.num_updates))

    @property
    def state(self) -> Tensor:
        """That of the own strips, rows as in `whole_partitions`."""
        return self.whole_partitions()[OWN]

    def state_dict(self) -> dict[str, Any]:
        """State of the own strips and the schedule's position."""
        return {"schedule": self.schedule.state_dict(), "strips": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of the same strips, whose tensor is used from here on if it is on the device."""
        self.restore(state, {OWN: state["strips"].to(self.device)})
