"""Mutations of undos: bugs planted where steps that a group has spoiled are computed again."""

from dataclasses import replace

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import Action, AppendEntry, RefuseCheckpoint
from spare_megatron.core.log.entries import Commit, Entry, Undo
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.membership import Change
from spare_megatron.core.saves.checkpoint_validity import CheckpointValidity
from spare_megatron.core.saves.snapshot_policy import WholeSnapshot
from tests.protocol.mutations import Protocol


class UndoesTwice(Controller):
    """Writes the entry again two steps later."""

    _last: Undo | None = None

    def _undo(self, undo: Undo, change: Change) -> tuple[Action, ...]:
        self._last = undo
        return super()._undo(undo, change)

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        actions, last = super()._decide(event, now_s), self._last
        match actions:
            case (AppendEntry(entry=Commit()),) if last is not None and self.step > last.step:
                return (replace(actions[0], entry=replace(last, attempt=self.attempt)),)
        return actions


class _IgnoresUndos(CheckpointValidity):
    def fold(self, entry: Entry) -> tuple[RefuseCheckpoint, ...]:
        refused = super().fold(entry)
        return () if isinstance(entry, Undo) else refused


class KeepsUndoneSaves(Controller):
    """Leaves checkpoints as they are when steps are undone."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self._validity = _IgnoresUndos()


class UndoesWithoutNewcomers(Controller):
    """Does not wait for the votes of those who may still copy state."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        if self._is_undoing and event.votes:
            some = next(iter(event.votes.values()))
            event = replace(event, votes={group: event.votes.get(group, some) for group in self.members})
        return super()._decide(event, now_s)


class GoesBackToTheNewest(Controller):
    """Takes the newest snapshot of all, audited or not."""

    @property
    def _undoable(self) -> tuple[WholeSnapshot, ...]:
        return self.restarts.snapshots.clean(self.step - 1) if super()._undoable else ()


class GoesOn(Controller):
    """Computes only the step under way again."""

    @property
    def _undoable(self) -> tuple[WholeSnapshot, ...]:
        return ()


MUTATIONS_OF_UNDOS = {
    "undoes twice": Protocol(controller_type=UndoesTwice),
    "undoes past a save": Protocol(controller_type=KeepsUndoneSaves),
    "undoes while a newcomer copies": Protocol(controller_type=UndoesWithoutNewcomers),
    "goes back to a state that is not audited": Protocol(controller_type=GoesBackToTheNewest),
    "goes on without going back": Protocol(controller_type=GoesOn),
}
