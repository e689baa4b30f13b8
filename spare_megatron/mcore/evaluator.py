"""The forward passes of an evaluation on one rank: exact sums of the losses over the validation sets."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.config.evaluation import sequences_per_set
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.evaluation import FRACTION_BITS, SetSum, added
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.mcore.data import ValidationWindows, on_device, validation_sets
from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.pipeline import Item, LossFunction, Pipeline
from spare_megatron.mcore.probe import Probe
from spare_megatron.stacking.plans import Microbatch

_Batch = dict[str, Tensor]


class EvaluationData:
    """Microbatches of the validation sets: consecutive indices of a shard, set by set.

    Index k of a set has its windows [(k N + shard) b, (k N + shard + 1) b), with N shards and b sequences in a
    microbatch. Windows that a set lacks count no token.
    """

    def __init__(self, config: RunConfig, sets: Mapping[str, ValidationWindows]) -> None:
        self._sets = sets
        self._names = tuple(sets)
        self._num_shards = config.layout.num_groups
        self._size = config.train.micro_batch_size
        self._per_set = sequences_per_set(config) // (self._num_shards * self._size)  # indices of each shard

    def set_of(self, microbatch: Microbatch) -> str:
        return self._names[microbatch.index // self._per_set]

    def is_empty(self, microbatch: Microbatch) -> bool:
        """Whether the set has none of the microbatch's windows."""
        return self._windows_of(microbatch).start >= len(self._sets[self.set_of(microbatch)])

    def _windows_of(self, microbatch: Microbatch) -> range:
        first = ((microbatch.index % self._per_set) * self._num_shards + microbatch.shard) * self._size
        return range(first, first + self._size)

    def microbatch(self, microbatch: Microbatch) -> _Batch:
        """`tokens`, `labels`, `position_ids` and `loss_mask`, each [micro_batch_size, seq_length]."""
        windows, numbers = self._sets[self.set_of(microbatch)], self._windows_of(microbatch)
        samples = [windows.sample(min(number, len(windows) - 1)) for number in numbers]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        is_there = torch.tensor([[number < len(windows)] for number in numbers])
        counting = batch.get("loss_mask", torch.ones_like(batch["tokens"], dtype=torch.float32))
        return {**batch, "loss_mask": counting * is_there}


class Evaluator:
    """Computes microbatches of the validation sets, with the parameters as they are, and adds up their losses.

    Changes nothing that training depends on: no gradient, no random state, no schedule.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        chunks: Sequence[Chunk],
        groups: ProcessGroupCollection,
        pipeline: Pipeline,
        device: torch.device,
        probe: Probe,
    ) -> None:
        """Opens the validation sets. Raises ValueError as `ValidationWindows` does."""
        self._config = config
        self._chunks = chunks
        self._groups = groups
        self._pipeline = pipeline
        self._device = device
        self._probe = probe
        self._data = EvaluationData(config, validation_sets(config))
        self._no_tokens = torch.tensor(0, dtype=torch.int)  # the schedule adds it up, but nothing uses the total
        self.sums: tuple[SetSum, ...] = ()
        """Over everything computed since `reset`; empty except on the last pipeline stage."""

    def reset(self) -> None:
        self.sums = ()

    def compute(self, work: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Adds the losses of some microbatches to `sums`; returns them.

        Collective over: all ranks of the group, with the same work in order. Raises RuntimeError if the schedule runs
        other work.
        """
        present = [item for item in work if not self._data.is_empty(item)]
        losses: list[Tensor] = []
        counted: list[tuple[str, int]] = []  # the set of each, and its tokens
        seen: list[Microbatch] = []

        def on_losses(item: Item, num_tokens: int, mask: Tensor, per_token: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss = (per_token.double() * mask).sum()
            if not item.is_padding:
                losses.append(loss)
                counted.append((self._data.set_of(item.microbatch), num_tokens))
            return loss.float(), self._no_tokens, {}

        def forward(chunk: Chunk, item: Item) -> tuple[Tensor, LossFunction]:
            self._probe(FaultPoint.EVALUATION)
            if chunk is self._chunks[0] and not item.is_padding:
                seen.append(item.microbatch)
            return self._forward(chunk, item, on_losses)

        is_training = [chunk.module.training for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.module.eval()
        try:
            with torch.no_grad():
                self._pipeline.run(present, forward, is_forward_only=True)
        finally:
            for chunk, was_training in zip(self._chunks, is_training, strict=True):
                chunk.module.train(was_training)
        if sorted(seen) != sorted(present):
            raise RuntimeError(f"an evaluation ran {seen} where {present} was asked for")
        if losses:
            sums = [
                SetSum(name, in_fixed_point(loss), num)
                for loss, (name, num) in zip(self._told(losses), counted, strict=True)
            ]
            self.sums = added([self.sums, sums])
        return work

    def _forward(self, chunk: Chunk, item: Item, on_losses: Callable[..., Any]) -> tuple[Tensor, LossFunction]:
        batch: _Batch = {}
        num_tokens = 0
        if chunk.is_first or chunk.is_last or self._config.data.reset_attention_mask:
            with self._probe.during(Operation.STORAGE):
                batch = self._data.microbatch(item.microbatch)
            num_tokens = int(batch["loss_mask"].sum())  # of the whole sequence, also with context parallelism
            batch = on_device(batch, self._config, self._device, self._groups.cp)
        labels = batch["labels"] if chunk.is_last else None
        output = chunk.module(
            batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=labels
        )
        return output, partial(on_losses, item, num_tokens, batch.get("loss_mask"))

    def _told(self, losses: Sequence[Tensor]) -> list[float]:
        """The losses over whole sequences; each context-parallel rank computes its part."""
        whole = torch.stack(list(losses))
        if self._groups.cp.size() > 1:
            torch.distributed.all_reduce(whole, group=self._groups.cp)
        return [float(loss) for loss in whole.tolist()]


def in_fixed_point(loss: float) -> int | None:
    """The loss as `SetSum` has it.

    >>> in_fixed_point(1.5), in_fixed_point(math.inf)
    (6442450944, None)
    """
    return round(math.ldexp(loss, FRACTION_BITS)) if math.isfinite(loss) else None
