"""The rule of `optimizer.rules` that each parameter has, by names that do not depend on layout and kernels."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from spare_megatron.config.model.model_tensors import model_tensors, with_local_norms
from spare_megatron.config.program_file import judge_program
from spare_megatron.config.schema import ParameterRule, RunConfig


def parameter_names(config: RunConfig) -> Iterator[str]:
    """All parameters: layers count from 0 over all stages, tied tables are one, norms are modules of their own."""
    return (with_local_norms(tensor.key_in_layer) for tensor in model_tensors(config) if not tensor.is_buffer)


def rule_of(name: str, rules: Sequence[ParameterRule]) -> ParameterRule | None:
    """The first rule whose pattern matches the name; None if there is none."""
    return next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)


def rule_problems(config: RunConfig) -> Iterator[str]:
    """Factors outside their limits, and rules that no parameter of the settings' model has."""
    if not config.optimizer.rules:
        return
    # Only the model of a program knows the names of its parameters.
    is_ours = "model_provider" not in judge_program(config.program)[0]
    is_shaped = config.model.num_attention_heads > 0  # else reported with the model
    names = list(parameter_names(config)) if is_ours and is_shaped else []
    taken: set[str] = set()
    for number, rule in enumerate(config.optimizer.rules):
        key = f"optimizer.rules[{number}]"
        for field in ("learning_rate_factor", "min_learning_rate_factor", "weight_decay_factor"):
            factor = getattr(rule, field)
            if factor is not None and not 0.0 <= factor < math.inf:
                yield f"{key}.{field}={factor} must be at least 0 and finite; change it"
        if rule.min_learning_rate_factor is not None and rule.learning_rate_factor == 1.0:
            yield f"{key}.min_learning_rate_factor has no effect without learning_rate_factor; set both, or neither"
        if not names:
            continue
        matched = {name for name in names if fnmatchcase(name, rule.pattern)}
        if not matched:
            yield (
                f"{key}.pattern={rule.pattern!r} matches no parameter of this model; names are like "
                f"{names[0]} and decoder.layers.0.mlp.linear_fc1.weight: change it, or remove the rule"
            )
        elif matched <= taken:
            yield f"{key}.pattern={rule.pattern!r} matches only parameters of earlier rules; move or remove the rule"
        taken |= matched
