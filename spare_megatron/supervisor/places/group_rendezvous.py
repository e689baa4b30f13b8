"""Keeps the parts of a group on several nodes together: one fence ends them all, and all start together. Each
supervisor publishes in the control store that an incarnation of its part is fenced (`keys.part_fenced`: entry, rank,
cause) and that its node is ready for the next (`keys.part_ready`). No node leads: each starts its part when all are
ready.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spare_megatron.core.machines.failure_detector import ENDED
from spare_megatron.core.machines.group_starts import PartReadiness
from spare_megatron.core.machines.places import Places
from spare_megatron.formats.codec import decode, encode
from spare_megatron.journal.records import LossRecord
from spare_megatron.process.readiness import note_ready
from spare_megatron.stacking.layout import GroupId, Layout, Member, PlaceId
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.fencing import fence


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsReady:
    """All nodes of the group are ready for this incarnation, which starts now; `stages`: if fewer than usual."""

    member: Member
    stages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFenced:
    """The incarnation that runs or is awaited here is fenced because of what another node has seen, or has been in the
    run without this node, and left it.
    """

    member: Member
    rank: int
    cause: str


class GroupRendezvous:
    """One node's parts of the groups that span nodes; events go to `on_event`. For the thread that calls the store."""

    def __init__(
        self,
        layout: Layout,
        node: int,
        incarnation: int,
        interval_s: float,
        on_event: Callable[[PartsReady | PartFenced], None],
    ) -> None:
        self._layout = layout
        self._node = node
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._on_event = on_event
        self._groups = [group for group in layout.groups_on(node) if self._is_divided(group)]
        self._present = {} if incarnation else {group: Member(group) for group in self._groups}
        self._stages: dict[GroupId, int] = {}  # of the present incarnations, if fewer than usual
        self._waiting: dict[GroupId, tuple[Member, PartReadiness]] = {}

    @property
    def are_broken(self) -> bool:
        """Whether some group has no present incarnation here that is not fenced."""
        return len(self._present) < len(self._groups)

    def growing(self, places: Places) -> frozenset[GroupId]:
        """The groups here that have machines for more stages than they run with."""
        return frozenset(
            group for group in self._present if self._stages.get(group, math.inf) < places.stages_of(group)
        )

    def note_started(self, member: Member, stages: int | None) -> None:
        """Notes that the group's ranks on this node run this incarnation; `stages`: if fewer than usual."""
        if self._is_divided(member.group):
            self._present[member.group] = member
            self._stages.pop(member.group, None)
            if stages is not None:
                self._stages[member.group] = stages

    def publish_ready(self, store: ControlStore, member: Member) -> None:
        """Publishes that this node is ready for this incarnation; `poll` waits for the others."""
        self._present.pop(member.group, None)
        store.put(keys.part_ready(member, self._node), str(self._incarnation))
        self._waiting[member.group] = member, PartReadiness(self._interval_s)

    def find_fence(self, store: ControlStore, member: Member) -> int | None:
        """The entry that fences this incarnation, if a node has published one: all nodes of a group share one loss."""
        (text,) = store.get([keys.part_fenced(member)]) if self._is_divided(member.group) else (None,)
        return None if text is None else decode(text, tuple[int, int, str])[0]

    def publish_fence(self, store: ControlStore, member: Member, entry_index: int, rank: int, cause: str) -> None:
        """Publishes the fence to the group's other nodes, whose ranks may be waiting for lost ones."""
        if self._is_divided(member.group):
            publish_fence(store, member, entry_index, rank, cause)
            if self._present.get(member.group) == member:
                del self._present[member.group]

    def poll(self, store: ControlStore, read_places: Callable[[], Places]) -> None:
        """Polls what the other nodes have published. `read_places` reads the list of assignments."""
        for member in list(self._present.values()):
            if self._is_fenced(store, member):
                del self._present[member.group]
        for member, readiness in list(self._waiting.values()):
            # Other nodes may have started and lost it while this one believed a node to be away.
            if self._is_fenced(store, member) or self._has_left(store, member):
                del self._waiting[member.group]
            elif stages := self._stages_if_ready(store, member, readiness, read_places):
                del self._waiting[member.group]
                # Before anything starts: a replacement supervisor must know of this incarnation.
                store.put(keys.group_incarnation(member.group), str(member.incarnation))
                is_whole = stages == self._layout.pipeline_parallel
                self._on_event(PartsReady(member=member, stages=None if is_whole else stages))

    def _is_fenced(self, store: ControlStore, member: Member) -> bool:
        (text,) = store.get([keys.part_fenced(member)])
        if text is not None:
            _, rank, cause = decode(text, tuple[int, int, str])
            self._on_event(PartFenced(member=member, rank=rank, cause=cause))
        return text is not None

    def _has_left(self, store: ControlStore, member: Member) -> bool:
        """Whether this incarnation, which is awaited here, has been in the run without this node, and left it."""
        has_left = has_lengths(self._layout) and store.exists(
            keys.has_left(member, self._layout.nodes_of(member.group)[0])
        )
        if has_left:
            self._on_event(PartFenced(member=member, rank=-1, cause="it has left the run"))
        return has_left

    def _stages_if_ready(
        self, store: ControlStore, member: Member, readiness: PartReadiness, read_places: Callable[[], Places]
    ) -> int | None:
        """The stages with which this node starts its part now. The first node to start any decides for all: another
        may have read more of the list of assignments.
        """
        group, layout = member.group, self._layout
        if (begun := stages_of(store, layout, member)) is not None:
            return begun if self._node in layout.nodes_of(group, begun) else None
        nodes = layout.nodes_of(group)
        published = store.get([keys.part_ready(member, node) for node in nodes])
        beats = store.get([keys.beat(node) for node in nodes])
        # After the beats: an assignment is written before a beat stands for the machine that has not come yet.
        places = read_places()
        stages = places.stages_of(group)
        wanted = layout.nodes_of(group, stages)
        ready = [
            node
            for node, text in zip(nodes, published, strict=True)
            if text == str(places.incarnation_of(PlaceId(node)))
        ]
        present = {node: None if beat == ENDED else beat for node, beat in zip(nodes, beats, strict=True)}
        are_ready = readiness.poll(ready, {node: present[node] for node in wanted}, time.monotonic())
        if not are_ready or self._node not in wanted:
            return None
        if has_lengths(layout):
            stages = int(store.put_if_absent(keys.group_stages(member), str(stages)))
        return stages if self._node in layout.nodes_of(group, stages) else None

    def _is_divided(self, group: GroupId) -> bool:
        return len(self._layout.nodes_of(group)) > 1


