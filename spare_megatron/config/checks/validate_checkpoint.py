"""Problems and warnings about checkpoints, restarts and snapshots."""

from collections.abc import Iterator

from spare_megatron.config.schema import CheckpointConfig, FaultConfig, RunConfig
from spare_megatron.faults.kinds import KINDS
from spare_megatron.faults.points import (
    PHASES_AFTER_A_WIPE_OUT,
    PHASES_OF_A_LOAD,
    PHASES_OF_A_SAVE,
    FaultPoint,
)

_OF_THE_FIRST_RANK = (FaultPoint.SAVE_MANIFEST, FaultPoint.SAVE_RENAME, FaultPoint.SAVE_DROP)


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Every reason why checkpoints or restarts cannot work, or a fault cannot strike a save or a load."""
    yield from _settings(config.checkpoint)
    yield from _restarts(config)
    for index, fault in enumerate(config.faults.trace):
        if fault.phase in PHASES_OF_A_SAVE:
            yield from _fault(config, f"faults.trace[{index}]", fault)
        if fault.phase in PHASES_OF_A_LOAD:
            yield from _unreachable_load(config, index, fault)


def _settings(checkpoint: CheckpointConfig) -> Iterator[str]:
    for key in ("interval_s", "interval_steps"):
        if checkpoint.cadence == "optimal" and getattr(checkpoint, key) is not None:
            yield f"checkpoint.{key}={getattr(checkpoint, key)} is not used with checkpoint.cadence=optimal; remove one"
    if checkpoint.keep_every_steps is not None and not checkpoint.is_wanted:
        yield (
            f"checkpoint.keep_every_steps={checkpoint.keep_every_steps} has no effect without checkpoints; "
            f"set checkpoint.interval_steps or checkpoint.interval_s"
        )


def _restarts(config: RunConfig) -> Iterator[str]:
    settings = config.checkpoint
    if settings.max_restarts and settings.restart_wait_s > config.control.decision_timeout_s:
        yield (
            f"checkpoint.restart_wait_s={settings.restart_wait_s} exceeds control.decision_timeout_s="
            f"{config.control.decision_timeout_s}, for which ranks wait for a log entry; lower the first or raise "
            f"the second"
        )


def _fault(config: RunConfig, where: str, fault: FaultConfig) -> Iterator[str]:
    if not config.checkpoint.is_wanted:
        yield (
            f"{where}.phase={fault.phase} is reached only when a checkpoint is taken; set checkpoint.interval_steps or "
            f"checkpoint.interval_s"
        )
    if not KINDS[fault.kind].in_background:
        choices = ", ".join(kind for kind, row in KINDS.items() if row.in_background)
        yield f"{where}.kind={fault.kind} cannot strike a save; choose one of {choices}"
    if fault.phase in _OF_THE_FIRST_RANK and fault.rank != 0:
        yield f"{where}.phase={fault.phase} is reached by rank 0 alone; set {where}.rank to 0"
    if fault.group is None:
        yield f"{where}.phase={fault.phase} strikes the group that saves, which changes; set {where}.group"


def _unreachable_load(config: RunConfig, index: int, fault: FaultConfig) -> Iterator[str]:
    where = f"faults.trace[{index}].phase={fault.phase}"
    may_restart = index > 0 and config.checkpoint.max_restarts > 0
    if may_restart or (config.checkpoint.load and fault.phase not in PHASES_AFTER_A_WIPE_OUT):
        return
    at_the_start = "" if fault.phase in PHASES_AFTER_A_WIPE_OUT else ", or set checkpoint.load"
    yield (
        f"{where} is reached only when a checkpoint is loaded: add faults before it that cause a wipe-out, and raise "
        f"checkpoint.max_restarts={config.checkpoint.max_restarts} to at least 1{at_the_start}"
    )


def snapshot_problems(config: RunConfig) -> Iterator[str]:
    snapshot = config.snapshot
    if snapshot.every_steps < 0 or snapshot.every_steps == 1:
        yield (
            f"snapshot.every_steps={snapshot.every_steps} must be at least 2, so that each is complete before the "
            f"next begins, or 0 to take none; change it"
        )
    if not snapshot.every_steps:
        return
    if not config.checkpoint.max_restarts:
        yield (
            f"snapshot.every_steps={snapshot.every_steps} has no effect with checkpoint.max_restarts=0, which "
            f"allows no restart; raise the second, or set the first to 0"
        )


def snapshot_warnings(config: RunConfig) -> Iterator[str]:
    """Warns if fewer nodes may be lost than `snapshot.redundancy` says."""
    num_copies, num_nodes = config.snapshot.redundancy + 1, config.cluster.num_nodes
    if not config.snapshot.every_steps:
        return
    wanted = f"snapshot.redundancy={config.snapshot.redundancy} needs {num_copies} copies on different nodes, but"
    if num_copies > num_nodes:
        yield f"{wanted} cluster.num_nodes={num_nodes}: each rank's state is kept on only {num_nodes}"
    optimizer = config.optimizer
    if optimizer.sharding == "stacked" and num_copies > optimizer.redundancy:
        yield (
            f"{wanted} with optimizer.redundancy={optimizer.redundancy} only so many groups hold a "
            f"partition of the optimizer state: each is kept on only {optimizer.redundancy}"
        )
