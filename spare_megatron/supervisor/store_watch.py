"""A supervisor's thread for the control store: writes fences and heartbeats, and watches other nodes. The main thread
has to go on reaping while the store does not answer.
"""

import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from spare_megatron.core.controller.controller import ControllerSetup
from spare_megatron.core.log.actions import AwaitHosts
from spare_megatron.core.log.entries import Fence, decode_entry
from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL, ENDED, Absence
from spare_megatron.core.machines.places import Holding, Quarantine
from spare_megatron.journal.records import ExaminationRecord
from spare_megatron.process.readiness import note_ready
from spare_megatron.process.reports import StoreAway, StoreBack
from spare_megatron.slow_machines.examination import Examinations, ExaminationWanted
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member, PlaceId, Slabs
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.store.tcp_store import TcpControlStore
from spare_megatron.supervisor.places.group_reforming import (
    BEATS_PER_INCARNATION,
    Assigned,
    AssignmentList,
    GroupReforming,
    PlaceTaken,
)
from spare_megatron.supervisor.places.group_rendezvous import (
    GroupRendezvous,
    PartFenced,
    PartsReady,
    is_without,
    present_members,
    stages_of,
)
from spare_megatron.supervisor.rank_exits import FOUND_FENCED
from spare_megatron.voting.fencing import fence
from spare_megatron.voting.log_follower import LogFollower, Stop

NUM_WATCHED = 3
"""Nodes that each supervisor watches: the next ones in a ring of all. A constant, so that the store's load grows only
linearly with the nodes."""


_GRACE_INTERVALS = 3.0
"""Heartbeat intervals that other nodes have to beat again after the store was slow for this one."""

_LEASE_S = 60
"""Lease of a heartbeat, in stores that have leases: the key of a lost node expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceWanted:
    """Request to fence a group. `member`: the lost incarnation, if known. `rank`: -1 for a whole node. `error`: the
    exception behind it, if other groups may raise the same one. `from_index`: at or before the head of the log.
    `concerns_all`: its cause holds for all groups, so training does not begin.
    """

    group: GroupId
    member: Member | None
    rank: int
    cause: str
    error: str
    from_index: int
    concerns_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceWritten:
    """The group is fenced, by this entry of the log; `before_training`: before all groups were ready or lost."""

    wanted: FenceWanted
    member: Member
    entry_index: int
    before_training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A watched node has stopped beating. `members`: its groups, in the incarnations lost with it: a replacement
    supervisor may start the next ones at any time. `left`: those of them that had left the run.
    """

    node: int
    cause: str
    members: tuple[Member, ...]
    left: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """The store reports that it is lost for good, or the thread failed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStopped:
    """The followed log ends or pauses the run, or ends it unless a restart follows."""

    stop: Stop | AwaitHosts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplaced:
    """Another supervisor has taken this one's place, so this one must not start a group again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HasLeft:
    """Nothing is to be fenced: this incarnation of the group has left the run."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsWithout:
    """Nothing is to be fenced: this incarnation of the group has so few stages that none is on this node."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceChanged:
    """This machine's place is another from now on; None if it has lost its place to another machine."""

    to: PlaceTaken | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineChanged:
    """This machine's quarantine, by an entry of the list of assignments; None if it is in none. `leaving`: groups here
    that are to leave and come back, as a machine in their places is slow, or machines suffice for more stages.
    """

    own: Quarantine | None = None
    by: Assigned | None = None
    leaving: frozenset[GroupId] = frozenset()


LinkEvent = (
    FenceWritten
    | HasLeft
    | RunsWithout
    | NodeSilent
    | PartFenced
    | PartsReady
    | LinkLost
    | LogStopped
    | NodeReplaced
    | Assigned
    | PlaceChanged
    | QuarantineChanged
    | ExaminationWanted
    | ExaminationRecord
)


_Request = Callable[[ControlStore, DecisionLog], None]
"""What the thread is to do with the store and the log."""


