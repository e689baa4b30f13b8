"""What a simulated group needs of its world, and how it lets others go on."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.core.log.bucket_window import BucketWindow
from spare_megatron.core.log.relays import BlockVotes, Reliance
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement
from tests.protocol.buckets import Buckets
from tests.protocol.communicators import Communicators
from tests.protocol.evaluations import EvaluationSums
from tests.protocol.invariants import Invariants
from tests.protocol.lanes import Lanes
from tests.protocol.partitions import PartitionStates
from tests.protocol.post import Post
from tests.protocol.saved import Content
from tests.protocol.store import Request


@dataclass(frozen=True, slots=True)
class Until:
    """Goes on once this is so."""

    is_met: Callable[[], bool]


Steps = Generator[Request | Until | None, Any, Any]


class Surroundings(Protocol):
    """What a group needs of the world."""

    log_type: type[DecisionLog]
    voice_type: type[GroupAgreement]
    votes_type: type[BlockVotes]
    reliance_type: type[Reliance]
    fan_in: int
    keep_last: int
    post: Post
    communicators: Communicators
    invariants: Invariants
    groups: tuple[GroupId, ...]
    num_buckets: int
    suspect_every: int
    window_type: type[BucketWindow]
    buckets_type: type[Buckets]
    evaluation_type: type[EvaluationSums]
    refusal_in_log: Callable[[DecisionLog, int, SaveCheckpoint], str]
    superseded: Callable[..., frozenset[int]]
    lanes: Lanes
    states: dict[int, dict[Member, Content]]
    num_waiting: int
    num_announced: int
    is_patience_over: bool

    def stages_of(self, member: Member) -> int | None: ...

    def is_there(self, member: Member) -> bool: ...

    def wiped_out(self, member: Member) -> None: ...

    def paused(self) -> None: ...

    def now_s(self, process: str) -> float: ...

    def is_written(self, index: int) -> bool: ...

    def is_reported_broken(self, index: int) -> bool: ...

    def choose(self, *outcomes: str) -> str: ...

    def start_in_background(self, name: str, steps: Steps) -> None: ...

    def has_more(self, donors: Sequence[Member], given: Collection[Member]) -> bool: ...

    def partitions_of(self, member: Member) -> PartitionStates | None: ...

    def observe(self, member: Member) -> None: ...
