"""Whether the memory of a machine without GPUs is enough for the ranks that are to share it."""

from collections.abc import Iterator

from spare_megatron.config.diagnosis import ranks_per_machine
from spare_megatron.config.implications import rank_memory
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.sizes import gib


def memory_problems(config: RunConfig, machine_bytes: int | None) -> Iterator[str]:
    """Why the kernel would kill ranks on CPUs. Only for a configuration without other problems.

    What is certain is counted, and no activations, which are an estimate.

    Args:
        config: The configuration.
        machine_bytes: Memory of one machine of the run; None where it is not known.
    """
    memory, num_ranks = rank_memory(config), ranks_per_machine(config)
    needed = num_ranks * (memory.total_bytes - memory.activations_bytes)
    if machine_bytes is not None and needed > machine_bytes:
        yield (
            f"{num_ranks} ranks on one machine (layout.num_groups={config.layout.num_groups}) need {gib(needed)} for "
            f"parameters, gradients, buckets and optimizer state, and it has {gib(machine_bytes)} of memory; lower "
            f"layout.num_groups, choose a smaller model, or set optimizer.sharding=stacked"
        )