class StoreLink:
    """The interface of the thread: methods queue requests, `LinkEvent`s go to `outbox`. `connect` opens the store, in
    the thread. `incarnation` is that of this supervisor. `machine` holds the place `node`; the same number if absent.
    `reforming`: None if the groups of the layout cannot be re-formed. `slabs`: None if all pipelines have one length.
    """

    def __init__(
        self,
        *,
        node: int,
        layout: Layout,
        interval_s: float,
        connect: Callable[[], ControlStore],
        outbox: Connection,
        incarnation: int = 0,
        machine: MachineId | None = None,
        reforming: GroupReforming | None = None,
        slabs: Slabs | None = None,
    ) -> None:
        self._holding = Holding(MachineId(node) if machine is None else machine, PlaceId(node), incarnation)
        self._reforming = reforming
        self._examinations = Examinations(self._holding.machine, interval_s, outbox.send)
        self._quarantine = QuarantineChanged()  # as last reported
        self._incarnation = incarnation
        self._node = node
        self._layout = layout
        self._slabs = slabs
        self._interval_s = interval_s
        self._connect = connect
        self._outbox = outbox
        self._wanted: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._follower: LogFollower | None = None
        self._stop: Stop | AwaitHosts | None = None  # as last reported
        self._parts = GroupRendezvous(layout, node, incarnation, interval_s, outbox.send)
        self._silent: set[int] = set()
        self._ring = [(node + offset) % layout.num_nodes for offset in range(1, layout.num_nodes)]
        self._absences = {other: Absence(interval_s) for other in self._ring}
        self._beats = incarnation * BEATS_PER_INCARNATION
        self._beat_at_s = time.monotonic()
        """Due time of the next heartbeat."""
        self.head = 0
        """Entries of the log that ranks here have read, as far as they have reported."""
        self.answers = (0, 0.0)
        """Heartbeats that the store has answered, and seconds until it had, in all."""
        self._last_beats: dict[int, int] = {}
        self._store: ControlStore | None = None
        self._has_begun = False  # training
        self._since_s = time.monotonic()
        self._slow_at_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="store-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fence(self, wanted: FenceWanted) -> None:
        """Requests a fence, which is written as soon as the store answers."""
        self._wanted.put(lambda store, log: self._fence(store, log, wanted))

    def publish_incarnation(self, member: Member, stages: int | None) -> None:
        """Publishes the group's new incarnation, in which other nodes would fence it, and stops following the log.
        `stages`: if fewer than usual.
        """
        self._wanted.put(lambda store, _: self._on_started(store, member, stages))

    def give_place_up(self) -> None:
        """Publishes that this machine's place may be given to another, as it loses its group again and again."""
        self._wanted.put(lambda store, _: store.put(keys.given_up(self._holding.machine), "yes"))

    def wait_for_parts(self, member: Member) -> None:
        """Publishes that this node is ready for the incarnation; `PartsReady` follows once all its nodes are."""
        self._wanted.put(lambda store, _: self._parts.publish_ready(store, member))

    def publish_left(self, member: Member) -> None:
        """Publishes that the member has left the run, and that its ranks here have ended."""
        self._wanted.put(lambda store, _: store.put(keys.has_left(member, self._node), "yes"))

    def follow(self, setup: ControllerSetup) -> None:
        """Follows the log and reports its end as `LogStopped`, for a node without ranks that would notice it."""
        self._wanted.put(lambda _, log: self._start_following(LogFollower(log, setup)))

    def stop(self, timeout_s: float) -> None:
        """Writes the last heartbeat, which says that the node ends by itself, if the store accepts it in time."""
        self._wanted.put(None)
        self._thread.join(timeout_s)

    def unanswered_s(self) -> float:
        """Seconds since the store last answered; small while it does."""
        return time.monotonic() - self._since_s

    def renew(self) -> None:
        """Has what the embedded store has not answered repeated once it can be reached; waits for little."""
        if isinstance(self._store, TcpControlStore):
            self._store.renew_if_back()

    def forgive(self) -> None:
        """Restarts the count of `unanswered_s`."""
        self._since_s = time.monotonic()

    def _run(self) -> None:
        try:
            store = self._store = self._connect()
            log = self._begin(store)
            while self._handle_next(store, log):
                self._since_s = time.monotonic()
        except StoreLost as error:
            self._outbox.send(LinkLost(reason=str(error)))
        except Exception as error:  # noqa: BLE001  (if the thread died silently, its node would go unwatched)
            traceback.print_exc()
            self._outbox.send(LinkLost(reason=f"{type(error).__name__}: {error}"))

    def _begin(self, store: ControlStore) -> DecisionLog:
        self._assignments = AssignmentList(store, self._layout)
        if self._incarnation:
            store.put(keys.supervisor_incarnation(self._node), str(self._incarnation))
        return DecisionLog(store)

    def _handle_next(self, store: ControlStore, log: DecisionLog) -> bool:
        """Beats if that is due, else handles one request. Returns False after the last one."""
        left_s = self._beat_at_s - time.monotonic()
        if left_s <= 0:
            return self._on_beat(store, log)
        try:
            wanted = self._wanted.get(timeout=left_s)
        except queue.Empty:
            return True
        if self._is_replaced():
            return False
        if wanted is None:
            store.put(keys.beat(self._node), ENDED)
            return False
        wanted(store, log)
        return True

    def _on_started(self, store: ControlStore, member: Member, stages: int | None) -> None:
        store.put(keys.group_incarnation(member.group), str(member.incarnation))
        self._parts.note_started(member, stages)
        self._follower = None

    def _start_following(self, follower: LogFollower) -> None:
        self._follower = follower

    def _on_beat(self, store: ControlStore, log: DecisionLog) -> bool:
        """Beats, and reads what others have written. Returns False if the machine's place is another's."""
        self._beat(store)
        log.expect(self.head)
        log.check()
        if self._layout.num_nodes > 1:
            self._poll_quarantines(store)
        if self._parts.are_broken:
            if self._is_replaced():
                return False
            if self._reforming is not None:
                assigned = self._reforming.poll(store, self._assignments, self._holding.place)
                if assigned is not None:
                    self._outbox.send(assigned)
                    return True  # its own place may be another
        self._parts.poll(store, self._assignments.read)
        self._poll_log(store)
        return True

    def _fence(self, store: ControlStore, log: DecisionLog, wanted: FenceWanted) -> None:
        member = wanted.member or present_members(store, [wanted.group])[0]
        if wanted.member is None and is_without(store, self._layout, member, self._node):
            self._outbox.send(RunsWithout(member=member))
            return
        index = self._parts.find_fence(store, member)
        if index is None and wanted.member is None and store.exists(keys.has_left(member, self._node)):
            self._outbox.send(HasLeft(member=member))
            return
        is_published = index is not None
        before_training = not store.exists(keys.ALL_GROUPS_READY)
        if index is None:
            keep_beating = partial(self._keep_beating, store)
            # Before training the driver judges whether others raise the same error: whole nodes may be at fault.
            error = "" if before_training else wanted.error
            index = fence(log, member, wanted.cause, wanted.from_index, error=error, on_entry=keep_beating)
        (text,) = log.entries(range(index, index + 1))
        entry = None if text is None else decode_entry(text)
        if isinstance(entry, Fence) and wanted.cause == FOUND_FENCED:
            wanted = replace(wanted, cause=f"fenced: {entry.reason}")
        if not is_published:
            self._parts.publish_fence(store, member, index, wanted.rank, wanted.cause)
        if isinstance(entry, Fence) and self._layout.num_nodes > 1:
            self._quarantine_if_outvoted(store, entry, member)
        self._outbox.send(
            FenceWritten(wanted=wanted, member=member, entry_index=index, before_training=before_training)
        )
        if before_training and not wanted.concerns_all:
            note_ready(store, wanted.group, f"node {self._node}", self._layout.num_home_groups)

    def _quarantine_if_outvoted(self, store: ControlStore, entry: Fence, member: Member) -> None:
        """Puts this machine into quarantine if the fence says that one of its ranks has computed wrongly."""
        if not entry.is_outvoted or not entry.hits(member):
            return
        here = {rank for group, rank in self._layout.ranks_on(self._node) if group == member.group}
        if entry.wrong_positions and here.isdisjoint(self._ranks_at(store, entry.wrong_positions, member)):
            return
        machine, place, _ = self._holding
        self._assignments.quarantine(
            Quarantine(machine, place, "outvoted", f"group {member.group}: {entry.reason}", member)
        )
        self._poll_quarantine()

    def _ranks_at(self, store: ControlStore, positions: Sequence[int], member: Member) -> set[int]:
        """The ranks of the incarnation that hold what is at these positions."""
        if self._slabs is None:
            return set(positions)
        stages = stages_of(store, self._layout, member) or self._layout.pipeline_parallel
        return {self._slabs.holder_of(one, stages, self._layout.ranks_per_stage) for one in positions}

    def _poll_quarantines(self, store: ControlStore) -> None:
        """Reports changes of quarantines, and does what examinations ask this machine for."""
        places = self._assignments.poll()
        self._poll_quarantine()
        examined = self._examinations.poll(store, places)
        if examined is None:
            return
        self._outbox.send(examined)
        if not examined.reason and (released := self._assignments.release(self._holding.machine)) is not None:
            self._outbox.send(released)
            self._poll_quarantine()

    def _poll_quarantine(self) -> None:
        places = self._assignments.places
        own = places.quarantine_of(self._holding.machine)
        slow = [places.held_by(one.machine) for one in places.quarantines if one.cause == "slow"]
        slow_groups = frozenset(
            group
            for held in slow
            if held is not None
            for group in self._layout.groups_on(held.place)
            if held.place not in places.beyond(group)
        )
        changed = QuarantineChanged(
            own=own,
            by=None if own is None else self._assignments.beginning_of(own),
            leaving=slow_groups.intersection(self._layout.groups_on(self._node)) | self._parts.growing(places),
        )
        if changed != self._quarantine:
            self._quarantine = changed
            self._outbox.send(changed)

    def _is_replaced(self) -> bool:
        """Whether another supervisor has this one's place, or this one another place; then the last event says so."""
        own = self._holding
        places = self._assignments.read()
        held = places.held_by(own.machine)
        if held == own:
            return False
        if places.has_replaced(own.machine):
            self._outbox.send(NodeReplaced())
        else:
            self._outbox.send(PlaceChanged(to=None if held is None else self._assignments.last_of(held)))
        return True

    def _keep_beating(self, store: ControlStore) -> None:
        """For use between the requests of a long operation: notes that the store answers, and beats if that is due."""
        self._since_s = time.monotonic()
        if self._since_s >= self._beat_at_s:
            self._beat(store)

    def _beat(self, store: ControlStore) -> None:
        began_s = time.monotonic()
        self._beats += 1
        store.beat(keys.beat(self._node), str(self._beats), _LEASE_S)
        near = [other for other in self._ring if other not in self._silent][:NUM_WATCHED]
        watched = [*near, *sorted(self._silent)]  # a silent node may come back, and its groups with it
        # Without nodes to watch it reads its own beat, to see that the store answers.
        found = store.get([keys.beat(other) for other in watched or [self._node]])
        num_answers, answers_s = self.answers
        self.answers = num_answers + 1, answers_s + time.monotonic() - began_s
        if not self._has_begun and watched and None in found:
            self._has_begun = store.exists(keys.ALL_GROUPS_READY)
        now_s = time.monotonic()
        if now_s - began_s > self._interval_s / 2:
            self._slow_at_s = now_s
        for other, beats in zip(watched, found, strict=False):
            self._judge(store, other, beats, now_s)
        self._beat_at_s = now_s + self._interval_s / BEATS_PER_INTERVAL

    def _poll_log(self, store: ControlStore) -> None:
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
                self._silent.add(other)  # it never came, its groups are fenced: watch the next node instead
            return
        # An expired lease counts as a beat that does not change.
        before = self._last_beats.get(other)
        self._last_beats[other] = self._last_beats[other] if beats is None else int(beats)
        if now_s - self._slow_at_s < _GRACE_INTERVALS * self._interval_s:
            self._absences[other] = Absence(self._interval_s)
        cause = self._absences[other].poll(self._last_beats[other], now_s)
        if cause and other not in self._silent:
            present = present_members(store, self._layout.groups_on(other))
            present = [member for member in present if not is_without(store, self._layout, member, other)]
            # A fence of a group that has left would cost the others a reduction.
            texts = store.get([keys.has_left(member, other) for member in present])
            left = tuple(member for member, text in zip(present, texts, strict=True) if text is not None)
            members = tuple(member for member in present if member not in left)
            # A supervisor beats before it starts a group: if the beat stands still, none of these is a replacement's.
            if store.get([keys.beat(other)]) == [beats]:
                self._silent.add(other)
                if beats is not None:
                    store.put(keys.last_beat(other), beats)
                self._outbox.send(NodeSilent(node=other, cause=cause, members=members, left=left))
        elif self._last_beats[other] != before:  # `cause` is also empty in the grace period
            self._silent.discard(other)


class StoreWatch:
    """Judges how long the store is silent: away after `interval_s`, given up after `limit_s`, with `failure` why."""

    def __init__(self, link: StoreLink, interval_s: float, limit_s: float) -> None:
        self._link = link
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._away_since_s: float | None = None
        self.failure = ""

    @property
    def is_away(self) -> bool:
        return self._away_since_s is not None

    def poll(self, now_s: float) -> StoreAway | StoreBack | None:
        """Whether the store has gone away or come back, at this monotonic time; None if nothing has changed."""
        silent_s = self._link.unanswered_s()
        if silent_s > self._limit_s:
            self.failure = (
                f"the control store did not answer for control.store_timeout_s={self._limit_s:g}; check that it runs "
                "and can be reached from here"
            )
        if silent_s > self._interval_s:
            self._link.renew()
        if silent_s > self._interval_s and self._away_since_s is None:
            self._away_since_s = now_s - silent_s
            return StoreAway(limit_s=self._limit_s)
        if silent_s <= self._interval_s and self._away_since_s is not None:
            away_s, self._away_since_s = now_s - self._away_since_s, None
            return StoreBack(away_s=away_s)
        return None
