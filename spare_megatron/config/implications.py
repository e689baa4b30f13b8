"""Sizes that follow from a configuration: parameters, memory of the fullest rank, batch, FLOPs per token."""

from dataclasses import dataclass

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.bucket_window import MAX_STAGED

_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary of each tensor-parallel rank to a multiple of this."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table.

    >>> padded_vocab_size(257, 2)
    512
    """
    multiple = _VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameter counts of a GPT, summed over tensor-parallel ranks.

    Attributes:
        positions: Learned positions; 0 with rotary ones.
        layer_matrices: The matrices of a layer, by which each token is multiplied.
        final_norm: The norm behind the last layer.
        num_layers: Layers over all stages.
        is_tied: The output layer shares the embedding table.
    """

    embedding: int
    positions: int
    layer: int
    layer_matrices: int
    final_norm: int
    num_layers: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a shared table counts once."""
        tables = self.embedding * (1 if self.is_tied else 2)
        return tables + self.positions + self.num_layers * self.layer + self.final_norm

    def of_stages(self, num_stages: int) -> list[int]:
        """Parameters that each pipeline stage holds; with tied tables the last stage holds a copy."""
        stages = [self.num_layers // num_stages * self.layer] * num_stages
        stages[0] += self.embedding + self.positions
        stages[-1] += self.final_norm + (0 if num_stages == 1 and self.is_tied else self.embedding)
        return stages


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that Megatron builds, including the effect of `[megatron]` fields."""
    model, megatron = config.model, config.megatron
    hidden = model.hidden_size
    has_bias = bool(megatron.get("add_bias_linear", True))
    num_heads = model.num_attention_heads
    head = megatron.get("kv_channels") or hidden // num_heads
    keys = head * (megatron.get("num_query_groups") or num_heads)
    heads = head * num_heads
    ffn = model.ffn_hidden_size or 4 * hidden
    wide = ffn * (2 if megatron.get("gated_linear_unit") else 1)
    per_value = 1 if megatron.get("normalization") == "RMSNorm" else 2
    norm = hidden * per_value
    norms = 2 * norm
    gates = heads if megatron.get("attention_output_gate") else 0
    matrices = hidden * (heads + gates + 2 * keys) + heads * hidden + hidden * wide + ffn * hidden
    biases = 0
    if has_bias or megatron.get("add_qkv_bias"):
        biases += heads + gates + 2 * keys
    if megatron.get("qk_layernorm"):
        norms += 2 * head * per_value
    if has_bias:
        biases += hidden + wide + hidden
    return ModelShape(
        embedding=padded_vocab_size(model.vocab_size, config.layout.tensor_parallel) * hidden,
        positions=model.seq_length * hidden if model.position_embedding == "learned_absolute" else 0,
        layer=matrices + biases + norms,
        layer_matrices=matrices,
        final_norm=norm,
        num_layers=model.num_layers,
        is_tied=model.tie_embeddings,
    )


def flops_per_token(config: RunConfig) -> float:
    """Floating-point operations to train on one token: a forward pass, and twice as many backward.

    Per token, a forward pass takes 2 per element of each matrix, the output layer's included, and 4 s h per layer for
    attention, with s tokens in a sequence and h the width of all heads (Narayanan et al., arXiv 2104.04473, appendix).
    Norms, activations, softmax, recomputation and redundant microbatches do not count.
    """
    shape, model = model_shape(config), config.model
    head = config.megatron.get("kv_channels") or model.hidden_size // model.num_attention_heads
    scores = 4 * model.seq_length * head * model.num_attention_heads
    forward = 2 * (shape.num_layers * shape.layer_matrices + shape.embedding) + shape.num_layers * scores
    return 3.0 * forward


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the fullest rank, without the overhead of libraries and allocators.

    Attributes:
        weights_bytes: Parameters in the precision that layers compute with.
        gradients_bytes: Buffers in which gradients are summed.
        reduction_bytes: Buckets staged at a time, at most.
        optimizer_bytes: Adam's moments and, if layers compute in other precision, fp32 parameters of the hosted state.
        activations_bytes: Peak of what the forward pass keeps for the backward pass; an estimate.
    """

    weights_bytes: int
    gradients_bytes: int
    reduction_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.reduction_bytes + self.activations_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Implications:
    """Derived sizes of a configuration; counts per step cover all groups, `checkpoint_bytes` counts all state once."""

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
    """Derives the sizes of a configuration without problems."""
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
    layout = config.layout
    parameters = -(-max(model_shape(config).of_stages(layout.pipeline_parallel)) // layout.tensor_parallel)
    weights_bytes, optimizer_bytes = _bytes_per_parameter(config)
    # Megatron's fp32 buffer always exists; reproducible mode adds int64 sums, and reduces int64 buckets.
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
    """Bytes of a parameter in compute precision, and of its optimizer state (see `RankMemory`)."""
    return (2, 12) if config.model.precision == "bf16" else (4, 8)


def _activations_bytes(config: RunConfig) -> int:
    """Activation bytes of the fullest stage.

    Korthikanti et al., arXiv 2205.05198, without attention scores, which are never stored: a layer keeps s b h (10 +
    24/t) bytes in 16 bits (s tokens, b sequences, h width, t tensor-parallel ranks), 34 s b h / t with sequence
    parallelism, 2 s b h with full recomputation. Of the 24, 16 belong to a feed-forward layer of width 4 h. The first
    of p stages keeps p microbatches: losses may give a group that many even if a shard has fewer.
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
        in_flight = stages + (stages - 1) / layout.virtual_pipeline  # microbatches padded to a multiple of stages
    logits = tokens * 4 * padded_vocab_size(model.vocab_size, layout.tensor_parallel) / tensor
    first = layers * in_flight * tokens * per_token
    last = layers * tokens * per_token + logits
    return round(max(first + (logits if stages == 1 else 0), last))
