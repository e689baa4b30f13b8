"""Sizes of a run that follow from its configuration: ranks, parameters, batch, tokens, memory, checkpoint."""

from dataclasses import dataclass

from spare_megatron.config.model.model_shape import model_shape
from spare_megatron.config.model.rank_memory import RankMemory, memory_by_length, state_bytes_per_parameter
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import global_batch, tokens_before


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
