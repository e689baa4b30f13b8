"""A supervisor's connection to the control store, in a thread of its own: fences, and the beats of nodes.

The supervisor's main thread must go on reaping while the store does not answer, so it never asks the store itself.
"""

import math
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from spare_megatron.core.controller import ControllerSetup
from spare_megatron.core.failure_detector import BEATS_PER_INTERVAL, ENDED, Absence
from spare_megatron.process.readiness import ALL_GROUPS_READY, note_ready
from spare_megatron.process.reports import StoreAway, StoreBack
from spare_megatron.stacking.layout import GroupId, Layout, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.supervisor.group_rendezvous import (
    GroupRendezvous,
    PartLost,
    PartsThere,
    incarnation_key,
    present_members,
)
from spare_megatron.voting.fencing import fence
from spare_megatron.voting.log_follower import LogFollower, Stop

NUM_WATCHED = 3
"""Nodes that each supervisor watches: the next ones in a ring of all. Few, so that the store serves any number."""


_GRACE_INTERVALS = 3.0
"""After the store was slow, nodes have this long to be heard again: they had the same store."""

_LEASE_S = 60
"""How long a store with leases keeps the beat of a node that is gone: it leaves nothing behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceWanted:
    """A group to be fenced.

    Attributes:
        group: The group.
        member: The group in the life that is lost, where this node knows it.
        rank: The rank that showed the loss; -1 for its whole node.
        cause: Why, for people.
        error: The exception behind it, where others may meet it too.
        from_index: An index at or before the head of the log.
    """

    group: GroupId
    member: Member | None
    rank: int
    cause: str
    error: str
    from_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceWritten:
    """It is fenced, by this log entry."""

    wanted: FenceWanted
    member: Member
    entry_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A watched node has stopped beating.

    Attributes:
        node: The node.
        cause: Why it is given up, for people.
        members: Its groups, in the lives that are lost with it: who takes its place may begin the next ones at once.
    """

    node: int
    cause: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """The store says that it is gone for good, or the link to it broke."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStopped:
    """The log that was followed ends the run, or would without a restart."""

    stop: Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplaced:
    """Another supervisor has taken this one's place: it must not start any group again."""


LinkEvent = FenceWritten | NodeSilent | PartLost | PartsThere | LinkLost | LogStopped | NodeReplaced


@dataclass(frozen=True, slots=True)
class _Ready:
    """This node's part of a group may begin this life."""

    member: Member


