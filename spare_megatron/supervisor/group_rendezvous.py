"""Keeps the parts of a group on several nodes together: one fence ends them all, and all start together.

Each supervisor decides on its own part as on a whole group, and publishes in the control store that an incarnation is
fenced (`lost/GROUP/INCARNATION`: entry, rank, cause) and that its node is ready for the next one
(`part/GROUP/INCARNATION/NODE`: incarnation of the supervisor). No node leads: each starts its part when it finds all of
them ready.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spare_megatron.core.failure_detector import ENDED
from spare_megatron.core.rejoin import PartReadiness
from spare_megatron.journal.records import LossRecord
from spare_megatron.process.readiness import note_ready
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.fencing import fence


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsThere:
    """All nodes of the group are ready for this incarnation, which starts now."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLost:
    """The incarnation that runs or is awaited here is fenced because of what another node has seen."""

    member: Member
    rank: int
    cause: str


class GroupRendezvous:
    """One node's parts of the groups that span nodes; events go to `tell`. For the thread that calls the store."""

    def __init__(
        self, layout: Layout, node: int, life: int, interval_s: float, tell: Callable[[PartsThere | PartLost], None]
    ) -> None:
        self._layout = layout
        self._node = node
        self._life = life
        self._interval_s = interval_s
        self._tell = tell
        groups = [group for group in layout.groups_on(node) if self._is_divided(group)]
        self._present = {} if life else {group: Member(group) for group in groups}
        self._waiting: dict[GroupId, tuple[Member, PartReadiness]] = {}

    def begin(self, member: Member) -> None:
        """Notes that the group's ranks on this node run this incarnation."""
        if self._is_divided(member.group):
            self._present[member.group] = member

    def wait(self, store: ControlStore, member: Member) -> None:
        """Publishes that this node is ready for this incarnation; `look` waits for the others."""
        self._present.pop(member.group, None)
        store.put(_ready_key(member, self._node), str(self._life))
        self._waiting[member.group] = member, PartReadiness(self._layout.nodes_of(member.group), self._interval_s)

    def find_fence(self, store: ControlStore, member: Member) -> int | None:
        """The entry that fences this incarnation, if a node has published one: all nodes of a group share one loss."""
        (text,) = store.get([_lost_key(member)]) if self._is_divided(member.group) else (None,)
        return None if text is None else int(json.loads(text)[0])

    def fenced(self, store: ControlStore, member: Member, entry_index: int, rank: int, cause: str) -> None:
        """Publishes the fence to the group's other nodes, whose ranks may be waiting for lost ones."""
        if self._is_divided(member.group):
            tell_fenced(store, member, entry_index, rank, cause)
            if self._present.get(member.group) == member:
                del self._present[member.group]

    def look(self, store: ControlStore) -> None:
        """Polls what the other nodes have published."""
        for member in list(self._present.values()):
            if self._is_lost(store, member):
                del self._present[member.group]
        for member, gathering in list(self._waiting.values()):
            # Other nodes may have started and lost it while this one took a node for away.
            if self._is_lost(store, member):
                del self._waiting[member.group]
            elif self._are_there(store, member, gathering):
                del self._waiting[member.group]
                # Before anything starts: a replacement supervisor must know of this incarnation.
                store.put(incarnation_key(member.group), str(member.incarnation))
                self._tell(PartsThere(member=member))

    def _is_lost(self, store: ControlStore, member: Member) -> bool:
        (text,) = store.get([_lost_key(member)])
        if text is not None:
            _, rank, cause = json.loads(text)
            self._tell(PartLost(member=member, rank=rank, cause=cause))
        return text is not None

    def _are_there(self, store: ControlStore, member: Member, gathering: PartReadiness) -> bool:
        nodes = self._layout.nodes_of(member.group)
        told = store.get([_ready_key(member, node) for node in nodes])
        beats = store.get([f"beat/{node}" for node in nodes])
        lives = store.get([f"life/{node}" for node in nodes])
        ready = [node for node, text, life in zip(nodes, told, lives, strict=True) if text == (life or "0")]
        there = {node: None if beat == ENDED else beat for node, beat in zip(nodes, beats, strict=True)}
        return gathering.poll(ready, there, time.monotonic())

    def _is_divided(self, group: GroupId) -> bool:
        return len(self._layout.nodes_of(group)) > 1


def tell_fenced(store: ControlStore, member: Member, entry_index: int, rank: int, cause: str) -> None:
    """Publishes that this incarnation is fenced, and why. The first publication stands."""
    store.put_if_absent(_lost_key(member), json.dumps([entry_index, rank, cause]))


def incarnation_key(group: GroupId) -> str:
    return f"incarnation/{group}"


def present_members(store: ControlStore, groups: Sequence[GroupId]) -> list[Member]:
    """The groups in their present incarnations, as published; 0 until then."""
    texts = store.get([incarnation_key(group) for group in groups])
    return [Member(group, int(text or 0)) for group, text in zip(groups, texts, strict=True)]


def _ready_key(member: Member, node: int) -> str:
    return f"part/{member.group}/{member.incarnation}/{node}"


def _lost_key(member: Member) -> str:
    return f"lost/{member.group}/{member.incarnation}"


def fence_node(store: ControlStore, layout: Layout, node: int, cause: str) -> Iterator[LossRecord]:
    """Fences the groups that have ranks on the node and marks them as not awaited at the start, one with each record.

    Yields:
        The loss of each group, which is fenced when its record is requested.
    """
    log = DecisionLog(store)
    for member in present_members(store, layout.groups_on(node)):
        group = member.group
        index = fence(log, member, cause, from_index=0)
        if len(layout.nodes_of(group)) > 1:
            tell_fenced(store, member, index, -1, cause)
        note_ready(store, group, "the driver", layout.num_groups)
        yield LossRecord(
            group=group, rank=-1, cause=cause, entry_index=index, incarnation=member.incarnation, pending=[]
        )
