"""What a rank keeps of its state beside training: checkpoints and snapshots, and what is told of them."""

from collections.abc import Callable
from dataclasses import asdict

from spare_megatron.core.saves import RefuseCheckpoint, SaveCheckpoint, SaveEnd
from spare_megatron.core.snapshots import TakeSnapshot
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import CadenceRecord
from spare_megatron.runtime.process.reports import CheckpointTold
from spare_megatron.runtime.snapshot.snapshots import Snapshotter
from spare_megatron.runtime.state.saver import Saver
from spare_megatron.runtime.vote.agreement import GroupAgreement


class GroupSaves:
    """One rank's part in them.

    Args:
        saver: Saves checkpoints; None where none are taken.
        snapshotter: Takes snapshots; None where none are taken.
        agreement: The group's voice.
        journal: The rank's journal.
        report: Tells the supervisor of a save that has ended.
        ended: Tells the others of it, with the next vote.
    """

    def __init__(
        self,
        *,
        saver: Saver | None,
        snapshotter: Snapshotter | None,
        agreement: GroupAgreement,
        journal: JournalWriter,
        report: Callable[[CheckpointTold], None],
        ended: Callable[[SaveEnd], None],
    ) -> None:
        self._saver = saver
        self._snapshotter = snapshotter
        self._agreement = agreement
        self._journal = journal
        self._report = report
        self._ended = ended

    def save(self, action: SaveCheckpoint, head: int, *, has_params: bool) -> None:
        """Begins a checkpoint of the present state, where this group has a part in it.

        Collective over: all ranks of the group.

        Args:
            action: The controller's.
            head: Entries of the log folded so far.
            has_params: Whether the group has all parameters of this step.
        """
        assert self._saver is not None, "only a run that takes checkpoints asks for one"
        member = self._agreement.member
        if action.cadence is not None and action.member == member and self._agreement.is_leader:
            self._journal.write(CadenceRecord(group=member.group, step=action.step, **asdict(action.cadence)))
        self._saver.save(action, head, has_params=has_params)

    def go_on(self, step: int) -> None:
        """The group has all parameters after so many steps, which it lacked."""
        if self._saver is not None:
            self._saver.go_on(step)
        if self._snapshotter is not None:
            self._snapshotter.go_on()

    def refuse(self, action: RefuseCheckpoint) -> None:
        """Has a checkpoint marked that holds wrong state."""
        assert self._saver is not None, "only a run that takes checkpoints refuses one"
        self._saver.refuse(action)

    def take_snapshot(self, action: TakeSnapshot, *, has_params: bool) -> None:
        """Begins a snapshot of the present state, where this rank is to keep it.

        Args:
            action: The controller's.
            has_params: Whether the group has all parameters of this step.
        """
        assert self._snapshotter is not None, "only a run that takes snapshots asks for one"
        self._snapshotter.take(action, has_params=has_params)

    def await_copies(self, step: int) -> None:
        """Returns when the update may be done that makes so many committed steps."""
        if self._saver is not None:
            self._saver.await_copy()
        if self._snapshotter is not None:
            self._snapshotter.await_copy(step)

    def finish(self) -> None:
        """Returns when nothing is written or copied any more, or has been for longer than it may take."""
        if self._snapshotter is not None:
            self._snapshotter.finish()
        if self._saver is not None:
            self._saver.finish()

    def tell(self) -> None:
        """Writes down what has ended since this was done last."""
        for snapshot in self._snapshotter.take_finished() if self._snapshotter is not None else ():
            self._journal.write(snapshot)  # each holder, for its rank may be one that no other group keeps
        for record in self._saver.take_finished() if self._saver is not None else ():
            if self._agreement.is_leader:
                self._journal.write(record)
                self._report(CheckpointTold(record=record))
            self._ended(SaveEnd(record.step, record.outcome == "saved", record.stall_s))
