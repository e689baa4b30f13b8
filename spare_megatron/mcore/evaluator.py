"""The forward passes of an evaluation on one rank: exact sums of the losses over the validation sets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import units_per_set
from spare_megatron.core.log.loss_sums import FRACTION_BITS, SetSum, added
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.loss_terms import LossTerms
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.pipeline import Item, LossFunction, Pipeline, share_in_lane
from spare_megatron.mcore.model.probe import Probe
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.mcore.model.program import LOSS, ForwardPasses, Program, Terms
from spare_megatron.mcore.model.training_samples import ValidationWindows, validation_sets
from spare_megatron.stacking.plans import Microbatch, Numbered


class EvaluationData:
    """Microbatches of the validation sets: consecutive units of a shard, set by set.

    Unit k of a set has the microbatches (k N + shard) R to (k N + shard + 1) R - 1 of the set, with N shards and units
    of R microbatches. A microbatch that the set lacks in part is left out.
    """

    def __init__(self, config: RunConfig, sets: Mapping[str, ValidationWindows]) -> None:
        self._sets = sets
        self._names = tuple(sets)
        self._num_shards = config.layout.num_groups
        self._size = config.train.micro_batch_size
        self._row_size = config.row_size
        self._per_set = units_per_set(config)
        self.units_per_shard = len(self._names) * self._per_set

    def set_of(self, unit: Microbatch) -> str:
        return self._names[unit.index // self._per_set]

    def item(self, microbatch: Numbered) -> Item:
        """The microbatch, or padding in its place that keeps the lanes of a row together."""
        if self.has(microbatch):
            return Item(microbatch)
        return Item(self.first_of(microbatch.unit), is_padding=True)

    def has(self, microbatch: Numbered) -> bool:
        return self.windows_of(microbatch).stop <= len(self._sets[self.set_of(microbatch.unit)])

    def microbatch(self, microbatch: Numbered) -> dict[str, Tensor]:
        """As `Corpus.microbatch`."""
        windows = self._sets[self.set_of(microbatch.unit)]
        samples = [windows.sample(number) for number in self.windows_of(microbatch)]
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    def first_of(self, unit: Microbatch) -> Numbered:
        return Numbered(unit, (unit.shard * self.units_per_shard + unit.index) * self._row_size)

    def windows_of(self, microbatch: Numbered) -> range:
        shard, index = microbatch.unit
        in_row = microbatch.number % self._row_size
        first = (((index % self._per_set) * self._num_shards + shard) * self._row_size + in_row) * self._size
        return range(first, first + self._size)


@dataclass
class Evaluator:
    """Computes microbatches of the validation sets and adds up their losses; changes no gradient, generator or
    schedule.
    """

    config: RunConfig
    chunks: Sequence[Chunk]
    groups: GroupCollection
    pipeline: Pipeline
    program: Program
    terms: LossTerms
    device: torch.device
    probe: Probe

    def __post_init__(self) -> None:
        """Opens the validation sets. Raises ValueError as `ValidationWindows` does."""
        # A program may draw numbers in evaluation mode, too.
        is_random = bool(self.config.program.file)
        self._passes = ForwardPasses(self.config, self.program, self.groups, self.device, self.probe, is_random)
        self._data = EvaluationData(self.config, validation_sets(self.config))
        self._no_tokens = torch.tensor(0, dtype=torch.int)  # the schedule adds it up, but nothing uses the total
        self._step = 0
        self._seen: list[Numbered] = []
        self._losses: list[tuple[str, Tensor, Tensor]] = []  # set, sum and count of each microbatch
        self.sums: tuple[SetSum, ...] = ()
        """Over everything computed since `reset`; empty except on the last pipeline stage."""

    def reset(self, step: int) -> None:
        """Starts an evaluation after this many committed steps."""
        self._step, self.sums = step, ()

    def compute(self, work: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Adds the losses of this lane's share of `work` to `sums`; returns the work. Collective over: all ranks of the
        group. Raises RuntimeError if the schedule runs another share.
        """
        present = [unit for unit in work if self._data.has(self._data.first_of(unit))]
        share = share_in_lane(present, self.groups, self.config, self._data.units_per_shard)
        items = [self._data.item(microbatch) for microbatch in share]
        asked = [item.microbatch for item in items if not item.is_padding]
        self._seen.clear()
        self._losses.clear()
        is_training = [chunk.module.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.module.eval()
        try:
            with torch.no_grad():
                self.pipeline.run(items, self._forward, is_forward_only=True)
        finally:
            for chunk, was_training in zip(self.chunks, is_training, strict=True):
                chunk.module.train(was_training)
        if sorted(self._seen) != sorted(asked):
            raise RuntimeError(f"an evaluation ran {self._seen} where {asked} was asked for")
        sums = [SetSum(name, _exact(float(loss)), int(num)) for name, loss, num in self._losses]
        self.sums = added([self.sums, sums])
        return work

    def _forward(self, chunk: Chunk, item: Item) -> tuple[Tensor, LossFunction]:
        self.probe(FaultPoint.EVALUATION)
        if chunk is self.chunks[0] and not item.is_padding:
            self._seen.append(item.microbatch)
        one = item.microbatch
        first, read = self._data.windows_of(one).start, partial(self._data.microbatch, one)
        output, terms = self._passes.run(chunk, self._step, one.number, first, read)
        if chunk.is_last:
            output = self._add(item, terms)
        return output, lambda loss: (loss, self._no_tokens, {})

    def _add(self, item: Item, terms: Terms) -> Tensor:
        """Keeps the loss of a microbatch, which it returns."""
        if not item.is_padding:
            loss = self.terms.whole_sum(terms), self.terms.whole_count(terms)
            self._losses.append((self._data.set_of(item.microbatch.unit), *loss))
        return terms[LOSS][0]


def _exact(loss: float) -> int | None:
    return round(math.ldexp(loss, FRACTION_BITS)) if math.isfinite(loss) else None
