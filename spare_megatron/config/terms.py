"""The terms of a training: what two runs must have in common for one to go on from the other's checkpoint."""

from collections.abc import Mapping

from spare_megatron.config.schema import RunConfig

Terms = Mapping[str, int | float | str | bool | None]


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
    }


_BATCH = "layout.num_groups x spare.microbatches_per_shard x train.micro_batch_size"


def global_batch(config: RunConfig) -> int:
    """Sequences in a step."""
    return config.layout.num_groups * config.spare.microbatches_per_shard * config.train.micro_batch_size


def differences(theirs: Terms, config: RunConfig) -> list[str]:
    """What keeps a run from going on from a checkpoint with these terms, for people; empty when nothing does."""
    ours = terms_of(config)
    return [
        f"{key} = {ours[key]}, and the checkpoint was trained with {theirs.get(key)}; set it to that"
        for key in ours
        if ours[key] != theirs.get(key)
    ]
