"""The terms of a training: the settings that must match for a run to continue from another run's checkpoint."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from spare_megatron.config.batch_size import sequences_per_microbatch
from spare_megatron.config.limits import ChangeableTerm
from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON
from spare_megatron.config.model_fields import SETTING_OF, is_latent, model_fields, uses_yarn
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import described_corpora, is_same_corpus
from spare_megatron.config.training.read_samples import (
    OTHER,
    SkippedPlaces,
    skip_differences,
    skipped_places,
    tokens_read,
)

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")

EMERGENCY_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})\.state")


def step_of(path: Path) -> int:
    """Committed steps in a checkpoint, by its name; raises ValueError if the name is not that of a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(path.name) or EMERGENCY_CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a checkpoint is, step-NNNNNNNN")
    return int(match[1])


Terms = Mapping[str, int | float | str | bool | None]


_ROTATION: Mapping[str, object] = {
    "rotary_base": 10000.0,
    "rope_scaling_factor": 1.0,
    "position_embedding_type": "rope",
}
"""Arguments of Megatron's GPTModel that change the function, too, with their defaults."""


def terms_of(config: RunConfig) -> Terms:
    """What fixes the model and the order of its data, by key; layout, batch, rates and length may change."""
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
        **({_PHASES: ",".join(config.data.phases)} if config.data.phases else {}),
        **(
            {"sites.num_sites": config.sites.num_sites, "sites.site": config.sites.site} if config.sites.is_used else {}
        ),
        **({_KIND: config.optimizer.kind} if config.optimizer.kind != _ADAM[_KIND] else {}),
    }


_ONE_SITE: Terms = {"sites.num_sites": 1, "sites.site": 0}
"""Terms of a training without sites, which leaves them out."""

_KIND = "optimizer.kind"

_ADAM: Terms = {_KIND: "adam"}
"""A term that is left out where it has this value."""

