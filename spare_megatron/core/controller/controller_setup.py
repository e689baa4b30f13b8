"""What the controller of a run is made with: the settings that decide."""

from dataclasses import dataclass

from spare_megatron.core.audits.audits import AuditPolicy
from spare_megatron.core.controller.restart import RestartLimits
from spare_megatron.core.log.membership import LogTerms
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.order import Granularity
from spare_megatron.stacking.paces import Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSetup(LogTerms):
    microbatches_per_shard: int
    granularity: Granularity = "microbatch"
    saves: SavePolicy | None = None
    fetch: int = 0
    """With `last_resort`, time until a group has data of shards that it does not host, as in `stacking.reorder`: 0 in
    runs, whose ranks read every microbatch when they compute it."""
    ends_at_s: float | None = None
    """On the driver's clock: the first commit decided at or after this time is the last. None trains all steps."""
    restarts: RestartLimits | None = None
    """Limits of restarts after a wipe-out; None leaves restarts to the driver."""
    pause_s: float | None = None
    """Longest wait for the return of hosts while a whole copy of the state lives; None if no group comes back."""
    snapshots: SnapshotPolicy | None = None
    audits: AuditPolicy | None = None
    ramp: BatchRamp | None = None
    """Microbatches per shard by step, up to `microbatches_per_shard`; None if constant."""
    rounds: Rounds | None = None
    """What the time of a group's work follows from; None deals the same work to slow groups as to fast ones."""
