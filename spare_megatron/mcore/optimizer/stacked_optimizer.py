"""Adam with stacked state: each rank updates only the state partitions that its group hosts, clipped by the norm over
all, so that all hosts compute the same bits. Parameters of other partitions are stale until gathered.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.flat_gradients import counts_for_norm, needed_everywhere
from spare_megatron.mcore.gradients.host_copies import TensorBytes, issued_on
from spare_megatron.mcore.gradients.partitions import StatePartitions
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.fragment_adam import NUM_MOMENTS, FragmentAdam
from spare_megatron.stacking.layout import PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    """State of a piece after `num_updates` updates: main parameters (bf16 models), first, second moments; fp32."""

    num_updates: int
    data: bytes


class StackedOptimizer(FragmentAdam):
    """Updates the hosted state partitions. Another thread may read and install state meanwhile."""

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[Chunk],
        groups: ProcessGroupCollection,
        *,
        partitions: StatePartitions,
        hosted: Iterable[PartitionId],
    ) -> None:
        super().__init__(config, chunks, groups, partitions=partitions, hosted=hosted)
        self.needed_everywhere = needed_everywhere(chunks, groups)

    def step(self, squares: float | None = None) -> tuple[float, float]:
        """Clips by the norm over all partitions and updates; returns as `Optimizer.step`. `squares`: the sum of squared
        gradients of all partitions of this rank position, without those that every group needs; None if all are local.
        """
        norm = self._norm(squares)
        return norm, self._update(norm)

    def _norm(self, squares: float | None) -> float:
        counted = [parameter for parameter in self.parameters if counts_for_norm(parameter, self._groups)]
        if squares is None:
            gradients = [parameter.main_grad for parameter in counted]
            return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=self._groups.mp))
        here = [parameter.main_grad for parameter in counted if parameter in self.needed_everywhere]
        rest = torch.full((), squares, dtype=torch.float64, device=self.device)
        total = torch.stack([rest, *(gradient.double().square_().sum() for gradient in here)]).sum()
        torch.distributed.all_reduce(total, group=self._groups.mp)
        return math.sqrt(float(total))

    def part(self, _chunks: Sequence[Chunk]) -> dict[str, Any]:
        """As `Optimizer.part`: partitions are copied by themselves."""
        return self.state_dict()

    def load_part(self, _chunks: Sequence[Chunk], part: dict[str, Any]) -> None:
        self.load_state_dict(part)

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the schedule's position. Raises ValueError if partitions are already held."""
        if self._hosted:
            raise ValueError(f"the place in the schedule is that of the partitions held here: {sorted(self._hosted)}")
        self.schedule.load_state_dict(state["schedule"])

    # ---------------------------------------------------------------------------------------------------- gather

    def read_values(self, number: PartitionId, start: int, out: Tensor) -> None:
        """Copies model parameters of a partition, from element `start` on, into a flat tensor."""
        for fragment in self.partitions.fragments(number, slice(start, start + out.numel())):
            out[fragment.offset - start :][: fragment.stop - fragment.start].copy_(fragment.values)

    def write_values(self, number: PartitionId, start: int, values: Tensor) -> None:
        """Writes gathered parameters from element `start` of a partition on, except pieces just updated here."""
        stop = start + values.numel()
        for piece in range(self.partitions.num_pieces(number)):
            place = self.partitions.place(number, piece)
            place = slice(max(place.start, start), min(place.stop, stop))
            if place.start < place.stop and not self._was_updated(number, piece):
                for fragment in self.partitions.fragments(number, place):
                    fragment.values.copy_(values[fragment.offset - start :][: fragment.stop - fragment.start])

    def _was_updated(self, number: PartitionId, piece: int) -> bool:
        installed_at = self._hosted[number].installed_at if number in self._hosted else {}
        return piece in installed_at and installed_at[piece] < self.num_updates

    # ---------------------------------------------------------------------------------------- state of partitions

    @property
    def element_bytes(self) -> int:
        return (NUM_MOMENTS + self.has_main) * torch.float32.itemsize

    def state_digest(self, number: PartitionId) -> TensorsDigest:
        """Digest of a whole partition: model parameters and all optimizer state, bitwise equal on all hosts."""
        with self._lock:
            fragments = self.partitions.fragments(number, slice(0, self.partitions.length(number)))
            tensors = [("parameters", fragment.values) for fragment in fragments]
            if number in self._hosted:
                tensors.append(("state", self._hosted[number].state))
            return TensorsDigest(tensors)

    def read_piece(self, number: PartitionId, piece: int) -> PieceState:
        """The state of a held piece, consistent as of one update."""
        with self._lock:
            content = self._bytes_of(number, piece)
            data = bytes(content.read(Piece(0, content.num_bytes)))
            return PieceState(num_updates=self.num_updates, data=data)

    def _bytes_of(self, number: PartitionId, piece: int) -> TensorBytes:
        """The state of a piece, to be copied without waiting for passes issued since it last changed."""
        return TensorBytes(list(self._hosted[number].state[:, self.partitions.place(number, piece)]), self._changed)

    def install_piece(self, number: PartitionId, piece: int, state: PieceState) -> bool:
        """Takes the state of a piece over; False if its update count differs. ValueError: a wrong size, or it is held
        already.
        """
        with self._lock:
            if state.num_updates != self.num_updates:
                return False
            if number in self._hosted and piece in self._hosted[number].installed_at:
                raise ValueError(f"piece {piece} of partition {number} is held already")
            if number not in self._hosted:
                self._rows_of(number)
                self._changed = issued_on(self.device)
            content = self._bytes_of(number, piece)
            if len(state.data) != content.num_bytes:
                raise ValueError(
                    f"piece {piece} of partition {number} has {content.num_bytes} bytes, not {len(state.data)}"
                )
            with content.writing() as writer:
                writer.room(content.num_bytes)[:] = state.data
                writer.write(Piece(0, content.num_bytes))
            self._start_updating(number, piece)
            return True
