"""What is said after a wipe-out, beside `core.messages`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.core.slices import Hosts
from spare_megatron.core.snapshots import Held, HeldSlice
from spare_megatron.core.topology import GroupId, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """After a wipe-out: training does not start again."""

    step: int
    reason: str


class Offer(NamedTuple):
    """A checkpoint that lacks nothing at a glance: its manifest is what was written, and all files have their sizes.

    Attributes:
        step: Committed steps that it holds.
        num_files: Of the manifest, which go by their numbers in the order of their names.
        digest: Of the manifest: what others have read counts for the same files alone.
    """

    step: int
    num_files: int = 0
    digest: str = ""


class Reading(NamedTuple):
    """What a group has read of a checkpoint, each file from its first to its last byte.

    Attributes:
        offer: The checkpoint.
        whole: Files that are what was written.
        damaged: Files that are not.
        reason: What is wrong with the first of these.
        num_bytes: Read so far, also of files that are under way.
    """

    offer: Offer
    whole: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    reason: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
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
    offers: tuple[Offer, ...]
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
    waiting: tuple[Waiting, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """Read these files of a checkpoint against what was written, unless that is done.

    Attributes:
        offer: The checkpoint.
        numbers: The files.
    """

    offer: Offer
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawOffers:
    """Do not offer these checkpoints any more, but earlier ones.

    Attributes:
        reasons: Why not.
    """

    reasons: Mapping[Offer, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpoint:
    """Take over the checkpoint after this many committed steps; 0: the parameters with which the run began.

    Attributes:
        step: The steps.
        rework_steps: Steps that were committed after it and are computed again.
        hosts: For each slice of the optimizer's state, who takes it over; none where everybody takes all state.
        snapshot: Instead of a checkpoint the snapshot of this attempt, from the memory of nodes.
        members: Who takes part from here on, and does the same.
    """

    step: int
    rework_steps: int
    hosts: Hosts = ()
    snapshot: int | None = None
    members: tuple[Member, ...] = ()
