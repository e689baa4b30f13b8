"""The full mixture of experts on one rank by plain autograd, with the losses of its routers as the papers have them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.group_checkpoint import model_state
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.model import ModelContext, gpt_model
from spare_megatron.mcore.model.process_groups import build_process_groups
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.mcore.trainer import GroupTrainer, UpdateResult
from spare_megatron.stacking.plans import Microbatch
from tests.integration.mcore_group import CPU, TIMEOUT_S, Arrays, agreed_loss, agreed_terms, reduce_alone, work_of


def reference_sums(
    config: RunConfig, balancing: str, parameters: Arrays, numbers: Sequence[int], coefficients: tuple[float, float]
) -> tuple[float, Arrays]:
    """Loss and gradients summed over some of step 0's microbatches; the configuration has no losses of routers.

    `coefficients` are those of the balancing loss (aux_loss or seq_aux_loss) and of the z-loss.
    """
    model, corpus = _full_model(config, parameters), Corpus(config)
    logits: list[Tensor] = []
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "router"):
            _record(layer.mlp.router, logits)
    loss_sum = 0.0
    for number in numbers:
        batch = on_device(corpus.microbatch(0, number), config, CPU, model.pg_collection.cp)
        logits.clear()
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).sum()
        total = loss
        for of_layer in logits:
            total = total + _router_loss(of_layer, balancing, config.model.experts_per_token, coefficients)
        total.backward()
        loss_sum += loss.item()
    gradients = {name: np.zeros_like(value) for name, value in parameters.items()}
    for name, parameter in model.named_parameters():
        gradients[name][: len(parameter)] = parameter.grad.numpy()
    return loss_sum, gradients


def biases_after_a_step(config: RunConfig) -> tuple[None, Arrays, dict[int, tuple[np.ndarray, ...]]]:
    """Of the whole batch of step 0 in two calls: parameters before it as `mcore_group.compute_sums` has them; and of
    each layer the biases before, which are not zero, how often the batch chose each expert, and the biases after.
    """
    trainer = GroupTrainer(config, CPU)
    routers = [layer.mlp.router for chunk in trainer.chunks for layer in unwrap_model(chunk.module).decoder.layers]
    for router in routers:
        router.expert_bias += 0.01 * torch.tensor([1.0, -1.0, 0.0, 0.5]).roll(router.layer_number)
    before = [router.expert_bias.numpy().copy() for router in routers]
    parameters = {
        named.name: (named.parameter.detach().numpy().copy(), named.main_grad.numpy().copy(), named.partition_dim)
        for named in trainer.parameters_named()
    }
    trainer.begin_step(0)
    work = all_units(config, 0)
    trainer.compute(work[:3])
    trainer.compute(work[3:])
    reduce_alone(trainer)
    trainer.slabs[0].gradients.finish()
    counted = trainer.slabs[0].gradients.experts.tokens.numpy().copy()
    trainer.update(agreed_loss(trainer))
    after = [router.expert_bias.numpy() for router in routers]
    numbers = [router.layer_number for router in routers]
    return None, parameters, dict(zip(numbers, zip(before, counted, after, strict=True), strict=True))


def chosen_experts(
    config: RunConfig, parameters: Arrays, numbers: Sequence[int], biases: Mapping[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """How many tokens of microbatches of step 0 choose each expert of a layer, whose biases are given."""
    model, corpus = _full_model(config, parameters), Corpus(config)
    chosen = {}
    for layer in model.decoder.layers:
        chosen[layer.layer_number] = counts = np.zeros(config.model.num_experts, dtype=np.int64)
        _route(layer.mlp.router, torch.from_numpy(biases[layer.layer_number]), config.model.experts_per_token, counts)
    with torch.no_grad():
        for number in numbers:
            batch = on_device(corpus.microbatch(0, number), config, CPU, model.pg_collection.cp)
            model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return chosen


def _route(router: Any, biases: Tensor, num_chosen: int, counts: np.ndarray) -> None:
    """Chooses by scores and biases, and weighs by scores: Wang et al., arXiv 2408.15664 (3)."""

    def routing(logits: Tensor, **_others: Any) -> tuple[Tensor, Tensor]:
        scores = logits.flatten(0, 1).sigmoid()
        experts = (scores + biases).topk(num_chosen).indices
        is_chosen = F.one_hot(experts, len(biases)).sum(1).bool()
        counts[:] += is_chosen.sum(0).numpy()
        weights = torch.where(is_chosen, scores, 0.0)
        return weights / weights.sum(1, keepdim=True), is_chosen

    router.routing = routing


def _record(router: Any, logits: list[Tensor]) -> None:
    gating = router.gating

    def recorded(given: Tensor) -> Tensor:
        logits.append(gating(given))  # [sequence, batch, experts]
        return logits[-1]

    router.gating = recorded


def _router_loss(logits: Tensor, balancing: str, num_chosen: int, coefficients: tuple[float, float]) -> Tensor:
    """The losses of a microbatch times its tokens: Fedus et al., arXiv 2101.03961 (4), and Zoph et al., 2202.08906."""
    num_tokens, num_experts = logits.shape[0] * logits.shape[1], logits.shape[2]
    parts = [logits.flatten(0, 1)] if balancing == "aux_loss" else [*logits.unbind(1)]
    balance = torch.zeros(())
    for part in parts:
        chosen = F.one_hot(part.topk(num_chosen).indices, num_experts).sum(1).float()
        shares = chosen.mean(0) / num_chosen
        balance = balance + num_experts * (shares * part.softmax(-1).mean(0)).sum() / len(parts)
    z_loss = logits.logsumexp(-1).square().mean()
    return num_tokens * (coefficients[0] * balance + coefficients[1] * z_loss)


def stored_shapes(_first: RunConfig, configs: Sequence[RunConfig]) -> list[dict[str, tuple[int, ...]]]:
    """Of each model, the tensors of the whole model as Megatron stores them."""
    answers = []
    for config in configs:
        trainer = GroupTrainer(config, CPU)
        state = list(nested_values(model_state(trainer.chunks, trainer.process_groups.lanes_and_cp)))
        parts = [part for part in state if isinstance(part, ShardedTensor)]
        for factory in (part for part in state if isinstance(part, ShardedTensorFactory)):
            parts += nested_values(factory.build())
        answers.append({part.key: part.global_shape for part in parts})
    return answers


def all_units(config: RunConfig, step: int) -> list[Microbatch]:
    indices = range(config.unit_ramp.at(step))
    return work_of(*((shard, index) for shard in range(config.layout.num_groups) for index in indices))


def curve(config: RunConfig) -> list[tuple[float, float, Mapping[str, Sequence[float]]]]:
    """Loss, gradient norm and what this rank adds to figures of the model of each step of a group that computes the
    whole batch.
    """
    results = _results(GroupTrainer(config, CPU), config, range(config.train.steps))
    return [(result.loss, result.grad_norm, result.figures or {}) for result in results]


def moved(
    config: RunConfig, layouts: Sequence[LayoutConfig], folder: Path
) -> list[tuple[list[tuple[float, float]], list[tuple[float, float]], dict[str, float]]]:
    """For each way between two layouts of as many ranks: the curve of a group that goes on, that of one that loads its
    checkpoint, and the sums of this rank's first experts in the one that saved."""
    configs = [replace(config, layout=layout) for layout in layouts]
    answers = []
    for number, (saving, loading) in enumerate(zip(configs, configs[::-1], strict=True)):
        trainer = GroupTrainer(saving, CPU)
        experts = _expert_sums(trainer)
        _steps(trainer, saving, range(2))
        (folder / str(number)).mkdir(exist_ok=True)
        state = trainer.checkpoint_state()
        state.copy()
        state.write(folder / str(number), dist.group.WORLD, lambda: None)
        dist.barrier()
        other = GroupTrainer(loading, CPU)
        other.load_checkpoint(folder / str(number))
        steps = range(2, 4)
        answers.append((_steps(trainer, saving, steps), _steps(other, loading, steps), experts))
    return answers


