"""When a run audits: `audit.every_steps`, its default, and why a run may have no audits."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.audits.audits import AuditPolicy, default_every_steps


def audit_policy(config: RunConfig) -> AuditPolicy | None:
    """The audits of a run whose device is resolved; None if it has none."""
    every_steps = config.audit.every_steps
    if every_steps is None:
        is_safe = next(obstacles(config), None) is None and not _may_add_differently(config)
        num_rounds = config.spare.microbatches_per_shard // config.layout.data_parallel
        every_steps = default_every_steps(max(num_rounds, 1)) if is_safe else 0
    if not every_steps:
        return None
    return AuditPolicy(every_steps=every_steps, seed=config.train.seed, rounds=config.rounds)


def _may_add_differently(config: RunConfig) -> bool:
    """Whether sums inside groups may depend on how the GPUs of their nodes are connected: a sum of two does not."""
    return config.cluster.device == "gpu" and config.layout.tensor_parallel * config.layout.context_parallel > 2


def audit_problems(config: RunConfig) -> Iterator[str]:
    every_steps = config.audit.every_steps
    if every_steps is not None and every_steps < 0:
        return  # a violation of its own
    for obstacle in obstacles(config) if every_steps else ():
        yield f"audit.every_steps={every_steps}, but {obstacle}; set that, or audit.every_steps=0"


def obstacles(config: RunConfig) -> Iterator[str]:
    """Settings with which no other group computes the same microbatch to the same bits."""
    if config.layout.num_groups == 1:
        yield "layout.num_groups=1 leaves no other group"
    elif config.spare.redundancy == 1 and config.data.access != "shared":
        yield "spare.redundancy=1 gives every shard one host, and an audit needs another one"
    if config.cluster.device == "gpu" and config.reduce.mode != "reproducible":
        yield (
            f"reduce.mode={config.reduce.mode} lets GPUs choose kernels whose results differ from time to time, and "
            f"audits need reproducible"
        )
    if config.megatron.get("gradient_accumulation_fusion"):
        yield "megatron.gradient_accumulation_fusion hides the gradient of a single microbatch"
