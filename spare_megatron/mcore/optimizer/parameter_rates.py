"""Learning rate and weight decay by parameter, as overrides of Megatron's parameter groups."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import combine_param_group_overrides

from spare_megatron.config.model.model_tensors import WORDS, of_all_experts, with_local_norms
from spare_megatron.config.model.parameter_rules import rule_of
from spare_megatron.config.schema import ParameterRule
from spare_megatron.mcore.gradients.tied_parameters import tied_embedding
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.parameters import named_parameters


def overrides(
    config: OptimizerConfig, chunks: Sequence[Chunk], rules: Sequence[ParameterRule]
) -> dict[ParamKey, dict[str, Any]]:
    """For `get_megatron_optimizer`: Megatron's own, no weight decay on biases and vectors, changed by the rules."""
    standard: dict[ParamKey, dict[str, Any]] = get_standard_config_overrides(config)
    if not rules:
        return standard
    having: dict[tuple[tuple[str, float], ...], set[torch.nn.Parameter]] = {}
    for name, parameter in names_for_rules(chunks):
        rates = combine_param_group_overrides([one for key, one in standard.items() if key.matches(parameter, name)])
        rates |= _rates(config, rule_of(name, rules))
        if rates.get("wd_mult") == 1.0:
            del rates["wd_mult"]  # Megatron confuses groups that differ in nothing when it loads a checkpoint
        having.setdefault(tuple(sorted(rates.items())), set()).add(parameter)
    # Disjoint, since Megatron refuses overrides that differ and meet at one parameter.
    return {
        ParamKey(predicate=ParamPredicate(name=repr(rates), fn=lambda one, those=those: one in those)): dict(rates)
        for rates, those in having.items()
        if rates
    }


def _rates(config: OptimizerConfig, rule: ParameterRule | None) -> dict[str, float]:
    rates: dict[str, float] = {}
    if rule is not None and rule.weight_decay_factor is not None:
        rates["wd_mult"] = rule.weight_decay_factor
    if rule is not None and rule.learning_rate_factor != 1.0:
        # Megatron's schedule reads the limits alone, and loading a checkpoint the factor alone.
        factor = rule.learning_rate_factor
        rates |= {"lr_mult": factor, "max_lr": config.lr * factor, "min_lr": config.min_lr * factor}
    return rates


def names_for_rules(chunks: Sequence[Chunk]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank by the names of `parameter_names`: both copies of a tied table have one."""
    for chunk in chunks:
        tied = tied_embedding(chunk)
        for named in named_parameters([chunk]):
            name = WORDS if named.parameter is tied else of_all_experts(named.name)
            yield with_local_norms(name), named.parameter
