"""The settings of checkpoints and of snapshots."""

from dataclasses import dataclass
from typing import Literal

from spare_megatron.config.limits import ChangeableTerm, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are taken, which one the run starts from, and restarts after a wipe-out."""

    cadence: Literal["fixed", "optimal"] = "fixed"
    """When to save: at a fixed interval, or at the optimal one for the measured save, restart and loss times."""
    group_life_s: PositiveFloat = 1e6
    """Mean seconds until a given group is lost, assumed before the first loss; for cadence = optimal."""
    interval_steps: PositiveInt | None = None
    """Steps between checkpoints; without this and `interval_s` none is taken until the run is asked to end."""
    interval_s: PositiveFloat | None = None
    """Seconds between checkpoints."""
    asynchronous: bool = True
    """Continues training while a checkpoint is written; otherwise all groups wait until it is on disk."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep, beside the newest audited one and those that later steps have yet to confirm."""
    keep_every_steps: PositiveInt | None = None
    """Keeps one checkpoint per this many steps permanently."""
    folder: str = ""
    """Folder of the checkpoints, on storage that all nodes share; `checkpoints` in the run directory if empty."""
    load: str = ""
    """Checkpoint to start from: a checkpoint, or a folder of checkpoints or a run, of which the newest valid one is
    loaded."""
    load_weights: str = ""
    """Weights to start from with a new optimizer and schedule: an import, or as in `load`, which goes before it."""
    weights_identity: str = ""
    """Required identity of `load_weights`, as in a run's `config.toml`; empty accepts any."""
    allow_changes: tuple[ChangeableTerm, ...] = ()
    """Terms in which a run may differ from the checkpoint that it continues, as corpus, program, model.seq_length or
    model.precision; its record names both values."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time to write a checkpoint, after which it is abandoned and training continues, and to read one."""
    max_restarts: NonNegativeInt = 3
    """Restarts after a wipe-out within an hour of training; the next wipe-out ends the run. 0: the first one does."""
    restart_wait_s: PositiveFloat = 60.0
    """Longest wait for missing groups: in a pause, then the run ends; at a restart also for stalled ones, then the
    others start if they can."""

    @property
    def is_wanted(self) -> bool:
        return self.cadence == "optimal" or self.interval_steps is not None or self.interval_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """Copies of the training state in the nodes' memory, for restarts after a wipe-out."""

    every_steps: int = 0
    """Steps between snapshots of the state in host memory, at least 2; 0 takes none."""
    redundancy: NonNegativeInt = 1
    """Nodes whose loss leaves a snapshot whole; each rank's state is copied to one node more."""
