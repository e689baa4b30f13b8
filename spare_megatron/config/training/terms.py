"""The terms of a training: the settings that must match for a run to continue from another run's checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path

from spare_megatron.config.batch_size import sequences_per_microbatch
from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON
from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import described_corpora, is_same_corpus
from spare_megatron.config.training.skipped import skip_differences, skipped_places

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")

EMERGENCY_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})\.state")


def step_of(path: Path) -> int:
    """Committed steps in a checkpoint, by its name; raises ValueError if the name is not that of a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(path.name) or EMERGENCY_CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a checkpoint is, step-NNNNNNNN")
    return int(match[1])


Terms = Mapping[str, int | float | str | bool | None]


_ROTATION: Mapping[str, object] = {"rotary_base": 10000.0, "rope_scaling_factor": 1.0}
"""Arguments of Megatron's GPTModel that change the function, too, with their defaults."""


def terms_of(config: RunConfig) -> Terms:
    """What fixes the model and the order of its data, by key; layout, batch, optimizer and length may change."""
    model, train = config.model, config.train
    return {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.ffn_hidden_size": model.ffn_width,
        "model.seq_length": model.seq_length,
        "model.vocab_size": model.vocab_size,
        "model.position_embedding": model.position_embedding,
        "model.tie_embeddings": model.tie_embeddings,
        "model.precision": model.precision,
        "train.seed": train.seed,
        _MEGATRON: _function_of(config),
        _CORPUS: config.data.identity,
        _ORDER: ORDER,
        _WEIGHTS: config.checkpoint.weights_identity,
        _PROGRAM: config.program.sha256,
        **masks_of(config),
        **({_SKIP: str(skipped_places(config.data.skip))} if config.data.skip else {}),
    }


_UNMASKED: Terms = {
    "data.eod_mask_loss": False,
    "data.reset_attention_mask": False,
    "data.reset_position_ids": False,
    "data.end_of_document": None,
}
"""Terms that are left out where they have these values."""


def masks_of(config: RunConfig) -> Terms:
    """What the ends of documents mean for a training, by key; empty if nothing."""
    if not config.data.document_settings:
        return {}
    masks: Terms = {key: getattr(config.data, key.partition(".")[2]) for key in _UNMASKED}
    return {key: value for key, value in masks.items() if value != _UNMASKED[key]}


def weights_terms_of(config: RunConfig) -> Terms:
    """The terms that weights alone have to match: those of the model, but for its precision and sequence length."""
    others = ("model.seq_length", "model.precision")
    return {
        key: value
        for key, value in terms_of(config).items()
        if key == _MEGATRON or (key.startswith("model.") and key not in others)
    }


ORDER = 2
"""Version of the order of samples: a function of corpus, sequence length, seed and epoch. 1 also depended on the number
of steps."""

_CORPUS, _ORDER = "data.identity", "data.order"

_WEIGHTS = "checkpoint.weights_identity"

_PROGRAM = "program.sha256"

_SKIP = "data.skip"

_ANY = (_WEIGHTS, "")
"""A term that fits every checkpoint."""

_MEGATRON = "[megatron]"


def global_batch(config: RunConfig) -> int:
    """Sequences in a step, after a ramp."""
    return sequences_per_microbatch(config) * config.spare.microbatches_per_shard


def sequences_before(config: RunConfig, step: int) -> int:
    """Sequences in all steps before this one, also those of runs whose checkpoint was loaded."""
    return config.data.offset + sequences_per_microbatch(config) * config.spare.ramp.before(step)


def _function_of(config: RunConfig) -> str:
    model = config.model
    rotation = {"rotary_base": model.rope_base, "rope_scaling_factor": model.rope_scaling_factor}
    defaults = {**FUNCTION_IN_MEGATRON, **_ROTATION}
    fields = {**defaults, **model_fields(config), **rotation}
    return ", ".join(f"{name}={fields[name]}" for name in sorted(defaults) if fields[name] != defaults[name])


def differences(theirs: Terms, config: RunConfig, num_samples: int | None = None) -> list[str]:
    """User-facing reasons why a run cannot continue from a checkpoint with these terms; empty if it can. `num_samples`:
    those that the checkpoint has read; by default as many as the run has read after all its steps.
    """
    ours = {**_UNMASKED, **terms_of(config)}
    # Checkpoints of earlier versions lack some of these terms.
    theirs = {_MEGATRON: ours[_MEGATRON], _WEIGHTS: "", _PROGRAM: "", **_UNMASKED, **theirs}
    apart = (_CORPUS, _ORDER, _PROGRAM, _SKIP)
    found = _unequal(theirs, {key: value for key, value in ours.items() if key not in apart and (key, value) != _ANY})
    if (order := theirs.get(_ORDER, 1)) != ORDER:
        found.append(
            f"it was trained in order {order} of the samples, and this version has order {ORDER}: finish that training "
            f"with the version that began it, or begin a new one"
        )
    num_read = sequences_before(config, config.train.steps) if num_samples is None else num_samples
    found += skip_differences(str(theirs.get(_SKIP, "")), config.data.skip, num_read)
    if not config.checkpoint.allow_other_corpus and (other := other_corpus(theirs, config)):
        named = config.data.named.replace("=", " = ", 1)
        read, trained = described_corpora(config.data.identity, other)
        found.append(
            f"{named} ({read}), and the checkpoint was trained with another corpus ({trained}); choose "
            f"that one, or set checkpoint.allow_other_corpus=true to go on with this one"
        )
    if not config.checkpoint.allow_other_program and theirs[_PROGRAM] != ours[_PROGRAM]:
        found.append(
            f"program.file = {config.program.file or 'none'} ({_named(ours)}), and the checkpoint was trained with "
            f"{_named(theirs)}; choose that one, or set checkpoint.allow_other_program=true to go on with this one"
        )
    return found


def weights_differences(theirs: Terms, config: RunConfig) -> list[str]:
    """User-facing reasons why a run's model cannot have the weights of a checkpoint with these terms."""
    return _unequal(theirs, weights_terms_of(config))


def _unequal(theirs: Terms, ours: Terms) -> list[str]:
    return [
        f"{key} = {_shown(value)}, and the checkpoint was trained with {_shown(theirs.get(key))}; set it to that"
        for key, value in ours.items()
        if value != theirs.get(key)
    ]


def other_corpus(theirs: Terms, config: RunConfig) -> str:
    """Identity of the checkpoint's corpus if it differs from the run's; empty if equal or if either is unknown."""
    identity = str(theirs.get(_CORPUS, ""))
    return "" if is_same_corpus(identity, config.data.identity) else identity


def _named(terms: Terms) -> str:
    return f"SHA-256 {terms[_PROGRAM]}" if terms[_PROGRAM] else "no program"


def _shown(value: object) -> object:
    return "none of its fields that change the model" if value == "" else value
