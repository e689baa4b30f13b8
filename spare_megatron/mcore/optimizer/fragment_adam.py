"""Adam over fragments of parameters: its state is that of the state partitions held here, and only they are updated:
two fp32 moments and, in bf16 models, fp32 main parameters.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.devices import gpu
from spare_megatron.mcore.gradients.host_copies import issued_on
from spare_megatron.mcore.gradients.partitions import Fragment, StatePartitions
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.optimizer import build_optimizer, make_schedule, optimizer_config, parts_of
from spare_megatron.stacking.layout import PartitionId

NUM_MOMENTS = 2


@dataclass(slots=True)
class Hosted:
    """A partition held here in whole or in part. `state`: fp32 rows: main parameters (bf16 models), first, second
    moments. `installed_at`: piece -> number of updates that its state included when it arrived.
    """

    state: Tensor
    installed_at: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Updated:
    """A fragment that Adam updates; `values` are fp32 main parameters in bf16 models, else a view of the parameter."""

    number: PartitionId
    fragment: Fragment
    values: Tensor


class FragmentAdam:
    """Updates the fragments of the state partitions held here; those in `hosted` start from the present parameters."""

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
        self.has_main = config.model.precision == "bf16"
        self.parameters, self._group_of, self._adam = _build_adam(config, chunks, groups)
        self.schedule = make_schedule(config, self._adam)
        self._lock = threading.Lock()
        self._hosted: dict[PartitionId, Hosted] = {}
        self._updated: list[_Updated] = []
        self._changed: gpu.Event | None = None  # when the state last did, in GPU work
        self.start_partitions(hosted)

    # ---------------------------------------------------------------------------------------------------- update

    @property
    def num_updates(self) -> int:
        """Updates so far, including those before this group took over its parameters."""
        return int(self.schedule.num_steps)

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def _update(self, norm: float) -> float:
        """Clips the gradients by `norm` and updates the partitions held here; returns the learning rate."""
        learning_rate = self.schedule.get_lr({})
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
        return float(learning_rate)

    def common_state(self) -> dict[str, Any]:
        """State that is equal on all ranks of all groups, in the form that replicated state has in checkpoints."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._adam.param_groups]
        adam = {"state": {"common_step": torch.tensor(float(self.num_updates))}, "param_groups": groups}
        return {"megatron": {"optimizer": adam} if self.has_main else adam, "schedule": self.schedule.state_dict()}

    # ---------------------------------------------------------------------------------------- state of partitions

    @property
    def hosted(self) -> frozenset[PartitionId]:
        """The partitions whose whole state is here, including all empty ones."""
        cut = self.partitions
        return frozenset(number for number in cut.numbers if self._num_installed(number) == cut.num_pieces(number))

    def whole_partitions(self) -> dict[int, Tensor]:
        """State of the partitions that are whole here, rows as in `Hosted.state`; empty ones may be missing."""
        return {int(number): self._hosted[number].state for number in sorted(self.hosted) if number in self._hosted}

    def fragments(self) -> Iterator[Fragment]:
        yield from (updated.fragment for updated in self._updated)

    def kept_values(self) -> Iterator[Tensor]:
        """Parameters as updated here (fp32 main parameters in bf16 models), partition by partition."""
        for updated in sorted(self._updated, key=lambda updated: (updated.number, updated.fragment.offset)):
            yield updated.values

    def first_moments(self) -> Iterator[Tensor]:
        """The first moments held here, partition by partition."""
        for number in sorted(self._hosted):
            if self._hosted[number].state.numel():
                yield self._hosted[number].state[-NUM_MOMENTS]

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
        """Replaces everything held here, by the schedule of a state and whole partitions as in `install_partitions`."""
        for number in sorted(self._hosted):
            self.drop(number)
        self.schedule.num_steps = 0  # Megatron adds the steps that it loads to those taken
        self.schedule.load_state_dict(state["schedule"])
        self.install_partitions(partitions)

    def install_partitions(self, partitions: Mapping[PartitionId, Tensor]) -> None:
        """Takes over whole partitions of the same update count, not held yet, made by `empty_state` and filled."""
        with self._lock:
            for number, rows in partitions.items():
                self._hosted[number] = Hosted(state=rows)
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
            self._hosted[number] = Hosted(state=self.empty_state(number))
        return self._hosted[number].state

    def empty_state(self, number: PartitionId) -> Tensor:
        """Zeros in the form of a partition's state in `whole_partitions`."""
        num_rows = NUM_MOMENTS + self.has_main
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
    """The parameters in Megatron's order, the group of each, and an empty Adam with Megatron's groups, made as for an
    fp32 model: that of a bf16 one would copy all parameters.
    """
    settings = config.optimizer
    as_fp32 = replace(config, model=replace(config.model, precision="fp32"))
    of_experts_too = parts_of(build_optimizer(optimizer_config(as_fp32), chunks, groups, settings.rules))
    all_groups = [group for one in of_experts_too for group in one.param_groups]
    defaults = of_experts_too[0].optimizer.defaults
    own = [{key: value for key, value in group.items() if key not in defaults} | {"params": []} for group in all_groups]
    adam = torch.optim.AdamW(
        own,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        # torch's: transformer-engine and apex count updates by parameter group, but pieces are installed one by one.
        fused=chunks[0].module.buffers[0].grad_data.device.type == gpu.TYPE or None,
    )
    parameters = [parameter for group in all_groups for parameter in group["params"]]
    group_of = {parameter: number for number, group in enumerate(all_groups) for parameter in group["params"]}
    return parameters, group_of, adam
