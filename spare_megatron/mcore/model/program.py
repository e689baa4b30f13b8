"""The program of a run: who builds the model, computes the loss and reads the data; by default the settings' GPT."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.config.program_file import LOSS_TERMS, LossTerm, import_program
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.mcore.model import rng
from spare_megatron.mcore.model.batches import RecordedBatch, UnreadMask, keys_needed, masks_to_read, on_device
from spare_megatron.mcore.model.future_tokens import future_terms, take_terms
from spare_megatron.mcore.model.model import Chunk, ModelProvider, gpt_model
from spare_megatron.mcore.model.pipeline import summed_loss
from spare_megatron.mcore.model.probe import Probe
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.mcore.model.training_samples import Corpus, Dataset, corpus_dataset

LOSS = "loss"
"""The term of the loss that every program has, whose count divides the gradient."""

Batch = Mapping[str, Tensor]
"""Tensors of a microbatch by name, each [micro_batch_size, ...]; between the ends of a pipeline empty, unless
`data.reset_attention_mask` is set."""

Terms = Mapping[str, tuple[Tensor, Tensor | int | None]]
"""Sum and count of each term of the loss; the count None stands for all tokens of the microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """All that a forward pass may depend on beside its batch and the parameters. `first_sequence`: sequences consumed
    before the microbatch. `pre_process`, `post_process`: whether the chunk takes the batch, and computes the loss.
    """

    config: RunConfig
    groups: ProcessGroupCollection
    device: torch.device
    step: int
    first_sequence: int
    pre_process: bool
    post_process: bool


ForwardStep = Callable[[Batch, torch.nn.Module, StepContext], tuple[Tensor, Terms]]
"""The forward pass of a microbatch through a chunk: its output and, from the last chunk, the terms of the loss."""

DatasetsProvider = Callable[[RunConfig], Dataset]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The roles of a run, of which a file defines `own`. `loss_terms` declares the terms beside `LOSS`, in the order of
    their sums.
    """

    model_provider: ModelProvider
    forward_step: ForwardStep
    datasets_provider: DatasetsProvider
    loss_terms: Mapping[str, LossTerm]
    own: frozenset[str] = frozenset()

    def corpus(self, config: RunConfig) -> Corpus:
        """The training samples of a run. Raises ValueError as `datasets_provider` does."""
        needed = keys_needed(config, has_own_forward_step="forward_step" in self.own)
        return Corpus(config, self.datasets_provider(config), needed)

    def forward(self, batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[Tensor, Terms]:
        """Calls `forward_step`. Raises UnreadMask if it has not read a mask that the settings ask for."""
        masks = masks_to_read(context.config.data, pre_process=context.pre_process, post_process=context.post_process)
        if not masks:
            return self.forward_step(batch, model, context)
        recorded = RecordedBatch(batch)
        result = self.forward_step(recorded, model, context)
        if unread := {key: setting for key, setting in masks.items() if key not in recorded.read}:
            raise UnreadMask("forward_step", "read", unread)
        return result


@dataclass(frozen=True, slots=True)
class ForwardPasses:
    """The forward passes of a rank's chunks, in training and in evaluations. `is_random`: they may draw numbers."""

    config: RunConfig
    program: Program
    groups: GroupCollection
    device: torch.device
    probe: Probe
    is_random: bool

    def run(
        self,
        chunk: Chunk,
        step: int,
        number: int,
        first_sequence: int,
        read: Callable[[], dict[str, Tensor]],
        on_batch: Callable[[Batch], object] | None = None,
    ) -> tuple[Tensor, Terms]:
        """Runs the microbatch of this number through a chunk. `read` is called if the chunk needs any of it: without a
        mask, chunks between the ends of the model do not. `on_batch`: called with what the model then takes.
        """
        config = self.config
        if self.is_random:
            tensor_rank = self.groups.tp.rank()
            rng.seed_microbatch(config.train.seed, step, number, chunk.stage, tensor_rank, self.device)
        batch: dict[str, Tensor] = {}
        if chunk.is_first or chunk.is_last or config.data.reset_attention_mask:
            with self.probe.during(Operation.STORAGE):
                batch = read()
            batch = on_device(batch, config, self.device, self.groups.cp)
            if on_batch is not None:
                on_batch(batch)
        context = StepContext(
            config=config,
            groups=self.groups,
            device=self.device,
            step=step,
            first_sequence=first_sequence,
            pre_process=chunk.is_first,
            post_process=chunk.is_last,
        )
        return self.program.forward(batch, chunk.module, context)


def gpt_forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[Tensor, Terms]:
    """The cross entropy of each next token, and of those after it that the model predicts, summed over the tokens that
    count; the default forward step.
    """
    labels = batch["labels"] if context.post_process else None
    output = model(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=labels)
    if not context.post_process:
        return output, {}
    return output, {LOSS: summed_loss(output, batch.get("loss_mask")), **take_terms(model)}


def _forward_step_by_corpus(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[Tensor, Terms]:
    """As `gpt_forward_step`, with the losses of the corpora of a blend as terms of their own, which add nothing."""
    output, terms = gpt_forward_step(batch, model, context)
    if not context.post_process or "corpus" not in batch:  # as in an evaluation
        return output, terms
    names = _terms_of_corpora(context.config)
    losses, mask = output.detach().float(), batch.get("loss_mask")
    if mask is None:
        mask = torch.ones_like(losses)
    is_from = batch["corpus"][:, :1] == torch.arange(len(names), device=losses.device)  # sequence, corpus
    sums = ((losses * mask).sum(dim=1, keepdim=True) * is_from).sum(dim=0)
    counts = (mask.count_nonzero(dim=1)[:, None] * is_from).sum(dim=0)
    return output, {**terms, **dict(zip(names, zip(sums, counts, strict=True), strict=True))}


def _terms_of_corpora(config: RunConfig) -> list[str]:
    """The terms that are over the tokens of one corpus each."""
    return [f"{LOSS}/{name}" for name in dict.fromkeys(config.data.corpus_names)]


def program_of(config: RunConfig) -> Program:
    """The run's program; imports its file. Raises ValueError if it cannot be used."""
    roles: Mapping[str, Any] = import_program(config.program) if config.program.file else {}
    defaults = {
        "model_provider": gpt_model,
        "forward_step": gpt_forward_step,
        "datasets_provider": corpus_dataset,
        LOSS_TERMS: future_terms(config),
    }
    if "forward_step" not in roles and len(names := _terms_of_corpora(config)) > 1:
        terms = {**future_terms(config), **dict.fromkeys(names, LossTerm())}
        defaults |= {"forward_step": _forward_step_by_corpus, LOSS_TERMS: terms}
    return Program(**{**defaults, **roles}, own=frozenset(roles) - {LOSS_TERMS})
