"""A rank that trains custom programs, and the same step by plain autograd over the whole batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spare_megatron.config.program_file import LossTerm, import_program
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, all_work

PROGRAM = """
import torch
from megatron.core.transformer import MegatronModule
from spare_megatron import LossTerm

class Samples:
    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(6, 4, generator=generator)
        return {"values": values, "mask": (torch.rand(6, generator=generator) < 0.5).float()}

class Model(MegatronModule):
    def __init__(self, context):
        super().__init__(context.transformer)
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, values):
        return self.layer(values).squeeze(-1)

def model_provider(context):
    return Model(context)

def datasets_provider(config):
    return Samples()

def forward_step(batch, model, context):
    output, mask = model(batch["values"]), batch["mask"]
    return output, terms_of(output, mask, context)
"""


def means_of(config: RunConfig) -> dict[str, Any]:
    """Loss, means of further terms and gradient of a step whose every microbatch this rank computes, or the error."""
    trainer = GroupTrainer(config, CPU)
    trainer.begin_step(0)
    try:
        trainer.compute(all_work(config))
        for bucket in range(len(trainer.slabs[0].gradients.buckets)):
            staging = trainer.slabs[0].gradients.new_staging()
            trainer.slabs[0].gradients.stage(bucket, staging)
            trainer.slabs[0].gradients.on_summed(bucket, staging)
        totals = trainer.slabs[0].gradients.totals()
        result = trainer.update(totals.loss, None, totals.terms)
    except ValueError as error:
        return {"error": str(error)}
    gradients = {named.name: named.main_grad.numpy().copy() for named in trainer.parameters_named()}
    return {"loss": result.loss, "terms": dict(result.terms), "gradients": gradients}


def each_of(config: RunConfig, others: list[RunConfig]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each configuration `means_of` and the reference, which is empty for an error."""
    found = [(one, means_of(one)) for one in others]
    return [(ours, {} if "error" in ours else reference(one)) for one, ours in found]


def reference(config: RunConfig) -> dict[str, Any]:
    """The same by autograd over the whole batch at once: the mean of each term, times its weight."""
    found = import_program(config.program)
    declared: Mapping[str, LossTerm] = found.get("loss_terms", {})
    trainer = GroupTrainer(config, CPU)  # the same parameters
    module = trainer.chunks[0].module.module
    dataset, size = found["datasets_provider"](config), config.train.micro_batch_size
    sums: dict[str, Any] = {}
    for number in range(0, len(all_work(config)) * size, size):
        samples = [dataset[number + place] for place in range(size)]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        _, terms = found["forward_step"](batch, module, None)
        for name, (total, count) in terms.items():
            before, counted = sums.get(name, (0.0, 0))
            sums[name] = before + total, counted + int(count)
    means = {name: total / count for name, (total, count) in sums.items()}
    whole = means["loss"] + sum(term.weight * means[name] for name, term in declared.items())
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad(whole, list(named.values()))
    return {
        "loss": float(means["loss"]),
        "terms": {name: float(means[name]) for name in declared},
        "gradients": dict(zip(named, map(np.array, gradients), strict=True)),
    }


def written(folder: Path, name: str, declared: str, terms: str) -> str:
    file = folder / f"{name}.py"
    file.write_text(f"{PROGRAM}\nloss_terms = {declared}\ndef terms_of(output, mask, context):\n    {terms}\n")
    return str(file)
