"""Which checkpoints hold wrong state, or may, by what the log says after they were begun.

State is compared in the step after the save, and once more after the update that follows: what was wrong in the
optimizer's moments shows in the parameters only then, and so does what changed after its digest had been taken, while
it was copied. A checkpoint that two commits have come after is right.

Until then it does not count if somebody who writes of it is put out for wrong state, or has raised an error, of which
wrong state may be the cause; or if groups differ and nobody knows who is wrong. Nor does it if somebody who writes of
it is lost before the first of these commits, in a step in which wrong state is found: nobody can compare its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spare_megatron.core.actions import RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.entries import Commit, Entry, Fence, Halt, Restart, Retry
from spare_megatron.stacking.layout import Member

_COMMITS = 2
"""After a save, by which it is compared."""


@dataclass(slots=True)
class _Save:
    """One that is to be compared yet.

    Attributes:
        action: The save.
        writers: Who writes of it, or may.
        num_commits: That have come after it.
    """

    action: SaveCheckpoint
    writers: frozenset[Member]
    num_commits: int = 0


class CheckpointValidity:
    """Folds the log, from any entry at which no attempt is under way."""

    def __init__(self) -> None:
        self._saves: list[_Save] = []
        self._fences: list[Fence] = []  # since the last commit
        self._wrong = ""  # what was found since then
        self._is_explained = False  # by whoever was put out: why nothing of the attempt may stay

    def begun(self, action: SaveCheckpoint) -> None:
        """This is to be compared."""
        writers = frozenset((action.member,)).union(*action.hosts)
        self._saves.append(_Save(action=action, writers=writers))

    @property
    def unsettled(self) -> frozenset[int]:
        """Committed steps of what is left to be compared."""
        return frozenset(save.action.step for save in self._saves)

    def fold(self, entry: Entry) -> tuple[RefuseCheckpoint, ...]:
        """What does not count for this entry. Each is said once."""
        match entry:
            case Fence():
                self._fences.append(entry)
                if entry.discard:
                    self._is_explained = True
                    self._wrong = self._wrong or _wrong_with(entry)
                return self._refuse((save, self._doubt_by_loss(save)) for save in self._saves)
            case Retry(recompute=recompute):
                is_explained, self._is_explained = self._is_explained, False
                if recompute and not is_explained:
                    # All hosts of each slice agree: what they agreed on before, and have updated since, was right.
                    reason = "groups hold different parameters, and nobody knows who is right"
                    return self._refuse((save, reason) for save in self._saves if not save.num_commits)
            case Halt(discard=True, reason=reason):
                return self._refuse((save, reason) for save in self._saves)
            case Commit():
                self._committed()
            case Restart():
                # What was saved later is undone, and what was saved earlier all have loaded.
                self._saves.clear()
                self._forget()
        return ()

    def _doubt_by_loss(self, save: _Save) -> str:
        """Empty where there is none."""
        lost = [fence for fence in self._fences if any(map(fence.hits, save.writers))]
        if lost and self._wrong and not save.num_commits:
            return self._wrong
        return next(filter(None, map(_wrong_with, lost)), "")

    def _refuse(self, doubts: Iterable[tuple[_Save, str]]) -> tuple[RefuseCheckpoint, ...]:
        refused = {save.action.step: (save.action, reason) for save, reason in doubts if reason}
        self._saves = [save for save in self._saves if save.action.step not in refused]
        return tuple(
            RefuseCheckpoint(step=action.step, member=action.member, epoch=action.epoch, reason=reason)
            for action, reason in refused.values()
        )

    def _committed(self) -> None:
        for save in self._saves:
            save.num_commits += 1
            # A later life of the group is another writer's.
            save.writers -= {writer for writer in save.writers if any(fence.hits(writer) for fence in self._fences)}
        self._saves = [save for save in self._saves if save.num_commits < _COMMITS]
        self._forget()

    def _forget(self) -> None:
        self._fences.clear()
        self._wrong, self._is_explained = "", False


def _wrong_with(fence: Fence) -> str:
    """What is known, or may be, to be wrong with the state of whoever is lost; empty if nothing."""
    found = fence.reason if fence.discard else fence.error
    return f"group {fence.group}: {found}" if found else ""


def why_refused(action: SaveCheckpoint, entries: Iterator[Entry]) -> str:
    """Why the checkpoint does not count, by the entries since it was begun; empty if it does as far as they go."""
    doubts = CheckpointValidity()
    doubts.begun(action)
    for entry in entries:
        for refusal in doubts.fold(entry):
            return refusal.reason
        if not doubts.unsettled:
            break
    return ""
