"""The process groups inside one data-parallel group, as Megatron's ProcessGroupCollection."""

from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from spare_megatron.devices import gpu
from spare_megatron.mcore.model.compatibility import names_of_data_parallel_group
from spare_megatron.stacking.layout import Layout

_AXES = "pdect"
"""Axes of the rank grid, slowest first: pipeline, lane (d: equal experts, e: other ones), context, tensor."""

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed by torch 2.13


@dataclass
class GroupCollection(ProcessGroupCollection):
    """Megatron's process groups of a rank, and those of the ranks at its position in all `lanes` of the group: with the
    same experts, and times all context-parallel (cp) or tensor- and pipeline-parallel ranks (mp).
    """

    lanes: dist.ProcessGroup = field(init=False)
    expert_lanes: dist.ProcessGroup = field(init=False)
    expert_lanes_and_cp: dist.ProcessGroup = field(init=False)
    lanes_and_cp: dist.ProcessGroup = field(init=False)
    lanes_and_mp: dist.ProcessGroup = field(init=False)


def build_process_groups(layout: Layout, device: torch.device, timeout: timedelta) -> GroupCollection:
    """The process groups of this rank inside its group, which is the world; the tensor-parallel index varies fastest.
    Megatron sees a data-parallel size of 1: `dp` is this rank alone, `dp_cp` its context-parallel group. Collective
    over: all ranks of the group. Raises ValueError if the world's size differs from the layout's.
    """
    if dist.get_world_size() != layout.ranks_per_group:
        raise ValueError(
            f"the world has {dist.get_world_size()} ranks, but tensor x context x data x pipeline parallel size is "
            f"{layout.ranks_per_group}; start {layout.ranks_per_group} ranks or change [layout]"
        )
    maker = _GroupMaker(layout, "nccl" if device.type == gpu.TYPE else "gloo", timeout)
    groups = GroupCollection()
    groups.expert_lanes, groups.lanes = maker.along("d"), maker.along("de")
    groups.expert_lanes_and_cp = maker.along("dc")
    groups.lanes_and_cp, groups.lanes_and_mp = maker.along("dec"), maker.along("pdet")
    groups.tp, groups.cp, groups.pp = maker.along("t"), maker.along("c"), maker.along("p")
    groups.mp, groups.tp_ep_pp = maker.along("pt"), maker.along("pet")
    groups.tp_cp = groups.tp_dp_cp = maker.along("ct")
    groups.embd = maker.first_and_last_stage()
    groups.pos_embd = None
    groups.dp, groups.ep = maker.along(""), maker.along("e")
    groups.dp_cp = groups.intra_dp_cp = groups.expt_dp = groups.intra_expt_dp = groups.cp
    groups.expt_tp, groups.tp_ep = groups.tp, maker.along("et")
    groups.intra_dist_opt = groups.tp_dp_cp
    _publish_groups(groups)
    return groups


def _publish_groups(groups: ProcessGroupCollection) -> None:
    """Sets Megatron globals that it reads although the model was given its process groups: in
    tensor_parallel/cross_entropy.py, models/common/language_module/language_module.py (tied embeddings in checkpoints),
    transformer/moe/token_dispatcher.py (memory for gathered tokens), transformer/moe/moe_utils.py (expert biases) and
    transformer/multi_token_prediction.py.
    """
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = groups.tp
    parallel_state._CONTEXT_PARALLEL_GROUP = groups.cp
    parallel_state._DATA_PARALLEL_GROUP = groups.dp  # by which it knows that the first is there
    for name in names_of_data_parallel_group():
        setattr(parallel_state, name, groups.dp_cp)
    parallel_state._TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP = groups.tp_dp_cp
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


class _GroupMaker:
    """Makes each set of process groups once, in the same order on every rank, as `new_group` requires."""

    def __init__(self, layout: Layout, backend: str, timeout: timedelta) -> None:
        sizes = (
            layout.pipeline_parallel,
            layout.data_parallel // layout.expert_parallel,
            layout.expert_parallel,
            layout.context_parallel,
            layout.tensor_parallel,
        )
        self._grid = np.arange(layout.ranks_per_group).reshape(sizes)
        self._backend = backend
        self._timeout = timeout
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def along(self, axes: str) -> dist.ProcessGroup:
        """This rank's group of the ranks that differ only along the given axes."""
        fixed = [number for number, axis in enumerate(_AXES) if axis not in axes]
        varying = [number for number, axis in enumerate(_AXES) if axis in axes]
        size = int(np.prod([self._grid.shape[number] for number in varying], dtype=int))
        group = self._make(np.transpose(self._grid, fixed + varying).reshape(-1, size), axes or "self")
        assert group is not None, "the groups along an axis partition the world"
        return group

    def first_and_last_stage(self) -> dist.ProcessGroup | None:
        """The group that keeps tied embeddings equal (`mcore.gradients.flat_gradients`); None on a middle stage."""
        if self._grid.shape[0] == 1:
            return self.along("")
        return self._make(np.stack([self._grid[0], self._grid[-1]], axis=-1).reshape(-1, 2), "embd")

    def _make(self, members: np.ndarray, description: str) -> dist.ProcessGroup | None:
        key = tuple(tuple(row) for row in members.tolist())
        if key not in self._made:
            self._made[key] = None
            for ranks in key:
                group = dist.new_group(
                    list(ranks), timeout=self._timeout, backend=self._backend, group_desc=description
                )
                if dist.get_rank() in ranks:
                    self._made[key] = group
        return self._made[key]
