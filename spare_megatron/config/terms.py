"""The terms of a training: what two runs must have in common for one to go on from the other's checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path

from spare_megatron.config.corpus import is_same_corpus
from spare_megatron.config.schema import RunConfig

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")

LAST_STATE_NAME = re.compile(r"step-(\d{8,})\.state")


def step_of(path: Path) -> int:
    """The committed steps that a checkpoint holds, by its name.

    Raises:
        ValueError: It is not the name of a checkpoint.
    """
    match = CHECKPOINT_NAME.fullmatch(path.name) or LAST_STATE_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a checkpoint is, step-NNNNNNNN")
    return int(match[1])


Terms = Mapping[str, int | float | str | bool | None]


FUNCTION_IN_MEGATRON: Mapping[str, object] = {
    "activation_func": "gelu",
    "activation_func_clamp_value": None,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "gated_linear_unit": False,
    "glu_linear_offset": 0.0,
    "kv_channels": None,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "no_rope_freq": None,
    "normalization": "LayerNorm",
    "num_query_groups": None,
    "qk_layernorm": False,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_attn_skip_freq": None,
    "window_size": None,
}
"""Megatron's fields that say which function of its parameters the model is, and their defaults. The others say how it
is computed, and may change on the way."""


def terms_of(config: RunConfig) -> Terms:
    """What fixes the model and the order of its data, by setting.

    The layout is none of them, nor are optimizer settings: a checkpoint loads at any layout, and the learning rate may
    be changed on the way.
    """
    model, train = config.model, config.train
    return {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
        "model.seq_length": model.seq_length,
        "model.vocab_size": model.vocab_size,
        "model.position_embedding": model.position_embedding,
        "model.tie_embeddings": model.tie_embeddings,
        "model.precision": model.precision,
        "train.seed": train.seed,
        "train.steps": train.steps,
        _BATCH: global_batch(config),
        _MEGATRON: _function_of(config),
        _CORPUS: config.data.identity,
    }


_CORPUS = "data.identity"

_MEGATRON = "[megatron]"

_BATCH = "layout.num_groups x spare.microbatches_per_shard x train.micro_batch_size"


def global_batch(config: RunConfig) -> int:
    """Sequences in a step."""
    return config.layout.num_groups * config.spare.microbatches_per_shard * config.train.micro_batch_size


def _function_of(config: RunConfig) -> str:
    """The fields that make another model than Megatron's defaults, in the order of their names."""
    fields = {name: config.megatron.get(name, default) for name, default in sorted(FUNCTION_IN_MEGATRON.items())}
    return ", ".join(f"{name}={value}" for name, value in fields.items() if value != FUNCTION_IN_MEGATRON[name])


def differences(theirs: Terms, config: RunConfig) -> list[str]:
    """What keeps a run from going on from a checkpoint with these terms, for people; empty when nothing does."""
    ours = terms_of(config)
    theirs = {_MEGATRON: ours[_MEGATRON], **theirs}  # earlier versions did not say
    found = [
        f"{key} = {_told(ours[key])}, and the checkpoint was trained with {_told(theirs.get(key))}; set it to that"
        for key in ours
        if key != _CORPUS and ours[key] != theirs.get(key)
    ]
    if not config.checkpoint.allow_other_corpus and (other := other_corpus(theirs, config)):
        found.append(
            f"data.corpus = {config.data.corpus} ({config.data.identity}), and the checkpoint was trained with another "
            f"corpus ({other}); choose that one, or set checkpoint.allow_other_corpus=true to go on with this one"
        )
    return found


def other_corpus(theirs: Terms, config: RunConfig) -> str:
    """The corpus of a checkpoint with these terms; empty if it is that of the run, or either is not known."""
    identity = str(theirs.get(_CORPUS, ""))
    return "" if is_same_corpus(identity, config.data.identity) else identity


def _told(value: object) -> object:
    return "none of its fields that change the model" if value == "" else value
