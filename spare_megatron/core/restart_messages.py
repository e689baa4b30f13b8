"""What is said after a wipe-out, beside `core.messages`."""

from dataclasses import dataclass

from spare_megatron.core.slices import Hosts
from spare_megatron.core.snapshots import Held, HeldSlice
from spare_megatron.core.topology import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """After a wipe-out: training does not start again."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A group that was started again after a wipe-out.

    Attributes:
        member: The group in its new life.
        steps: Committed steps of the checkpoints that it finds valid.
        held: Snapshots of its rank positions that are whole on its nodes.
        slices: Snapshots of slices that are whole on its nodes, those of all of its ranks.
        failure: Why it cannot look for any, for people; empty where it can.
    """

    member: Member
    steps: tuple[int, ...]
    held: tuple[Held, ...] = ()
    slices: tuple[HeldSlice, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRead:
    """Who waits for training to start again. Only the driver of the leader of a group that waits reads them.

    Attributes:
        waiting: All who have ever said so, each group once.
        waited_s: Seconds for which this group has waited.
    """

    waiting: tuple[Waiting, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpoint:
    """Take over the checkpoint after this many committed steps; 0: the parameters with which the run began.

    Attributes:
        step: The steps.
        rework_steps: Steps that were committed after it and are computed again.
        hosts: For each slice of the optimizer's state, who takes it over; none where everybody takes all state.
        snapshot: Instead of a checkpoint the snapshot of this attempt, from the memory of nodes.
    """

    step: int
    rework_steps: int
    hosts: Hosts = ()
    snapshot: int | None = None
