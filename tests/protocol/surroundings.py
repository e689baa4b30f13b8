"""What a simulated group needs of its world, and how it lets others go on."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.core.log.relays import BlockVotes, Reliance
from spare_megatron.core.log.votes import RoundResult
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement
from tests.protocol.communicators import Communicators
from tests.protocol.evaluations import EvaluationSums
from tests.protocol.invariants import Invariants
from tests.protocol.lanes import Lanes
from tests.protocol.partitions import PartitionStates
from tests.protocol.post import Post
from tests.protocol.saved import Content
from tests.protocol.slabs import Gradients
from tests.protocol.store import Request
from tests.protocol.undoing import NodeMemory


@dataclass(frozen=True, slots=True)
class Until:
    """Goes on once this is so."""

    is_met: Callable[[], bool]


Steps = Generator[Request | Until | None, Any, Any]


def side_by_side(parts: Sequence[Steps], random: Random) -> Steps:
    """Goes through all parts, which wait for their own, until all have ended; a request holds up the others."""
    if len(parts) == 1:
        return (yield from parts[0])
    waits: dict[int, Until | None] = dict.fromkeys(range(len(parts)))

    def ready() -> list[int]:
        return [number for number, wait in waits.items() if wait is None or wait.is_met()]

    while waits:
        yield Until(lambda: bool(ready()))
        number = random.choice(ready())
        try:
            step = next(parts[number])
            while isinstance(step, Request):
                step = parts[number].send((yield step))
            waits[number] = step
        except StopIteration:
            del waits[number]
    return None


class Surroundings(Protocol):
    """What a group needs of the world."""

    log_type: type[DecisionLog]
    voice_type: type[GroupAgreement]
    votes_type: type[BlockVotes]
    reliance_type: type[Reliance]
    fan_in: int
    keep_last: int
    sync_every: int
    rounds: dict[int, RoundResult]
    post: Post
    communicators: Communicators
    invariants: Invariants
    groups: tuple[GroupId, ...]
    random: Random
    suspect_every: int
    checks_itself: bool
    evaluation_type: type[EvaluationSums]
    refusal_in_log: Callable[[DecisionLog, int, SaveCheckpoint], str]
    superseded: Callable[..., frozenset[int]]
    lanes: Lanes
    states: dict[int, dict[Member, Content]]
    memory: NodeMemory
    num_waiting: int
    num_announced: int
    is_patience_over: bool

    def stages_of(self, member: Member) -> int | None: ...

    def gradients_of(self, member: Member, name: str) -> Gradients: ...

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
