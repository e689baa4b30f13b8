"""What metrics of steps have to be: a run again in one process that holds the full model, and plain sums over it."""

from typing import Any

import numpy as np
import torch

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.expert_group import all_units
from tests.integration.mcore_group import CPU, agreed_loss, all_work, numbers_of, reduce_alone

HALF = 128
"""Tokens of the first corpus are below, those of the second one are not."""


def recomputed(config: RunConfig, end: int) -> list[dict[str, Any]]:
    """Of each step: `means`, the losses of tokens of the corpora `low` and `high` that are not `end`; `tokens` of each
    that were read.
    """
    trainer = GroupTrainer(config, CPU)
    answers = []
    for step in range(config.train.steps):
        trainer.begin_step(step)
        answers.append(_by_corpus(trainer, config, step, end))
        trainer.compute(all_work(config, step))
        reduce_alone(trainer)
        trainer.update(agreed_loss(trainer), terms=trainer.slabs[0].gradients.totals().terms)
    return answers


def _by_corpus(trainer: GroupTrainer, config: RunConfig, step: int, end: int) -> dict[str, Any]:
    model = trainer.chunks[0].module.module
    losses: dict[str, list[np.ndarray]] = {"low": [], "high": []}
    read = dict.fromkeys(losses, 0)
    with torch.no_grad():
        for number in numbers_of(config, all_work(config, step), step):
            batch = on_device(trainer.corpus.microbatch(step, number), config, CPU, trainer.process_groups.cp)
            found = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).numpy()
            for tokens, of_sequence in zip(batch["tokens"].numpy(), found, strict=True):
                name = "low" if tokens[tokens != end].max() < HALF else "high"
                losses[name].append(of_sequence[tokens != end])
                read[name] += len(tokens)
    sums = {name: np.concatenate(found).astype(np.float64) for name, found in losses.items()}
    return {"means": {name: float(found.mean()) for name, found in sums.items()}, "tokens": read}


def figures_of(config: RunConfig) -> tuple[None, dict[str, Any], dict[str, Any], float]:
    """Of the whole batch of step 0 in two calls: this rank's parameters before it as `mcore_group.compute_sums` has
    them, what it adds to figures of the model, and the gradient norm.
    """
    trainer = GroupTrainer(config, CPU)
    parameters = {
        named.name: (value := named.parameter.detach().numpy().copy(), value, named.partition_dim)
        for named in trainer.parameters_named()
    }
    trainer.begin_step(0)
    work = all_units(config, 0)
    trainer.compute(work[:2])
    trainer.compute(work[2:])
    reduce_alone(trainer)
    result = trainer.update(agreed_loss(trainer))
    assert result.figures is not None
    return None, parameters, dict(result.figures), result.grad_norm
