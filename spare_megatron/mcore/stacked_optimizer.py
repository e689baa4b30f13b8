"""Adam with stacked state: each rank updates only the state partitions that its group hosts.

State: two fp32 moments and, in bf16 models, fp32 main parameters. Gradients are clipped by the norm over all
partitions, so that all hosts compute the same bits. Other partitions' parameters are stale until gathered.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.pieces import Piece
from spare_megatron.mcore.digests import TensorsDigest
from spare_megatron.mcore.host_copies import TensorBytes, issued_on
from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.optimizer import adam_config, build_adam, make_schedule
from spare_megatron.mcore.partitions import Fragment, StatePartitions
from spare_megatron.mcore.tied_parameters import counts_for_norm, needed_everywhere
from spare_megatron.stacking.layout import PartitionId

_NUM_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    """State of a piece after `num_updates` updates: main parameters (bf16 models), first, second moments; fp32."""

    num_updates: int
    data: bytes


@dataclass(slots=True)
class _Hosted:
    """A partition held here in whole or in part.

    Attributes:
        state: fp32, one row of the partition's length for each kind of value in `PieceState.data`.
        installed_at: Piece -> number of updates that its state included when it arrived.
    """

    state: Tensor
    installed_at: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Updated:
    """A fragment that Adam updates; `values` are fp32 main parameters in bf16 models, else a view of the parameter."""

    number: PartitionId
    fragment: Fragment
    values: Tensor


class StackedOptimizer:
    """Updates the hosted state partitions, once per committed step.

    Partitions in `hosted` start from the present parameters. Another thread may read and install state meanwhile.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[Chunk],
        groups: ProcessGroupCollection,
        *,
        partitions: StatePartitions,
        hosted: Iterable[PartitionId],
    ) -> None:
        self.partitions = partitions
        parameter = next(iter(chunks[0].module.parameters()))
        self.values_dtype, self.device = parameter.dtype, parameter.device
        self._clip_grad = config.optimizer.clip_grad
        self._groups = groups
        self._needed_everywhere = needed_everywhere(chunks, groups)
        self.has_main = config.model.precision == "bf16"
        self.parameters, self._group_of, self._adam = _build_adam(config, chunks, groups)
        self.schedule = make_schedule(config, self._adam)
        self._lock = threading.Lock()
        self._hosted: dict[PartitionId, _Hosted] = {}
        self._updated: list[_Updated] = []
        self._changed: torch.cuda.Event | None = None  # when the state last did, in GPU work
        self.start_partitions(hosted)

    # ---------------------------------------------------------------------------------------------------- update

    @property
    def num_updates(self) -> int:
        """Updates so far, including those before this group took over its parameters."""
        return int(self.schedule.num_steps)

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def step(self, squares: float | None = None) -> tuple[float, float]:
        """Clips the gradients, updates the hosted partitions; returns the norm before clipping and the learning rate.

        `squares` is the sum of squared gradients of all partitions of this rank position, without those that every
        group needs; None if all gradients are local. Collective over: all ranks of the group.
        """
        learning_rate = self.schedule.get_lr({})
        norm = self._norm(squares)
        with self._lock, torch.no_grad():
            for updated in self._updated:
                updated.values.grad = updated.fragment.gradient
            if self._clip_grad > 0.0:
                clip_grad_by_total_norm_fp32([updated.values for updated in self._updated], self._clip_grad, norm)
            self._adam.step()
            if self.has_main:
                for updated in self._updated:
                    updated.fragment.values.copy_(updated.values)
            self.schedule.step(increment=1)
            self._changed = issued_on(self.device)
        return norm, float(learning_rate)

    def _norm(self, squares: float | None) -> float:
        counted = [parameter for parameter in self.parameters if counts_for_norm(parameter, self._groups)]
        if squares is None:
            gradients = [parameter.main_grad for parameter in counted]
            return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=self._groups.mp))
        here = [parameter.main_grad for parameter in counted if parameter in self._needed_everywhere]
        rest = torch.full((), squares, dtype=torch.float64, device=self.device)
        total = torch.stack([rest, *(gradient.double().square_().sum() for gradient in here)]).sum()
        torch.distributed.all_reduce(total, group=self._groups.mp)
        return math.sqrt(float(total))

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the schedule's position. Raises ValueError if partitions are already held."""
        if self._hosted:
            raise ValueError(f"the place in the schedule is that of the partitions held here: {sorted(self._hosted)}")
        self.schedule.load_state_dict(state["schedule"])

    def common_state(self) -> dict[str, Any]:
        """State that is equal on all ranks of all groups, in the form that replicated state has in checkpoints."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._adam.param_groups]
        adam = {"state": {"common_step": torch.tensor(float(self.num_updates))}, "param_groups": groups}
        return {"megatron": {"optimizer": adam} if self.has_main else adam, **self.state_dict()}

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
    def hosted(self) -> frozenset[PartitionId]:
        """The partitions whose whole state is here, including all empty ones."""
        cut = self.partitions
        numbers = (PartitionId(number) for number in range(cut.num_partitions))
        return frozenset(
            number for number in numbers if self._num_installed(number) == self.partitions.num_pieces(number)
        )

    def whole_partitions(self) -> dict[int, Tensor]:
        """State of the partitions that are whole here, rows as in `PieceState.data`; empty ones may be missing."""
        return {int(number): self._hosted[number].state for number in sorted(self.hosted) if number in self._hosted}

    @property
    def state_bytes(self) -> int:
        return sum(hosted.state.nbytes for hosted in self._hosted.values())

    @property
    def element_bytes(self) -> int:
        return (_NUM_MOMENTS + self.has_main) * torch.float32.itemsize

    def kept_values(self) -> Iterator[Tensor]:
        """Parameters as updated here (fp32 main parameters in bf16 models), partition by partition."""
        for updated in sorted(self._updated, key=lambda updated: (updated.number, updated.fragment.offset)):
            yield updated.values

    def first_moments(self) -> Iterator[Tensor]:
        """The first moments held here, partition by partition."""
        for number in sorted(self._hosted):
            if self._hosted[number].state.numel():
                yield self._hosted[number].state[-_NUM_MOMENTS]

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
        """Takes over the state of a piece, to be updated here; False if its update count differs from the one here.

        Raises ValueError if its size is wrong or the piece is already held.
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

    def start_partitions(self, numbers: Iterable[PartitionId]) -> None:
        """Starts partitions with zero moments and the model's parameters. Raises ValueError after the first update."""
        if self.num_updates:
            raise ValueError(f"after {self.num_updates} updates no partition can start from zero moments")
        with self._lock:
            for number in numbers:
                rows = self._rows_of(number)
                for piece in range(self.partitions.num_pieces(number)):
                    if self.has_main:
                        for fragment in self.partitions.fragments(number, self.partitions.place(number, piece)):
                            rows[0, fragment.place].copy_(fragment.values)
                    self._start_updating(number, piece)
            self._changed = issued_on(self.device)

    def restore(self, state: dict[str, Any], partitions: Mapping[PartitionId, Tensor]) -> None:
        """Replaces everything held here by a `state_dict` and whole partitions, made by `empty_state` and filled."""
        for number in sorted(self._hosted):
            self.drop(number)
        self.schedule.num_steps = 0  # Megatron adds the steps that it loads to those taken
        self.load_state_dict(state)
        self.install_partitions(partitions)

    def install_partitions(self, partitions: Mapping[PartitionId, Tensor]) -> None:
        """Takes over whole partitions of the same update count, not held yet, made by `empty_state` and filled."""
        with self._lock:
            for number, rows in partitions.items():
                self._hosted[number] = _Hosted(state=rows)
                for piece in range(self.partitions.num_pieces(number)):
                    self._start_updating(number, piece)
            self._changed = issued_on(self.device)

    def drop(self, number: PartitionId) -> None:
        with self._lock:
            if self._hosted.pop(number, None) is None:
                return
            dropped = [updated.values for updated in self._updated if updated.number == number]
            self._updated = [updated for updated in self._updated if updated.number != number]
            for values in dropped:
                del self._adam.state[values]
            for group in self._adam.param_groups:
                group["params"] = [values for values in group["params"] if values in self._adam.state]

    def _rows_of(self, number: PartitionId) -> Tensor:
        if number not in self._hosted:
            self._hosted[number] = _Hosted(state=self.empty_state(number))
        return self._hosted[number].state

    def empty_state(self, number: PartitionId) -> Tensor:
        """Zeros in the form of a partition's state in `whole_partitions`."""
        num_rows = _NUM_MOMENTS + self.has_main
        return torch.zeros(num_rows, self.partitions.length(number), dtype=torch.float32, device=self.device)

    def _start_updating(self, number: PartitionId, piece: int) -> None:
        hosted = self._hosted[number]
        hosted.installed_at[piece] = self.num_updates
        for fragment in self.partitions.fragments(number, self.partitions.place(number, piece)):
            *main, first, second = hosted.state[:, fragment.place]
            values = main[0] if main else fragment.values
            self._updated.append(_Updated(number=number, fragment=fragment, values=values))
            self._adam.param_groups[self._group_of[fragment.parameter]]["params"].append(values)
            # Not `tensor`, which would wait for all GPU work.
            step = torch.full((), float(self.num_updates), dtype=torch.float32, device=self.device)
            self._adam.state[values] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def _num_installed(self, number: PartitionId) -> int:
        return len(self._hosted[number].installed_at) if number in self._hosted else 0


def _build_adam(
    config: RunConfig, chunks: Sequence[Chunk], groups: ProcessGroupCollection
) -> tuple[list[torch.nn.Parameter], dict[torch.nn.Parameter, int], torch.optim.AdamW]:
    """Returns the parameters in Megatron's order, the parameter group of each, and an Adam with these groups, empty.

    Megatron makes the groups. It is asked for an fp32 model's optimizer, since the bf16 one would copy all parameters.
    """
    settings = config.optimizer
    as_fp32 = replace(config, model=replace(config.model, precision="fp32"))
    whole = build_adam(adam_config(as_fp32), chunks, groups, settings.rules)
    own = [
        {key: value for key, value in group.items() if key not in whole.optimizer.defaults} | {"params": []}
        for group in whole.param_groups
    ]
    adam = torch.optim.AdamW(
        own,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        # torch's: transformer-engine and apex count updates by parameter group, but pieces are installed one by one.
        fused=chunks[0].module.buffers[0].grad_data.is_cuda or None,
    )
    parameters = [parameter for group in whole.param_groups for parameter in group["params"]]
    group_of = {parameter: number for number, group in enumerate(whole.param_groups) for parameter in group["params"]}
    return parameters, group_of, adam
