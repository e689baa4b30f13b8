"""Sizes of a run that follow from its configuration: ranks, parameters, batch, tokens, checkpoint, memory of a rank."""

from collections.abc import Iterator
from dataclasses import dataclass

from spare_megatron.config.model.model_tensors import model_shape, padded_vocab_size
from spare_megatron.config.model_fields import head_widths, is_latent, model_fields, num_future_tokens
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import global_batch, tokens_before
from spare_megatron.core.log.bucket_window import MAX_STAGED
from spare_megatron.stacking.layout import Slabs

MOST_CHANNELS = 16
"""Of NCCL in a communicator between groups. NCCL takes up to 32 inside a node, for all of which it holds buffers."""

_CHANNEL_BYTES = 4 * (2**22 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)
"""Four connections, two of a ring and two of a tree, with buffers of NCCL's three protocols (init.cc). Simple: 4 MiB;
LL128: 120 elements x 640 threads x 8 steps x 8 bytes; LL: 8 lines x 512 threads x 8 steps x 16 bytes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the fullest rank, without the overhead of libraries and allocators.

    Attributes:
        reduction_bytes: Buckets staged at a time, at most.
        optimizer_bytes: Adam's moments and, if layers compute in other precision, fp32 parameters of the hosted state;
            Muon's momentum counts as if it were two moments.
        activations_bytes: Peak of what the forward pass keeps; an estimate.
        communicators_bytes: NCCL's buffers between groups, on GPUs; an estimate. During a rebuild there are two.
    """

    weights_bytes: int
    gradients_bytes: int
    reduction_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    communicators_bytes: int

    @property
    def total_bytes(self) -> int:
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.reduction_bytes + self.activations_bytes + self.communicators_bytes


def rank_memory(config: RunConfig) -> RankMemory:
    """The memory of the fullest rank of a configuration without problems, or of `config.with_stages`."""
    layout = config.layout
    weights_bytes, optimizer_bytes = state_bytes_per_parameter(config)
    # Megatron's fp32 buffer always exists; reproducible mode adds int64 sums, and reduces int64 buckets.
    number_bytes = {"fast": 4, "fast_bf16": 2, "reproducible": 8}[config.reduce.mode]
    sums = 4 + (number_bytes if config.reduce.mode == "reproducible" else 0)
    has_nccl = config.cluster.device == "gpu" and layout.most_groups > 1
    optimizer = config.optimizer
    held = optimizer.redundancy / layout.num_groups if optimizer.sharding == "stacked" else 1.0
    # With experts another stage may hold most optimizer state than most parameters.
    parameters, own, updated = max(
        _parameters_of_stages(config),
        key=lambda stage: stage[0] * (weights_bytes + sums) + stage[2] * optimizer_bytes * held,
    )
    return RankMemory(
        weights_bytes=parameters * weights_bytes,
        gradients_bytes=parameters * sums,
        reduction_bytes=min(own * number_bytes, round(MAX_STAGED * config.bucket_mib * 2**20)),
        optimizer_bytes=round(updated * optimizer_bytes * held),
        activations_bytes=_activations_bytes(config),
        communicators_bytes=2 * MOST_CHANNELS * _CHANNEL_BYTES if has_nccl else 0,
    )


