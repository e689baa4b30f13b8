"""The rule of `optimizer.rules` that each parameter has, by names that do not depend on layout and kernels."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.program import judge_program
from spare_megatron.config.schema import ParameterRule, RunConfig


def parameter_names(config: RunConfig) -> Iterator[str]:
    """All parameters: layers count from 0 over all stages, tied tables are one, norms are modules of their own."""
    model, fields = config.model, model_fields(config)
    norm = ["weight"] if fields["normalization"] == "RMSNorm" else ["weight", "bias"]
    linear = ["weight", "bias"] if fields["add_bias_linear"] else ["weight"]
    modules = {
        "input_layernorm": norm,
        "self_attention.linear_qkv": ["weight", "bias"] if fields["add_qkv_bias"] else linear,
        "self_attention.linear_proj": linear,
        "pre_mlp_layernorm": norm,
        "mlp.linear_fc1": linear,
        "mlp.linear_fc2": linear,
    }
    if fields["qk_layernorm"]:
        modules |= {"self_attention.q_layernorm": norm, "self_attention.k_layernorm": norm}
    yield "embedding.word_embeddings.weight"
    if model.position_embedding == "learned_absolute":
        yield "embedding.position_embeddings.weight"
    for layer in range(model.num_layers):
        yield from (f"decoder.layers.{layer}.{module}.{kind}" for module, kinds in modules.items() for kind in kinds)
    yield from (f"decoder.final_layernorm.{kind}" for kind in norm)
    if not model.tie_embeddings:
        yield "output_layer.weight"


def rule_of(name: str, rules: Sequence[ParameterRule]) -> ParameterRule | None:
    """The first rule whose pattern matches the name; None if there is none."""
    return next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)


def rule_problems(config: RunConfig) -> Iterator[str]:
    """Factors outside their limits, and rules that no parameter of the settings' model has."""
    if not config.optimizer.rules:
        return
    # Only the model of a program knows the names of its parameters.
    is_ours = "model_provider" not in judge_program(config.program)[0]
    names = list(parameter_names(config)) if is_ours else []
    taken: set[str] = set()
    for number, rule in enumerate(config.optimizer.rules):
        key = f"optimizer.rules[{number}]"
        for field in ("learning_rate_factor", "weight_decay_factor"):
            factor = getattr(rule, field)
            if factor is not None and not 0.0 <= factor < math.inf:
                yield f"{key}.{field}={factor} must be at least 0 and finite; change it"
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
