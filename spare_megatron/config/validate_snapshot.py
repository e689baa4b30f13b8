"""What is wrong with the settings of snapshots, and what is merely doubtful."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig


def snapshot_problems(config: RunConfig) -> Iterator[str]:
    """Every reason why no snapshots can be taken, or none would be of use."""
    snapshot = config.snapshot
    if snapshot.redundancy < 0:
        yield f"snapshot.redundancy={snapshot.redundancy} must be at least 0; raise it"
    if snapshot.every_steps < 0 or snapshot.every_steps == 1:
        yield (
            f"snapshot.every_steps={snapshot.every_steps} must be at least 2, for one has to be whole when the next "
            f"begins, or 0 to take none; change it"
        )
    if not snapshot.every_steps:
        return
    if not config.checkpoint.max_restarts:
        yield (
            f"snapshot.every_steps={snapshot.every_steps} has no effect with checkpoint.max_restarts=0, which starts "
            f"no run again; raise the second, or set the first to 0"
        )


def snapshot_warnings(config: RunConfig) -> Iterator[str]:
    """Where fewer nodes may be lost than was asked for."""
    num_copies, num_nodes = config.snapshot.redundancy + 1, config.cluster.num_nodes
    if not config.snapshot.every_steps:
        return
    wanted = f"snapshot.redundancy={config.snapshot.redundancy} wants {num_copies} copies on different nodes, and"
    if num_copies > num_nodes:
        yield f"{wanted} cluster.num_nodes={num_nodes}: each rank's state is kept on {num_nodes}"
    optimizer = config.optimizer
    if optimizer.sharding == "stacked" and num_copies > optimizer.redundancy:
        yield (
            f"{wanted} with optimizer.redundancy={optimizer.redundancy} so many groups have a slice of the "
            f"optimizer's state: each slice is kept on {optimizer.redundancy}"
        )