def _expert_sums(trainer: GroupTrainer) -> dict[str, float]:
    """By layer, expert and matrix."""
    pattern = re.compile(r"decoder\.layers\.(\d+)\..*local_experts\.(\d+)\.(linear_fc\d)\.weight")
    held = [(found, one) for one in trainer.parameters_named() if (found := pattern.fullmatch(one.name))]
    num_local = 1 + max((int(found[2]) for found, _ in held), default=0)
    first = trainer.process_groups.ep.rank() * num_local
    return {
        f"{found[1]} {first + int(found[2])} {found[3]}": float(one.parameter.double().sum()) for found, one in held
    }


def _steps(trainer: GroupTrainer, config: RunConfig, steps: range) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in _results(trainer, config, steps)]


def _results(trainer: GroupTrainer, config: RunConfig, steps: range) -> Iterator[UpdateResult]:
    for step in steps:
        trainer.begin_step(step)
        trainer.compute(all_units(config, step))
        reduce_alone(trainer)
        yield trainer.update(agreed_loss(trainer), terms=agreed_terms(trainer))


def _full_model(config: RunConfig, parameters: Arrays) -> GPTModel:
    cpu.install()
    transformer = transformer_config(config, CPU)
    groups = build_process_groups(config.parallel, CPU, timedelta(seconds=TIMEOUT_S / 2))
    model = gpt_model(
        ModelContext(
            config=config,
            transformer=transformer,
            groups=groups,
            device=CPU,
            stage=0,
            num_stages=1,
            layers=range(config.model.num_layers),
            virtual_stage=None,
        )
    )
    named = dict(model.named_parameters())
    assert named.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(parameters[name]))
    return model