class StoreLink:
    """The thread.

    Args:
        node: The supervisor's node.
        layout: Of the run.
        interval_s: The heartbeat interval.
        connect: Opens the connection.
        outbox: Where events go.
        life: Which one of the node's supervisors it is, where another may take its place.
    """

    def __init__(
        self,
        *,
        node: int,
        layout: Layout,
        interval_s: float,
        connect: Callable[[], ControlStore],
        outbox: Connection,
        life: int | None = None,
    ) -> None:
        self._life = life
        self._node = node
        self._layout = layout
        self._interval_s = interval_s
        self._connect = connect
        self._outbox = outbox
        self._wanted: queue.SimpleQueue[FenceWanted | Member | _Ready | ControllerSetup | None] = queue.SimpleQueue()
        self._follower: LogFollower | None = None
        self._stop: Stop | None = None  # as it has been told of
        self._parts = GroupRendezvous(layout, node, life or 0, interval_s, outbox.send)
        self._silent: set[int] = set()
        self._ring = [(node + offset) % layout.num_nodes for offset in range(1, layout.num_nodes)]
        self._absences = {other: Absence(interval_s) for other in self._ring}
        # No life counts what another one has: the first beat of a later one could be what the lost one's last was.
        self._beats = (life or 0) << 32
        self._beat_at_s = time.monotonic()
        """When the next one is due."""
        self._last_beats: dict[int, int] = {}
        self._has_begun = False  # training
        self._since_s = time.monotonic()
        self._slow_at_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="store-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fence(self, wanted: FenceWanted) -> None:
        """Has the group fenced as soon as the store answers."""
        self._wanted.put(wanted)

    def begin(self, member: Member) -> None:
        """Tells other nodes which life the group is in, should they have to fence it, and follows the log no more."""
        self._wanted.put(member)

    def wait_for_parts(self, member: Member) -> None:
        """Says that this node's part of the group may begin the next life, and tells when all others may."""
        self._wanted.put(_Ready(member))

    def follow(self, setup: ControllerSetup) -> None:
        """Tells when the log ends the run, or would without a restart. For a node without ranks, which would know."""
        self._wanted.put(setup)

    def stop(self, timeout_s: float) -> None:
        """Says that the node ends by itself, if the store takes it in time."""
        self._wanted.put(None)
        self._thread.join(timeout_s)

    def unanswered_s(self) -> float:
        """Seconds for which the store has not answered; small while it does."""
        return time.monotonic() - self._since_s

    def forgive(self) -> None:
        """Counts `unanswered_s` anew."""
        self._since_s = time.monotonic()

    def _run(self) -> None:
        try:
            store = self._connect()
            log = DecisionLog(store)
            if self._life:
                store.put(f"life/{self._node}", str(self._life))
            while self._serve(store, log):
                self._since_s = time.monotonic()
        except StoreLost as error:
            self._outbox.send(LinkLost(reason=str(error)))
        except Exception as error:  # noqa: BLE001  (else the ranks would go unwatched, and nobody would know)
            traceback.print_exc()
            self._outbox.send(LinkLost(reason=f"{type(error).__name__}: {error}"))

    def _serve(self, store: ControlStore, log: DecisionLog) -> bool:
        """A beat if one is due, else what is wanted before the next; False after the last."""
        left_s = self._beat_at_s - time.monotonic()
        if left_s <= 0:
            self._beat(store)
            self._parts.look(store)
            self._look_at_log(store)
            return True
        try:
            wanted = self._wanted.get(timeout=left_s)
        except queue.Empty:
            return True
        if self._is_replaced(store):
            self._outbox.send(NodeReplaced())
            return False
        if wanted is None:
            store.put(f"beat/{self._node}", ENDED)
            return False
        if isinstance(wanted, Member):
            store.put(incarnation_key(wanted.group), str(wanted.incarnation))
            self._parts.begin(wanted)
            self._follower = None
            return True
        if isinstance(wanted, _Ready):
            self._parts.wait(store, wanted.member)
            return True
        if isinstance(wanted, ControllerSetup):
            self._follower = LogFollower(log, wanted)
            return True
        member = wanted.member or present_members(store, [wanted.group])[0]
        index = self._parts.find_fence(store, member)
        if index is None:
            keep_beating = partial(self._keep_beating, store)
            # Before training has begun the driver judges whether others meet the same: whole nodes may be at fault.
            error = wanted.error if wanted.error and store.exists(ALL_GROUPS_READY) else ""
            index = fence(log, member, wanted.cause, wanted.from_index, error=error, on_entry=keep_beating)
            self._parts.fenced(store, member, index, wanted.rank, wanted.cause)
        self._outbox.send(FenceWritten(wanted=wanted, member=member, entry_index=index))
        if not store.exists(ALL_GROUPS_READY):
            note_ready(store, wanted.group, f"node {self._node}", self._layout.num_groups)
        return True

    def _is_replaced(self, store: ControlStore) -> bool:
        if self._life is None:
            return False
        (latest,) = store.get([f"life/{self._node}"])
        return latest is not None and int(latest) > self._life

    def _keep_beating(self, store: ControlStore) -> None:
        """Between the requests of something that may take long: the store answers, and others hear of this node."""
        self._since_s = time.monotonic()
        if self._since_s >= self._beat_at_s:
            self._beat(store)

    def _beat(self, store: ControlStore) -> None:
        began_s = time.monotonic()
        self._beats += 1
        store.beat(f"beat/{self._node}", str(self._beats), _LEASE_S)
        near = [other for other in self._ring if other not in self._silent][:NUM_WATCHED]
        watched = [*near, *sorted(self._silent)]  # a silent one may come back, with groups that do
        # With nobody to watch, its own beat: the store has to answer something.
        found = store.get([f"beat/{other}" for other in watched or [self._node]])
        if not self._has_begun and watched and None in found:
            self._has_begun = store.exists(ALL_GROUPS_READY)
        now_s = time.monotonic()
        if now_s - began_s > self._interval_s / 2:
            self._slow_at_s = now_s
        for other, beats in zip(watched, found, strict=False):
            self._judge(store, other, beats, now_s)
        self._beat_at_s = now_s + self._interval_s / BEATS_PER_INTERVAL

    def _look_at_log(self, store: ControlStore) -> None:
        stop = None if self._follower is None else self._follower.stop(lambda: self._keep_beating(store))
        if stop is not None and stop is not self._stop:
            self._outbox.send(LogStopped(stop=stop))
        self._stop = stop

    def _judge(self, store: ControlStore, other: int, beats: str | None, now_s: float) -> None:
        if beats == ENDED:
            self._ring.remove(other)
            self._silent.discard(other)
            return
        if beats is None and other not in self._last_beats:
            if self._has_begun:
                self._silent.add(other)  # its groups are lost since the start, and the next node in the ring is watched
            return
        # A beat whose lease has run out does not move any more, either.
        before = self._last_beats.get(other)
        self._last_beats[other] = self._last_beats[other] if beats is None else int(beats)
        if now_s - self._slow_at_s < _GRACE_INTERVALS * self._interval_s:
            self._absences[other] = Absence(self._interval_s)
        cause = self._absences[other].look(self._last_beats[other], now_s)
        if cause and other not in self._silent:
            members = present_members(store, self._layout.groups_on(other))
            # A supervisor beats before it begins a life: while the beat stands still these are not the new one's.
            if store.get([f"beat/{other}"]) == [beats]:
                self._silent.add(other)
                self._outbox.send(NodeSilent(node=other, cause=cause, members=tuple(members)))
        elif self._last_beats[other] != before:  # not for having been forgiven: it was not away for that
            self._silent.discard(other)


class StoreWatch:
    """Judges how long the store has not answered.

    Args:
        node: The supervisor's node.
        link: Its connection.
        interval_s: The heartbeat interval, after which the store is away.
        limit_s: After which it is given up.

    Attributes:
        is_away: It does not answer.
        failure: Why it is given up; empty while it is not.
    """

    def __init__(self, node: int, link: StoreLink, interval_s: float, limit_s: float) -> None:
        self._node = node
        self._link = link
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._away_since_s: float | None = None
        self.failure = ""

    @property
    def is_away(self) -> bool:
        return self._away_since_s is not None

    def look(self, now_s: float) -> StoreAway | StoreBack | None:
        """What has changed, if anything, at this monotonic time."""
        silent_s = self._link.unanswered_s()
        if silent_s > self._limit_s:
            self.failure = (
                f"the control store did not answer for control.store_timeout_s={self._limit_s:g}; see why it does not, "
                "and whether it can be reached from here"
            )
        if silent_s > self._interval_s and self._away_since_s is None:
            self._away_since_s = now_s - silent_s
            return StoreAway(node=self._node, limit_s=self._limit_s)
        if silent_s <= self._interval_s and self._away_since_s is not None:
            away_s, self._away_since_s = now_s - self._away_since_s, None
            return StoreBack(node=self._node, away_s=away_s)
        return None