def _parameters_of_stages(config: RunConfig) -> Iterator[tuple[int, int, int]]:
    """Per stage the parameters of a rank, those that it sums over groups, its part among the lanes, and those that it
    updates: the same, or with Muon all.

    The lanes of a row hold different experts.
    """
    layout, shape, stages = config.layout, model_shape(config), config.layout.pipeline_parallel
    for all_of_stage, experts in zip(shape.of_stages(stages), shape.experts_of_stages(stages), strict=True):
        held = -(-(all_of_stage - experts) // layout.tensor_parallel)
        own_experts = -(-experts // (layout.tensor_parallel * config.row_size))
        own = -(-held // layout.data_parallel) + -(-own_experts * config.row_size // layout.data_parallel)
        yield held + own_experts, own, own if config.optimizer.kind == "adam" else held + own_experts


def state_bytes_per_parameter(config: RunConfig) -> tuple[int, int]:
    """Bytes of a parameter in compute precision, and of its optimizer state (see `RankMemory`)."""
    return (2, 12) if config.model.precision == "bf16" else (4, 8)


def _activations_bytes(config: RunConfig) -> int:
    """Activation bytes of the fullest stage.

    Korthikanti et al., arXiv 2205.05198, without attention scores: a layer keeps s b h (10 + 24/t) bytes in 16 bits (s
    tokens, b sequences, h width, t tensor-parallel ranks), 34 s b h / t with sequence parallelism, 2 s b h with full
    recomputation. Of the 24, 16 belong to a feed-forward layer of width 4 h, and 8 to the queries, keys, values and
    outputs of heads of width h; latent vectors are kept before and after their norm. Stage i of p, counted from 0,
    keeps p - i microbatches. A mixture has the widths of all experts of a token, for each of which it copies 2 s b h
    values in 16 bits, and is taken to route equally many tokens to each rank. Keys and values of whole sequences come
    on top.
    """
    model, layout, megatron = config.model, config.layout, model_fields(config)
    tensor = layout.tensor_parallel
    ffn, copies = model.ffn_width, 0
    if model.num_experts is not None:
        each, copies = model.expert_width, model.experts_per_token
        ffn = copies * each + (model.shared_expert_ffn_hidden_size or 0)
    heads: float = 4 * model.num_attention_heads * sum(head_widths(config)) / model.hidden_size
    parted = heads + 4 * copies + 4 * ffn / model.hidden_size * (1.5 if megatron["gated_linear_unit"] else 1.0)
    whole = 10.0 / (tensor if megatron.get("sequence_parallel") else 1)
    latent: int = megatron["q_lora_rank"] + megatron["kv_lora_rank"] if is_latent(config) else 0
    per_token = model.hidden_size * (whole + parted / tensor) + 4.0 * latent
    if megatron.get("recompute_granularity") == "full":
        per_token = 2.0 * model.hidden_size
    if model.precision == "fp32":
        per_token *= 2
    tokens = config.train.micro_batch_size * model.seq_length / layout.context_parallel
    stages = layout.pipeline_parallel
    layers = [len(own) for own in Slabs(model.num_layers, (stages,)).layers]
    layers[-1] += num_future_tokens(config)
    num_shards = layout.num_groups if config.data.access == "shared" else config.spare.redundancy
    most_of_lane = -(-num_shards * config.spare.microbatches_per_shard // layout.data_parallel)
    kept = [each * float(min(stages - stage, most_of_lane)) for stage, each in enumerate(layers)]
    if layout.virtual_pipeline > 1:  # microbatches padded to a multiple of stages
        kept[0] = layers[0] * (stages + (stages - 1) / layout.virtual_pipeline)
    columns = padded_vocab_size(model.vocab_size, tensor) / tensor
    logits = (1 + num_future_tokens(config)) * tokens * 4 * columns
    gathered = _gathered_bytes(config) / tokens
    if megatron.get("recompute_granularity") == "full":
        gathered /= max(kept)  # of one layer
    of_stages = [number * tokens * (per_token + gathered) for number in kept]
    of_stages[-1] += logits
    return round(max(of_stages))


def _gathered_bytes(config: RunConfig) -> int:
    """Keys and values of whole sequences that a layer keeps where ranks that split them gather these, by `attention`
    of `mcore/model`.
    """
    is_exchanged = config.may_use_transformer_engine and not config.data.reset_attention_mask
    if config.layout.context_parallel == 1 or is_exchanged:
        return 0
    heads = model_fields(config)["num_query_groups"] or config.model.num_attention_heads
    values = -(-heads // config.layout.tensor_parallel) * sum(head_widths(config))
    number_bytes = 2 if config.model.precision == "bf16" else 4
    return int(config.train.micro_batch_size * config.model.seq_length * values * number_bytes)


def memory_by_length(config: RunConfig) -> dict[int, RankMemory]:
    """The same for each number of stages that a group may have, most first."""
    return {stages: rank_memory(config.with_stages(stages)) for stages in config.parallel.lengths}


def ranks_per_machine(config: RunConfig, stages: int | None = None) -> int:
    """Ranks on one machine: all of them if nodes are rehearsed on it, in groups of `stages` if that is given."""
    layout = config.parallel
    if config.cluster.launcher != "local":
        return layout.ranks_per_node
    return layout.num_groups * layout.ranks_per_stage * (stages or layout.pipeline_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """Derived sizes of a run; `checkpoint_bytes` counts all state once, active parameters are those of a token.
    `nvlink_traffic`: bytes that a tensor-parallel sum sends over a link, as a multiple of those with NVLink SHARP,
    which is off where groups share a node (docs/gpu.md).

    Counts per step cover all groups, and are those after the ramp of the batch.
    """

    num_ranks: int
    ranks_per_group: int
    lanes_per_group: int
    num_parameters: int
    num_active_parameters: int
    microbatches_per_step: int
    sequences_per_step: int
    tokens_per_step: int
    tokens: int
    bucket_mib: float
    memory: RankMemory
    memory_by_stages: dict[int, int]
    """Bytes of the fullest rank by the stages of its group."""
    checkpoint_bytes: int
    nvlink_traffic: float

    @property
    def most_memory_bytes(self) -> int:
        """Of the fullest rank in a group of any length."""
        return max(self.memory_by_stages.values())


def run_sizes(config: RunConfig) -> RunSizes:
    sequences = global_batch(config)
    tokens = sequences * config.model.seq_length
    shape, memory = model_shape(config), memory_by_length(config)
    return RunSizes(
        num_ranks=config.parallel.num_ranks,
        ranks_per_group=config.parallel.ranks_per_group,
        lanes_per_group=config.layout.data_parallel,
        num_parameters=shape.num_parameters,
        num_active_parameters=shape.num_active_parameters,
        microbatches_per_step=config.layout.num_groups * config.spare.microbatches_per_shard,
        sequences_per_step=sequences,
        tokens_per_step=tokens,
        tokens=tokens_before(config, config.train.steps),
        bucket_mib=config.bucket_mib,
        memory=memory[config.layout.pipeline_parallel],
        memory_by_stages={stages: one.total_bytes for stages, one in memory.items()},
        checkpoint_bytes=shape.num_parameters * sum(state_bytes_per_parameter(config)),
        nvlink_traffic=_nvlink_traffic(config),
    )


def _nvlink_traffic(config: RunConfig) -> float:
    """A ring of n sends 2(n - 1)/n of the bytes of a sum over each link, NVLink SHARP (n + 1)/n."""
    size = config.layout.tensor_parallel
    is_off = config.cluster.device == "gpu" and config.parallel.most_peers_on_node > 1
    return 2 * (size - 1) / (size + 1) if is_off and size > 2 else 1.0
