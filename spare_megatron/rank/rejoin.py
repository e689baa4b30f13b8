"""Brings a restarted group back: it reads the log from its first entry until an entry names it.

That is a commit that admits the group or, after a wipe-out, the restart. Every batch of entries counts as progress.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spare_megatron.core.log.actions import Action, AdmitGroups, LoadCheckpoint, RefuseCheckpoint, StopWipeOut
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart, entry_fields
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import EntryRecord
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.rank.restart_search import RestartSearch
from spare_megatron.stacking.layout import ShardId
from spare_megatron.state.rank_context import RankContext
from spare_megatron.voting.agreement import TURN_S, Fenced
from spare_megatron.voting.log_follower import Stop


@dataclass
class Rejoin:
    """One rank's part in its group's return. `announced` gets whether the group waits for a restart, `paused` the step
    of a pause and the shards that it waits for, none when training goes on.
    """

    ctx: RankContext
    restart_loader: RestartLoader
    announced: Callable[[bool], None]
    paused: Callable[[int, tuple[ShardId, ...]], None]
    _is_paused: bool = False  # as last reported
    _has_announced: bool | None = None  # whether for a restart; None before the first announcement
    _unwritten: list[tuple[int, Entry]] = field(default_factory=list)  # entries from the last commit on

    def __post_init__(self) -> None:
        self._search = RestartSearch(self.ctx, self.restart_loader)

    def run(self) -> deque[Action] | Stop:
        """Folds the log until an entry names this group; returns the actions from there on, or an earlier stop.

        Collective over: all ranks of the group. Raises `Fenced` if the group is fenced while it waits.
        """
        controller, agreement = self.ctx.controller, self.ctx.agreement
        controller.handle(RunStarted(), now_s=self.restart_loader.now_s())
        while True:
            is_wiped_out = controller.restarts.wipe_out is not None
            if self._has_announced != is_wiped_out and agreement.is_at_end(controller.head):
                self._announce(is_wiped_out)
            is_paused = controller.pause is not None
            if self._is_paused != is_paused and agreement.is_at_end(controller.head):  # earlier pauses are over
                self._is_paused = is_paused
                self.paused(controller.step, () if controller.pause is None else controller.pause.shards)
            # In turns, so that the other ranks never wait long for the leader, which may have much to read.
            while is_wiped_out and agreement.is_at_end(controller.head):
                if agreement.is_leader:
                    self._search.seek(controller.head)
            while controller.pause is not None and agreement.is_at_end(controller.head):  # no entry for a long time
                if agreement.is_leader:
                    agreement.poll_entry(controller.head, TURN_S)
            # In batches: one broadcast per entry would take most of the return.
            for entry in agreement.read_entries(controller.head):
                first = self._fold(entry)
                if first is not None:
                    return first
            self.ctx.probe.progress()

    def _fold(self, entry: Entry) -> deque[Action] | Stop | None:
        """Folds the next entry. Returns the actions that the group is to execute, None while it waits on."""
        controller, agreement, index = self.ctx.controller, self.ctx.agreement, self.ctx.controller.head
        was_wiped_out = controller.restarts.wipe_out is not None
        if isinstance(entry, Fence) and entry.hits(agreement.member):
            raise Fenced(f"{agreement.member} is fenced by log entry {index} before it took part: {entry.reason}")
        # Up to the restart time stands still at the wipe-out: the outage does not count as time without a save.
        is_restart = isinstance(entry, Restart) and agreement.member in entry.members
        now_s = time.monotonic() if is_restart else self.restart_loader.now_s()
        actions = controller.handle(EntryRead(index=index, entry=entry), now_s=now_s)
        self._note(index, entry, was_wiped_out)
        return self._first(actions)

    def _first(self, actions: Sequence[Action]) -> deque[Action] | Stop | None:
        """These actions from the first one that the group is to execute; None while it waits on."""
        for number, action in enumerate(actions):
            match action:
                case StopWipeOut(is_final=False):
                    self.restart_loader.on_wipe_out()
                case RefuseCheckpoint() if self.ctx.agreement.is_leader:
                    self.restart_loader.refuse(action)
                case AdmitGroups(members=members) if self.ctx.agreement.member in members:
                    return deque(list(actions)[number:])
                case LoadCheckpoint() if self.ctx.agreement.member in self.ctx.controller.voters:
                    return deque(list(actions)[number:])
                case LoadCheckpoint(holders=()):
                    self.restart_loader.on_left_out()
                case _ if isinstance(action, Stop):
                    return action
        return None

    def _announce(self, is_wiped_out: bool) -> None:
        if is_wiped_out:
            self.ctx.probe.between_steps(self.ctx.controller.step, FaultPoint.LOAD_SEARCH)
            if self.ctx.agreement.is_leader:
                self._search.start()
            held, partitions = self.restart_loader.find_snapshots()
            if self.ctx.agreement.is_leader:
                self._search.announce_snapshots(held, partitions)
            self.ctx.probe(FaultPoint.LOAD_WAIT)
        else:
            self.ctx.probe.between_steps(self.ctx.controller.step, FaultPoint.JOIN_WAIT)
            self.ctx.agreement.announce()
        self._has_announced = is_wiped_out
        self.announced(is_wiped_out)

    def _note(self, index: int, entry: Entry, was_wiped_out: bool) -> None:
        """On the leader, journals the entries from the last commit before a wipe-out on: lost groups may lack them."""
        if isinstance(entry, Commit):
            self._unwritten.clear()
        self._unwritten.append((index, entry))
        if not self.ctx.agreement.is_leader or not (was_wiped_out or self.ctx.controller.restarts.wipe_out is not None):
            return
        group = self.ctx.agreement.member.group
        for number, unwritten in self._unwritten:
            self.ctx.journal.write(EntryRecord(group=group, index=number, entry=entry_fields(unwritten)))
        self._unwritten.clear()
