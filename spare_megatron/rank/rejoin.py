"""A group that was started again: it reads the log from its first entry, and waits until an entry names it.

That is a commit which admits it beside the others or, after a wipe-out, the restart. A log of months takes long to
read, which counts as progress and not as hanging.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from spare_megatron.core.actions import Action, AdmitGroups, LoadCheckpoint, RefuseCheckpoint, StopWipeOut
from spare_megatron.core.controller import Controller
from spare_megatron.core.entries import Commit, Entry, Fence, Restart, entry_fields
from spare_megatron.core.events import EntryRead, RunStarted
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EntryRecord
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.rank.restart_loader import RestartLoader, RestartSearch
from spare_megatron.stacking.layout import GroupId
from spare_megatron.voting.agreement import Fenced, GroupAgreement
from spare_megatron.voting.log_follower import Stop


class Rejoin:
    """One rank's part in its group's return.

    Args:
        controller: A new one.
        agreement: The group's voice.
        journal: The rank's journal; only leaders write here.
        start_over: What there is to start again from.
        groups: All groups of the run.
        may_restart: Whether a wipe-out is to be waited out; else it ends the run.
        probe: Told of the moments before the group is taken in.
        announced: Called when the group has said that it waits, and whether after a wipe-out.
    """

    def __init__(
        self,
        *,
        controller: Controller,
        agreement: GroupAgreement,
        journal: JournalWriter,
        start_over: RestartLoader,
        groups: Sequence[GroupId],
        may_restart: bool,
        probe: RankProbe,
        announced: Callable[[bool], None],
    ) -> None:
        self._controller = controller
        self._agreement = agreement
        self._journal = journal
        self._start_over = start_over
        self._search = RestartSearch(controller, agreement, start_over, groups)
        self._may_restart = may_restart
        self._probe = probe
        self._announced = announced
        self._has_announced: bool | None = None  # whether as one that waits for a restart
        self._unwritten: list[tuple[int, Entry]] = []  # from the last commit on

    def run(self) -> deque[Action] | Stop:
        """Folds the log until an entry names this group, and carries nothing out.

        Collective over: all ranks of the group.

        Returns:
            What there is to do from then on; or how the run ends before.

        Raises:
            Fenced: The group was found lost while it waited.
        """
        controller, agreement = self._controller, self._agreement
        controller.handle(RunStarted(), now_s=self._start_over.now_s())
        while True:
            is_wiped_out = controller.restarts.wipe_out is not None
            if self._has_announced != is_wiped_out and agreement.is_at_end(controller.head):
                self._announce(is_wiped_out)
            # The others wait for the leader, which may have much to read, never longer than one of its turns.
            while is_wiped_out and agreement.is_at_end(controller.head):
                if agreement.is_leader:
                    self._search.seek(controller.head)
            # Told one by one, what all ranks of the group wait for would add up to most of the return.
            for entry in agreement.read_entries(controller.head):
                first = self._fold(entry)
                if first is not None:
                    return first
            self._probe.progress()

    def _fold(self, entry: Entry) -> deque[Action] | Stop | None:
        """The next entry of the log; returns what of it is the group's to carry out, None while it waits on."""
        controller, agreement, index = self._controller, self._agreement, self._controller.head
        was_wiped_out = controller.restarts.wipe_out is not None
        if isinstance(entry, Fence) and entry.hits(agreement.member):
            raise Fenced(f"{agreement.member} is fenced by log entry {index} before it took part: {entry.reason}")
        # What was before the restart is past. From the restart on the clock goes on: it is no time without a save.
        is_restart = isinstance(entry, Restart) and agreement.member in entry.members
        now_s = time.monotonic() if is_restart else self._start_over.now_s()
        actions = controller.handle(EntryRead(index=index, entry=entry), now_s=now_s)
        agreement.head = controller.head
        self._note(index, entry, was_wiped_out)
        return self._first(actions)

    def _first(self, actions: Sequence[Action]) -> deque[Action] | Stop | None:
        """What of these actions is the group's to carry out; None while it waits on."""
        for number, action in enumerate(actions):
            match action:
                case StopWipeOut(reason="") if self._may_restart:
                    self._start_over.wiped_out()
                case RefuseCheckpoint() if self._agreement.is_leader:
                    self._start_over.refuse(action)
                case AdmitGroups(members=members) if self._agreement.member in members:
                    return deque(list(actions)[number:])
                case LoadCheckpoint() if self._agreement.member in self._controller.voters:
                    return deque(list(actions)[number:])
                case LoadCheckpoint():
                    self._start_over.left_out()
                case _ if isinstance(action, Stop):
                    return action
        return None

    def _announce(self, is_wiped_out: bool) -> None:
        if is_wiped_out:
            self._probe.between_steps(self._controller.step, FaultPoint.LOAD_SEARCH)
            if self._agreement.is_leader:
                self._search.begin()
            held, slices = self._start_over.held()
            if self._agreement.is_leader:
                self._search.tell(held, slices)
            self._probe(FaultPoint.LOAD_WAIT)
        else:
            self._probe.between_steps(self._controller.step, FaultPoint.JOIN_WAIT)
            self._agreement.announce()
        self._has_announced = is_wiped_out
        self._announced(is_wiped_out)

    def _note(self, index: int, entry: Entry, was_wiped_out: bool) -> None:
        """On the leader, journals what the groups of before may not have lived to: from their last commit on."""
        if isinstance(entry, Commit):
            self._unwritten.clear()
        self._unwritten.append((index, entry))
        if not self._agreement.is_leader or not (was_wiped_out or self._controller.restarts.wipe_out is not None):
            return
        group = self._agreement.member.group
        for number, unwritten in self._unwritten:
            self._journal.write(EntryRecord(group=group, index=number, entry=entry_fields(unwritten)))
        self._unwritten.clear()