_UNMASKED: Terms = {
    "data.eod_mask_loss": False,
    "data.reset_attention_mask": False,
    "data.reset_position_ids": False,
    "data.fim_rate": 0.0,
    "data.fim_spm_rate": 0.5,
    "data.fim_tokens": "",
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

_SKIP, _PHASES = "data.skip", "data.phases"

_ANY = (_WEIGHTS, "")
"""A term that fits every checkpoint."""

_MEGATRON = "[megatron]"


def global_batch(config: RunConfig) -> int:
    """Sequences in a step, after a ramp."""
    return sequences_per_microbatch(config) * config.spare.microbatches_per_shard


def sequences_before(config: RunConfig, step: int) -> int:
    """Sequences in all steps before this one, also those of runs whose checkpoint was loaded."""
    return config.data.offset + sequences_per_microbatch(config) * config.spare.ramp.before(step)


def microbatches_before(config: RunConfig, step: int) -> int:
    """Units of work of all groups in all steps before this one, as a step counts them."""
    return config.layout.num_groups * config.unit_ramp.before(step)


def numbers_of(config: RunConfig, step: int, unit: tuple[int, int]) -> range:
    """Linear numbers in the batch of the microbatches in a unit of work (shard, index)."""
    first = (unit[0] * config.unit_ramp.at(step) + unit[1]) * config.row_size
    return range(first, first + config.row_size)


def tokens_before(config: RunConfig, step: int) -> int:
    """Tokens in these sequences."""
    return tokens_read(config.data.phases, config.model.seq_length, sequences_before(config, step))


def _function_of(config: RunConfig) -> str:
    model = config.model
    rotation = {"rotary_base": model.rope_base, "rope_scaling_factor": model.rope_scaling_factor}
    defaults = {**FUNCTION_IN_MEGATRON, **_ROTATION}
    fields = {**defaults, **model_fields(config), **rotation}
    if not is_latent(config):  # its default is that of latent attention
        fields |= {
            "rope_type": defaults["rope_type"],
            "position_embedding_type": "yarn" if uses_yarn(config) else "rope",
        }
    return ", ".join(f"{name}={fields[name]}" for name in sorted(defaults) if fields[name] != defaults[name])


_FIELD = re.compile(r"(\w+)=(.*?)(?=, \w+=|$)")
_NAMES: Mapping[str, str] = {
    _PROGRAM: "program",
    **{field: f"model.{setting}" for field, setting in SETTING_OF.items() if field != "gated_linear_unit"},
    "rotary_base": "model.rope_base",
    "rope_scaling_factor": "model.rope_scaling_factor",
    "position_embedding_type": "megatron.rope_type",
    "moe_router_topk": "model.experts_per_token",
}
"""Names of terms for users, if they have others; `model.activation` also decides whether there is a gate."""


def changes_of(theirs: Terms, config: RunConfig) -> dict[str, tuple[object, object]]:
    """What differs from a checkpoint with these terms, as `checkpoint.allow_changes` names it where it can: the
    checkpoint's value, and the run's.
    """
    ours = {**_UNMASKED, **_ONE_SITE, **_ADAM, **terms_of(config)}
    # Checkpoints of earlier versions lack some of these terms.
    theirs = {_MEGATRON: ours[_MEGATRON], _WEIGHTS: "", _PROGRAM: "", **_UNMASKED, **_ONE_SITE, **_ADAM, **theirs}
    apart = (_CORPUS, _ORDER, _SKIP, _PHASES, _MEGATRON)
    keys = [key for key, value in ours.items() if key not in apart and (key, value) != _ANY]
    found = dict(_function_changes(str(theirs[_MEGATRON]), str(ours[_MEGATRON])))
    found |= {_NAMES.get(key, key): (theirs.get(key), ours[key]) for key in keys if theirs.get(key) != ours[key]}
    if other := other_corpus(theirs, config):
        found["corpus"] = (other, config.data.identity)
    return found


def _function_changes(theirs: str, ours: str) -> Iterator[tuple[str, tuple[object, object]]]:
    defaults = {field: str(value) for field, value in {**FUNCTION_IN_MEGATRON, **_ROTATION}.items()}
    before, now = ({**defaults, **dict(_FIELD.findall(text))} for text in (theirs, ours))
    for field in sorted(before.keys() | now.keys()):
        if before.get(field) != now.get(field):
            yield _NAMES.get(field, f"megatron.{field}"), (before.get(field), now.get(field))


def phases_after(theirs: Terms, config: RunConfig, num_samples: int) -> tuple[str, ...]:
    """`data.phases` of a run that goes on from a checkpoint with these terms, which has read `num_samples`."""
    ended = tuple(text for text in str(theirs.get(_PHASES, "")).split(",") if text)
    changed = changes_of(theirs, config).keys()
    is_of_other = not changed.isdisjoint({"corpus", "train.seed"})
    if not num_samples or not (is_of_other or "model.seq_length" in changed):
        return ended
    return (*ended, f"{theirs['model.seq_length']}:{num_samples}{OTHER * is_of_other}")


def differences(theirs: Terms, config: RunConfig, num_samples: int | None = None) -> list[str]:
    """User-facing reasons why a run cannot continue from a checkpoint with these terms; empty if it can. `num_samples`:
    those that the checkpoint has read; by default as many as the run has read after all its steps.
    """
    found = []
    for name, values in changes_of(theirs, config).items():
        is_of_state = name == "model.seq_length" and config.model.position_embedding == "learned_absolute"
        if is_of_state or name not in config.checkpoint.allow_changes:
            found.append(_refusal(name, *values, config, can_be_allowed=not is_of_state and name in _CHANGEABLE))
    if (order := theirs.get(_ORDER, 1)) != ORDER:
        found.append(
            f"it was trained in order {order} of the samples, and this version has order {ORDER}: finish that training "
            f"with the version that began it, or begin a new one"
        )
    num_read = sequences_before(config, config.train.steps) if num_samples is None else num_samples
    skipped = str(theirs.get(_SKIP, ""))
    found += skip_differences(skipped, config.data.skip, config.sites.read_of_order(num_read))
    phases = ",".join(phases_after(theirs, config, num_read))
    if phases != theirs.get(_PHASES, ""):
        found += _stale_places(skipped, config, num_read)
    if phases and config.sites.is_used:
        found.append(
            f"sites read one order of samples, and this training would have several, data.phases={phases}: keep its "
            f"corpus, seed and sequence length, begin a new training, or remove sites.endpoints"
        )
    return found


_CHANGEABLE = get_args(ChangeableTerm)


def _refusal(name: str, theirs: object, ours: object, config: RunConfig, *, can_be_allowed: bool) -> str:
    if name == "corpus":
        read, trained = described_corpora(str(ours), str(theirs))
        named = config.data.named.replace("=", " = ", 1)
        what = f"{named} ({read}), and the checkpoint was trained with another corpus ({trained}); choose that one"
    elif name == "program":
        named = f"program.file = {config.program.file or 'none'} ({_named(ours)})"
        what = f"{named}, and the checkpoint was trained with {_named(theirs)}; choose that one"
    else:
        what = f"{name} = {_shown(ours)}, and the checkpoint was trained with {_shown(theirs)}; set it to that"
    if name == "model.seq_length" and not can_be_allowed:
        what += f", as model.position_embedding={config.model.position_embedding} has parameters for each position"
    return f"{what}, or {how_to_allow(name, config)} to go on with this one" if can_be_allowed else what


def how_to_allow(name: str, config: RunConfig) -> str:
    return f"set checkpoint.allow_changes={json.dumps([*config.checkpoint.allow_changes, name])}"


def _stale_places(theirs: str, config: RunConfig, num_read: int) -> list[str]:
    """Why places that were to be left out of an order that ends now cannot be left out of the next one."""
    trained = SkippedPlaces([text for text in theirs.split(",") if text])
    ahead = [one for one in trained.intervals if one not in trained.before(num_read)]
    stale = [f"{first}-{last}" for first, last in ahead if (first, last) in skipped_places(config.data.skip).intervals]
    return [f"data.skip: {text} are places in the order of the checkpoint, which ends; remove them" for text in stale]


def weights_differences(theirs: Terms, config: RunConfig) -> list[str]:
    """User-facing reasons why a run's model cannot have the weights of a checkpoint with these terms."""
    return [
        f"{key} = {_shown(value)}, and the checkpoint was trained with {_shown(theirs.get(key))}; set it to that"
        for key, value in weights_terms_of(config).items()
        if value != theirs.get(key)
    ]


def other_corpus(theirs: Terms, config: RunConfig) -> str:
    """Identity of the checkpoint's corpus if it differs from the run's; empty if equal or if either is unknown."""
    identity = str(theirs.get(_CORPUS, ""))
    return "" if is_same_corpus(identity, config.data.identity) else identity


def _named(program: object) -> str:
    return f"SHA-256 {program}" if program else "no program"


def _shown(value: object) -> object:
    return "none of its fields that change the model" if value == "" else value
