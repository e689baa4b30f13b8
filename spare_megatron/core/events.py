"""What is said after a wipe-out, beside `core.entries`."""

from collections.abc import Mapping
from dataclasses import dataclass

from spare_megatron.core.actions import (
    CheckpointCandidate,
    Reading,
)
from spare_megatron.core.entries import Entry
from spare_megatron.core.snapshot_policy import Held, HeldSlice
from spare_megatron.core.votes import Vote
from spare_megatron.stacking.layout import GroupId, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartState:
    """A group that was started again after a wipe-out.

    Attributes:
        member: The group in its new life.
        offers: The checkpoints that it might load.
        held: Snapshots of its rank positions that are whole on its nodes.
        slices: Snapshots of slices that are whole on its nodes, those of all of its ranks.
        failure: Why it cannot look for checkpoints, for people; empty where it can.
        readings: What it has read.
        is_reading: It has yet to read files.
        silent_s: Seconds for which it has said nothing new, on the clock of whoever reads this.
    """

    member: Member
    offers: tuple[CheckpointCandidate, ...]
    held: tuple[Held, ...] = ()
    slices: tuple[HeldSlice, ...] = ()
    failure: str = ""
    readings: tuple[Reading, ...] = ()
    is_reading: bool = False
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRead:
    """Who waits for training to start again. Only the driver of the leader of a group that waits reads them.

    Attributes:
        group: That group.
        waiting: All who have ever said so, each group once.
        waited_s: Seconds for which this group has waited.
    """

    group: GroupId
    waiting: tuple[RestartState, ...]
    waited_s: float


# --------------------------------------------------------------------------------- events: driver to controller


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Every group is up and holds the same parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRead:
    """The entry at the controller's head has been read."""

    index: int
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesRead:
    """The votes cast so far on an attempt. Only the driver of a group's leader reads them.

    Attributes:
        attempt: The attempt.
        votes: The votes, also of groups that took part in the attempt and were lost since.
        waiting: Who is up, holds a copy of the model, and waits to be taken in.
    """

    attempt: int
    votes: Mapping[GroupId, Vote]
    waiting: tuple[Member, ...] = ()


Event = RunStarted | EntryRead | VotesRead | WaitingRead
