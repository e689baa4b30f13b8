"""Multi-token prediction by layers of `transformers`, as DeepSeek-V3 (arXiv 2412.19437, section 2.2) defines it: a task
of `mcore_group.run_group`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import Module

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.latent_group import deepseek, fill, gradients_of
from tests.integration.mcore_group import CPU, Arrays


class Ahead(Module):
    """What a module has beside its layer, by the names that Megatron gives it."""

    def __init__(self, width: int, norm: Module) -> None:
        super().__init__()
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.enorm, self.hnorm, self.final_layernorm = (type(norm)(width, norm.variance_epsilon) for _ in range(3))


def sums(config: RunConfig, parameters: Arrays, numbers: Sequence[int]) -> tuple[list[float], Arrays]:
    """The sum of each loss over microbatches of step 0, nearest token first, and the gradients of the loss that the
    settings say, times its number of tokens.
    """
    number, factor = config.megatron["mtp_num_layers"], config.megatron["mtp_loss_scaling_factor"]
    shape = replace(config.model, num_layers=config.model.num_layers + number)
    model, corpus = deepseek(replace(config, model=shape)), Corpus(config)
    ahead = [Ahead(shape.hidden_size, model.model.norm) for _ in range(number)]
    theirs = dict(model.named_parameters())
    for depth, module in enumerate(ahead):
        theirs |= {f"mtp.layers.{depth}.{name}": one for name, one in module.named_parameters()}
    layer = {
        f"mtp.layers.{depth}.transformer_layer": f"decoder.layers.{config.model.num_layers + depth}"
        for depth in range(number)
    }

    def named(name: str) -> str:
        module, _, rest = name.partition("transformer_layer.")
        return f"{layer[module + 'transformer_layer']}.{rest}" if rest else name

    values = {named(name): value for name, value in parameters.items()}
    fill(theirs, values)
    totals = [0.0] * (1 + number)
    for one in numbers:
        batch = corpus.microbatch(0, one)
        tokens = batch["tokens"]
        losses = _losses(model, ahead, tokens, batch["labels"])
        total = losses[0]
        for depth, loss in enumerate(losses[1:], 1):
            total = total + factor / number * loss * (tokens.shape[1] / (tokens.shape[1] - depth))
        total.backward()
        totals = [sofar + loss.item() for sofar, loss in zip(totals, losses, strict=True)]
    gradients = gradients_of(theirs, values)
    return totals, {name: gradients[named(name)] for name in parameters}


def loads(config: RunConfig) -> list[str]:
    """What metrics call the mixtures of the last stage."""
    counts = GroupTrainer(config, CPU).slabs[-1].gradients.experts
    return list(counts.by_layer(counts.tokens))


def _losses(model: Module, ahead: Sequence[Ahead], tokens: Tensor, labels: Tensor) -> list[Tensor]:
    base, length = model.model, tokens.shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    own, further = base.layers[: -len(ahead)], base.layers[-len(ahead) :]
    hidden = base.embed_tokens(tokens)
    rotary = base.rotary_emb(hidden, torch.arange(length)[None])
    for layer in own:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    hidden = base.norm(hidden)
    losses = [_cross_entropy(model.lm_head(hidden), labels)]
    for depth, (module, layer) in enumerate(zip(ahead, further, strict=True), 1):
        embedded = base.embed_tokens(F.pad(tokens[:, depth:], (0, depth)))
        joined = torch.cat([module.enorm(embedded), module.hnorm(hidden)], dim=-1)
        hidden = layer(module.eh_proj(joined), attention_mask=mask, position_embeddings=rotary)
        hidden = module.final_layernorm(hidden)
        losses.append(_cross_entropy(model.lm_head(hidden)[:, :-depth], labels[:, depth:]))
    return losses


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
