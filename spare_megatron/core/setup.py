"""What a run's controller is told once and for all."""

from dataclasses import dataclass

from spare_megatron.core.order import Granularity
from spare_megatron.core.placement import Placement
from spare_megatron.core.restart import RestartLimits
from spare_megatron.core.saves import SavePolicy
from spare_megatron.core.slices import Slicing
from spare_megatron.core.snapshots import SnapshotPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSetup:
    """What is fixed for a run."""

    placement: Placement
    microbatches_per_shard: int
    num_steps: int
    granularity: Granularity = "microbatch"
    saves: SavePolicy | None = None
    first_step: int = 0
    """Committed steps of the checkpoint that the run begins with."""
    last_resort: bool = False
    """Every group can read all data: shards without a surviving host go to any survivors; microbatches only."""
    ends_at_s: float | None = None
    """On the driver's clock: the first commit written from then on is the last. None: all steps are trained."""
    slices: Slicing | None = None
    """How the optimizer state is spread over the groups; None: each has all of it."""
    restarts: RestartLimits | None = None
    """When training starts again after a wipe-out; None leaves that to the driver."""
    snapshots: SnapshotPolicy | None = None
