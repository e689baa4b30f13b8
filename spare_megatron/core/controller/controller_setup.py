"""What the controller of a run is made with: the settings that decide."""

from dataclasses import dataclass

from spare_megatron.core.audits.audits import AuditPolicy
from spare_megatron.core.controller.restart import RestartLimits
from spare_megatron.core.log.evaluation_sums import EvaluationPolicy
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.order import Granularity
from spare_megatron.stacking.paces import Rounds
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.state_partitions import PartitionSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSetup:
    placement: Placement
    microbatches_per_shard: int
    num_steps: int
    granularity: Granularity = "microbatch"
    saves: SavePolicy | None = None
    first_step: int = 0
    """Committed steps of the checkpoint that the run begins with."""
    last_resort: bool = False
    """All groups can read all data, so any may compute any microbatch. Microbatch granularity only."""
    fetch: int = 0
    """With `last_resort`, time until a group has data of shards that it does not host, as in `stacking.reorder`: 0 in
    runs, whose ranks read every microbatch when they compute it."""
    ends_at_s: float | None = None
    """On the driver's clock: the first commit decided at or after this time is the last. None trains all steps."""
    partitions: PartitionSetup | None = None
    """How the optimizer state is partitioned over the groups; None if each holds all of it."""
    restarts: RestartLimits | None = None
    """Limits of restarts after a wipe-out; None leaves restarts to the driver."""
    pause_s: float | None = None
    """Longest wait for the return of hosts while a whole copy of the state lives; None if no group comes back."""
    snapshots: SnapshotPolicy | None = None
    evaluation: EvaluationPolicy | None = None
    audits: AuditPolicy | None = None
    ramp: BatchRamp | None = None
    """Microbatches per shard by step, up to `microbatches_per_shard`; None if constant."""
    rounds: Rounds | None = None
    """What the time of a group's work follows from; None deals the same work to slow groups as to fast ones."""
