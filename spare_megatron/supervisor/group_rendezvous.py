"""Groups whose ranks stand on several nodes. Their parts end together, and begin their next life together.

The supervisor of each node decides on its own part as on a whole group. It says in the control store that the present
life is fenced (`lost/GROUP/LIFE`: by which entry, the rank and the cause), and that it is ready for the next one
(`part/GROUP/LIFE/NODE`: which of the node's supervisors it is). No node leads: each begins when it finds all ready.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spare_megatron.core.failure_detector import ENDED
from spare_megatron.core.rejoin import Gathering
from spare_megatron.journal.records import LossRecord
from spare_megatron.process.readiness import note_ready
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.fencing import fence


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsThere:
    """All nodes of the group are ready for this life of it, and it begins."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLost:
    """The life that the group is in here, or that it waits for, is fenced for what has been seen on another node."""

    member: Member
    rank: int
    cause: str


class GroupRendezvous:
    """One node's parts of such groups, in the thread that asks the store.

    Args:
        layout: Of the run.
        node: The node.
        life: Which of the node's supervisors this is.
        interval_s: The heartbeat interval.
        tell: Told of what happens.
    """

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
        self._waiting: dict[GroupId, tuple[Member, Gathering]] = {}

    def begin(self, member: Member) -> None:
        """The group's ranks on this node are in this life."""
        if self._is_divided(member.group):
            self._present[member.group] = member

    def wait(self, store: ControlStore, member: Member) -> None:
        """This node is ready for this life of the group."""
        self._present.pop(member.group, None)
        store.put(_ready_key(member, self._node), str(self._life))
        self._waiting[member.group] = member, Gathering(self._layout.nodes_of(member.group), self._interval_s)

    def find_fence(self, store: ControlStore, member: Member) -> int | None:
        """The entry that fences this life, where a node has told of it: all nodes of a group meet one loss."""
        (text,) = store.get([_lost_key(member)]) if self._is_divided(member.group) else (None,)
        return None if text is None else int(json.loads(text)[0])

    def fenced(self, store: ControlStore, member: Member, entry_index: int, rank: int, cause: str) -> None:
        """Tells the group's other nodes, whose ranks may be waiting for some that are gone."""
        if self._is_divided(member.group):
            tell_fenced(store, member, entry_index, rank, cause)
            if self._present.get(member.group) == member:
                del self._present[member.group]

    def look(self, store: ControlStore) -> None:
        """At what the other nodes have said."""
        for member in list(self._present.values()):
            if self._is_lost(store, member):
                del self._present[member.group]
        for member, gathering in list(self._waiting.values()):
            # Others may have begun it and lost it, while to this node one of them seemed to be away.
            if self._is_lost(store, member):
                del self._waiting[member.group]
            elif self._are_there(store, member, gathering):
                del self._waiting[member.group]
                # Before anything is started: a supervisor that takes a lost one's place must know of this life.
                store.put(incarnation_key(member.group), str(member.incarnation))
                self._tell(PartsThere(member=member))

    def _is_lost(self, store: ControlStore, member: Member) -> bool:
        (text,) = store.get([_lost_key(member)])
        if text is not None:
            _, rank, cause = json.loads(text)
            self._tell(PartLost(member=member, rank=rank, cause=cause))
        return text is not None

    def _are_there(self, store: ControlStore, member: Member, gathering: Gathering) -> bool:
        nodes = self._layout.nodes_of(member.group)
        told = store.get([_ready_key(member, node) for node in nodes])
        beats = store.get([f"beat/{node}" for node in nodes])
        lives = store.get([f"life/{node}" for node in nodes])
        ready = [node for node, text, life in zip(nodes, told, lives, strict=True) if text == (life or "0")]
        there = {node: None if beat == ENDED else beat for node, beat in zip(nodes, beats, strict=True)}
        return gathering.look(ready, there, time.monotonic())

    def _is_divided(self, group: GroupId) -> bool:
        return len(self._layout.nodes_of(group)) > 1


def tell_fenced(store: ControlStore, member: Member, entry_index: int, rank: int, cause: str) -> None:
    """Tells all nodes of a group that this life of it is fenced, and for what."""
    store.put_if_absent(_lost_key(member), json.dumps([entry_index, rank, cause]))


def incarnation_key(group: GroupId) -> str:
    """Where the number of the group's life stands."""
    return f"incarnation/{group}"


def present_members(store: ControlStore, groups: Sequence[GroupId]) -> list[Member]:
    """The groups in the lives that they are in, as their nodes have told."""
    texts = store.get([incarnation_key(group) for group in groups])
    return [Member(group, int(text or 0)) for group, text in zip(groups, texts, strict=True)]


def _ready_key(member: Member, node: int) -> str:
    return f"part/{member.group}/{member.incarnation}/{node}"


def _lost_key(member: Member) -> str:
    return f"lost/{member.group}/{member.incarnation}"


def fence_node(store: ControlStore, layout: Layout, node: int, cause: str) -> Iterator[LossRecord]:
    """Fences one after the other the groups that have ranks on the node, so that nobody waits for them any more.

    Args:
        store: The control store.
        layout: Of the run.
        node: The node.
        cause: Why, for people.
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
