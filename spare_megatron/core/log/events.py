"""Events: what a driver reports to the controller."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spare_megatron.core.log.actions import CheckpointCandidate, Reading
from spare_megatron.core.log.entries import Entry
from spare_megatron.core.log.votes import Held, Vote
from spare_megatron.stacking.layout import GroupId, Member, PartitionId


class HeldPartition(NamedTuple):
    """Complete copies of a state partition, of one rank or of all ranks of a group."""

    attempt: int
    partition: PartitionId
    sha256: str
    """That of the copy or, for several, over theirs in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartState:
    """A group's state, in its new incarnation, after a wipe-out."""

    member: Member
    candidates: tuple[CheckpointCandidate, ...]
    held: tuple[Held, ...] = ()
    partitions: tuple[HeldPartition, ...] = ()
    """State partitions of which its nodes have complete snapshots of all its ranks."""
    failure: str = ""
    """Why it cannot look for checkpoints; empty if it can."""
    readings: tuple[Reading, ...] = ()
    """What it has verified so far; `is_reading` if files remain."""
    is_reading: bool = False
    silent_s: float = 0.0
    """Seconds since it last reported anything new, on the reader's clock."""
    stages: int | None = None
    """None: the whole pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRead:
    """Groups that have ever waited for a restart, and seconds that `group` has; only waiting leaders report it."""

    group: GroupId
    waiting: tuple[RestartState, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Every group is up and holds the same parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRead:
    index: int
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesRead:
    """The votes cast so far on an attempt, reported by leaders only; includes groups lost since."""

    attempt: int
    votes: Mapping[GroupId, Vote]
    waiting: tuple[Member, ...] = ()
    """Members that hold a copy of the model and wait for admission."""
    stages: Mapping[GroupId, int] = field(default_factory=dict)
    """Of those that have fewer than the whole pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRead:
    """The members that wait for admission in a pause; empty except on leaders."""

    waiting: tuple[Member, ...] = ()
    waited_s: float = 0.0
    """Seconds since the last loss, or since the last group came to wait."""
    stages: Mapping[GroupId, int] = field(default_factory=dict)
    """As in `VotesRead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequested:
    """The run is to end: a pause is not waited out. Steps end by votes. Further reports change nothing."""


Event = RunStarted | EntryRead | VotesRead | WaitingRead | HostsRead | EndRequested
