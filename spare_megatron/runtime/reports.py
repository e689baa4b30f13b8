"""What ranks tell their supervisor, over one pipe each."""

from dataclasses import dataclass
from enum import IntEnum

from spare_megatron.core.topology import GroupId


class ExitCode(IntEnum):
    """How a rank's process ends by itself."""

    FINISHED = 0
    RAISED = 1
    """An exception that nobody handles: the rank's group is lost."""
    GROUP_BROKEN = 3
    """Another rank of the same group is gone."""
    FENCED = 4
    """The rank found its own group fenced."""
    WIPE_OUT = 5
    HALTED = 6
    STORE_LOST = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady:
    """The group is up and about to train; sent by its leader."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A step is committed and applied; sent by every leader."""

    group: GroupId
    step: int
    loss: float
    grad_norm: float
    num_alive: int
    makespan: int
    step_s: float
    head: int
    """Log entries the group has folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception ended the rank."""

    group: GroupId
    rank: int
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The log told the group to stop before the last step: a wipe-out or a halt. Sent by every leader."""

    group: GroupId
    step: int
    reason: str


Report = RanksReady | StepCommitted | RankRaised | RunStopped