def has_lengths(layout: Layout) -> bool:
    """Whether groups may have pipelines of several lengths."""
    return len(layout.lengths) > 1


def stages_of(store: ControlStore, layout: Layout, member: Member) -> int | None:
    """The stages of an incarnation that has been started again; None if all groups have equally many."""
    (text,) = store.get([keys.group_stages(member)]) if has_lengths(layout) else (None,)
    return None if text is None else int(text)


def is_without(store: ControlStore, layout: Layout, member: Member, node: int) -> bool:
    """Whether this incarnation has so few stages that none is on the node."""
    return node not in layout.nodes_of(member.group, stages_of(store, layout, member))


def publish_fence(store: ControlStore, member: Member, entry_index: int, rank: int, cause: str) -> None:
    """Publishes that this incarnation is fenced, and why. The first publication stands."""
    store.put_if_absent(keys.part_fenced(member), encode([entry_index, rank, cause]))


def present_members(store: ControlStore, groups: Sequence[GroupId]) -> list[Member]:
    """The groups in their present incarnations, as published; 0 until then."""
    texts = store.get([keys.group_incarnation(group) for group in groups])
    return [Member(group, int(text or 0)) for group, text in zip(groups, texts, strict=True)]


def fence_node(store: ControlStore, layout: Layout, node: int, cause: str) -> Iterator[LossRecord]:
    """Fences the home groups on the node and marks them as not awaited at the start; yields the loss of each."""
    log = DecisionLog(store)
    awaited = [group for group in layout.groups_on(node) if group < layout.num_home_groups]
    for member in present_members(store, awaited):
        group = member.group
        index = fence(log, member, cause, from_index=0)
        if len(layout.nodes_of(group)) > 1:
            publish_fence(store, member, index, -1, cause)
        note_ready(store, group, "the driver", layout.num_home_groups)
        yield LossRecord(
            group=group, rank=-1, cause=cause, entry_index=index, incarnation=member.incarnation, pending=[]
        )
