"""What a rank and the keeper of its node say to each other, over a socket that never leaves the node.

The listener's name stands in no folder, so that nothing is left behind; whoever connects has to know the key.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from spare_megatron.core.snapshot_policy import Held, HeldSlice
from spare_megatron.stacking.layout import SliceId


class Part(NamedTuple):
    """What is copied by itself of a rank position's state.

    Attributes:
        position: The rank inside its group.
        slice: A slice of the optimizer's state; None: all but slices.
    """

    position: int
    slice: SliceId | None = None

    @property
    def name(self) -> str:
        """By which a `piece_client.PieceClient` asks for it."""
        return f"{self.position}" if self.slice is None else f"{self.position}/{self.slice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotServerAddress:
    """Where a node's keeper listens, in every one of its lives.

    Attributes:
        name: Of its socket, abstract.
        key: For both sides to know each other by.
    """

    name: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWanted:
    """Memory is wanted for a snapshot, and all earlier ones of this rank position but one may go.

    The answer is an empty text, or why there is none; then a descriptor of memory for each part. When the rank has sent
    `COPIED` the keeper answers with the SHA-256 of what is in each. Whoever leaves before has made no snapshot.

    Attributes:
        position: The rank inside its group.
        attempt: The snapshot.
        previous: The one that stays.
        num_bytes: Of each part of this position that is to be kept here.
    """

    position: int
    attempt: int
    previous: int
    num_bytes: dict[Part, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOver:
    """A snapshot is taken, and not here: all earlier ones of this rank position but one may go.

    The answer, an empty text, says that they have.
    """

    position: int
    attempt: int
    previous: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWanted:
    """The snapshots of this rank position are wanted, to be served on this IP address of the machine."""

    position: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTold:
    """The answer.

    Attributes:
        held: Those whose bytes are still what they were.
        slices: The same of slices.
        damaged: The attempts of the others, which are gone now.
        server: Where a `piece_client.PieceClient` gets them, by the name of a part, step the attempt.
    """

    held: tuple[Held, ...]
    slices: tuple[HeldSlice, ...]
    damaged: tuple[int, ...]
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWanted:
    """A snapshot of this part is wanted on this node.

    The answer is an empty text, or why it is not to be had; then a descriptor of its memory.
    """

    part: Part
    attempt: int


COPIED = "copied"
