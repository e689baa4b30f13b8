"""The messages between a rank and its node's snapshot server, over a socket that never leaves the node. The socket has
an abstract name instead of a file, so nothing is left behind; the key authenticates both sides.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from spare_megatron.core.log.events import HeldPartition
from spare_megatron.core.log.votes import Held
from spare_megatron.stacking.layout import PartitionId

PartKey = PartitionId | None  # a state partition, or all other state


class Part(NamedTuple):
    """A part of a rank's state that is copied by itself; `position` is the rank's index inside its group."""

    position: int
    partition: PartKey = None

    @property
    def name(self) -> str:
        """The name under which a `piece_client.PieceClient` asks for it."""
        return f"{self.position}" if self.partition is None else f"{self.position}/{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotServerAddress:
    """Abstract socket name and key of a node's snapshot server; a restarted server has the same."""

    name: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWanted:
    """Asks for memory for these parts of an attempt's snapshot; of earlier ones only those `kept` must stay. Answered
    by a refusal, or an empty text and a memory descriptor for each part; after the rank's `COPIED`, by the SHA-256 of
    each.
    """

    position: int
    attempt: int
    kept: tuple[int, ...]
    num_bytes: dict[Part, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOver:
    """The snapshot of an attempt is kept on other nodes; of earlier ones of the position only those `kept` must stay.
    The answer, an empty text, says that the others are gone.
    """

    position: int
    attempt: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWanted:
    """Asks for the snapshots of a rank position, to be served on the IP address `host` of this machine."""

    position: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSnapshots:
    """The answer to `HeldWanted`: intact copies of all but state partitions (`held`) and of `partitions`, attempts of
    the others (`damaged`), and the `server` for a `piece_client.PieceClient`, with the attempt as step.
    """

    held: tuple[Held, ...]
    partitions: tuple[HeldPartition, ...]
    damaged: tuple[int, ...]
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWanted:
    """Asks for a part of a snapshot. Answered by an empty text and a memory descriptor, or by why it is refused."""

    part: Part
    attempt: int


COPIED = "copied"
