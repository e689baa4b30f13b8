"""What the numbers of a configuration come to: ranks, parameters, batch, and the memory of a rank."""

from dataclasses import dataclass

from spare_megatron.config.model_shape import model_shape, padded_vocab_size
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.buckets import MAX_STAGED


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the fullest rank, without what libraries and allocators take for themselves.

    Attributes:
        weights_bytes: Parameters that the layers compute with.
        gradients_bytes: The sums that gradients are added to.
        reduction_bytes: The buckets that are staged at most.
        optimizer_bytes: Adam's two moments, and fp32 parameters where the layers compute with others, of what is held.
        activations_bytes: What the backward pass needs of the forward pass, at the most; an estimate.
    """

    weights_bytes: int
    gradients_bytes: int
    reduction_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.reduction_bytes + self.activations_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Implications:
    """What a configuration comes to.

    Attributes:
        num_ranks: Ranks over all groups.
        ranks_per_group: Ranks of a group.
        num_parameters: Parameters of the model.
        microbatches_per_step: Microbatches of a step, over all groups.
        sequences_per_step: The global batch in sequences.
        tokens_per_step: The global batch in tokens.
        tokens: Tokens of the whole run.
        memory: The fullest rank.
        checkpoint_bytes: A checkpoint: parameters and the optimizer's state, each once.
    """

    num_ranks: int
    ranks_per_group: int
    num_parameters: int
    microbatches_per_step: int
    sequences_per_step: int
    tokens_per_step: int
    tokens: int
    memory: RankMemory
    checkpoint_bytes: int


def implications(config: RunConfig) -> Implications:
    """What this configuration comes to; it has no problems."""
    microbatches = config.layout.num_groups * config.spare.microbatches_per_shard
    sequences = microbatches * config.train.micro_batch_size
    tokens = sequences * config.model.seq_length
    return Implications(
        num_ranks=config.parallel.num_ranks,
        ranks_per_group=config.parallel.ranks_per_group,
        num_parameters=model_shape(config).num_parameters,
        microbatches_per_step=microbatches,
        sequences_per_step=sequences,
        tokens_per_step=tokens,
        tokens=tokens * config.train.steps,
        memory=rank_memory(config),
        checkpoint_bytes=model_shape(config).num_parameters * sum(_bytes_per_parameter(config)),
    )


def rank_memory(config: RunConfig) -> RankMemory:
    """The memory of the fullest rank."""
    layout = config.layout
    parameters = -(-max(model_shape(config).of_stages(layout.pipeline_parallel)) // layout.tensor_parallel)
    weights_bytes, optimizer_bytes = _bytes_per_parameter(config)
    # Megatron's fp32 buffer is always there; reproducible sums are int64, and so are the buckets that are reduced.
    number_bytes = 8 if config.reduce.mode == "reproducible" else 4
    sums = 4 + (number_bytes if config.reduce.mode == "reproducible" else 0)
    optimizer = config.optimizer
    held = optimizer.redundancy / layout.num_groups if optimizer.sharding == "stacked" else 1.0
    return RankMemory(
        weights_bytes=parameters * weights_bytes,
        gradients_bytes=parameters * sums,
        reduction_bytes=min(parameters * number_bytes, round(MAX_STAGED * config.reduce.bucket_mib * 2**20)),
        optimizer_bytes=round(parameters * optimizer_bytes * held),
        activations_bytes=_activations_bytes(config),
    )


def _bytes_per_parameter(config: RunConfig) -> tuple[int, int]:
    """Of a parameter that the layers compute with, and of what the optimizer keeps for it (see `RankMemory`)."""
    return (2, 12) if config.model.precision == "bf16" else (4, 8)


def _activations_bytes(config: RunConfig) -> int:
    """Activations of the fullest stage.

    Korthikanti et al., arXiv 2205.05198, without the scores of attention, which are never stored: a layer keeps
    s b h (10 + 24/t) bytes in 16 bits, 34 s b h / t with sequence parallelism, 2 s b h when it is computed again. Of
    the 24, 16 are those of a feed-forward layer of width 4 h. The first of p stages keeps those of p microbatches,
    which after losses a group has even where its own shard has fewer.
    """
    model, layout, megatron = config.model, config.layout, config.megatron
    tensor = layout.tensor_parallel
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    parted = 8 + 4 * ffn / model.hidden_size * (1.5 if megatron.get("gated_linear_unit") else 1.0)
    whole = 10.0 / (tensor if megatron.get("sequence_parallel") else 1)
    per_token = model.hidden_size * (whole + parted / tensor)
    if megatron.get("recompute_granularity") == "full":
        per_token = 2.0 * model.hidden_size
    if model.precision == "fp32":
        per_token *= 2
    tokens = config.train.micro_batch_size * model.seq_length / layout.context_parallel
    stages = layout.pipeline_parallel
    layers = model.num_layers / stages
    num_shards = layout.num_groups if config.data.access == "shared" else config.spare.redundancy
    in_flight = float(min(stages, num_shards * config.spare.microbatches_per_shard))
    if layout.virtual_pipeline > 1:
        in_flight = stages + (stages - 1) / layout.virtual_pipeline  # it is padded to a multiple of the stages
    logits = tokens * 4 * padded_vocab_size(model.vocab_size, layout.tensor_parallel) / tensor
    first = layers * in_flight * tokens * per_token
    last = layers * tokens * per_token + logits
    return round(max(first + (logits if stages == 1 else 0), last))
