"""Which checkpoints hold wrong state, or may, judged by the log entries after their save began.

State is compared in the step after the save, and again after the next update, which brings errors in optimizer moments
into the parameters: a checkpoint followed by two commits is right. Until then it is refused if a writer is fenced for
wrong state or raised an error, if groups differ and it is unknown which is wrong, or if a writer is lost before the
first of these two commits and wrong state is found in the same step. An undo refuses all checkpoints of the steps that
it makes void, compared or not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Restart, Retry, Undo
from spare_megatron.stacking.layout import Member

_COMMITS = 2
"""Commits after a save by which it is compared."""


@dataclass(slots=True)
class _Save:
    """A save that is still to be compared, its possible writers, and the commits since."""

    action: SaveCheckpoint
    writers: frozenset[Member]
    num_commits: int = 0


class CheckpointValidity:
    """Folds the log, from any entry at which no attempt is under way."""

    def __init__(self) -> None:
        self._saves: list[_Save] = []
        self._compared: list[SaveCheckpoint] = []
        self._fences: list[Fence] = []  # since the last commit
        self._wrong = ""  # wrong state found since then
        self._is_explained = False  # a fence explains why the attempt is discarded

    def on_save(self, action: SaveCheckpoint) -> None:
        writers = frozenset((action.member,)).union(*action.hosts)
        self._saves.append(_Save(action=action, writers=writers))

    @property
    def unsettled(self) -> frozenset[int]:
        """Steps of the saves that are still to be compared."""
        return frozenset(save.action.step for save in self._saves)

    @property
    def writers(self) -> frozenset[Member]:
        """Groups that must stay until what they have written is compared."""
        return frozenset().union(*(save.writers for save in self._saves))

    def fold(self, entry: Entry) -> tuple[RefuseCheckpoint, ...]:
        """Checkpoints that this entry invalidates; each is returned once."""
        match entry:
            case Fence():
                self._fences.append(entry)
                if entry.discard:
                    self._is_explained = True
                    self._wrong = self._wrong or _wrong_with(entry)
                return self._refuse((save, self._doubt_by_loss(save)) for save in self._saves)
            case Retry(recompute=recompute, gather=gather, wrong_sums=wrong, disputes=disputes):
                # A wrong sum, or a disputed microbatch, says nothing against the parameters.
                is_explained, self._is_explained = self._is_explained or bool(wrong), bool(disputes)
                if recompute and gather and not is_explained:  # else no snapshot was there to go back to
                    # All hosts of each partition agree, so saves that were compared before and updated since are right.
                    reason = "groups hold different parameters, and it is unknown which are right"
                    return self._refuse((save, reason) for save in self._saves if not save.num_commits)
            case Halt(discard=True, reason=reason):
                return self._refuse((save, reason) for save in self._saves)
            case Commit():
                self._committed()
            case Restart():
                # Later saves are undone, and all groups have loaded what earlier ones hold.
                self._go_back(entry.step)
            case Undo():
                reason = f"steps after the first {entry.step} hold wrong numbers of a group, and are undone"
                actions = [*self._compared, *(save.action for save in self._saves)]
                void = [(_Save(action, frozenset()), reason) for action in actions if action.step > entry.step]
                refused = self._refuse(void)
                # All groups have voted in the second step after earlier ones: those are compared.
                self._go_back(entry.step)
                return refused
        return ()

    def _doubt_by_loss(self, save: _Save) -> str:
        """Why losses invalidate the save; empty if they do not."""
        lost = [fence for fence in self._fences if any(map(fence.hits, save.writers))]
        if lost and self._wrong and not save.num_commits:
            return self._wrong
        own = [fence for fence in lost if any(self._is_end_of(writer, fence) for writer in save.writers)]
        return next(filter(None, map(_wrong_with, own)), "")

    def _is_end_of(self, writer: Member, fence: Fence) -> bool:
        """Whether it fences the writer, and not a later incarnation that came back after an earlier fence."""
        earlier = self._fences[: self._fences.index(fence)]
        is_later = fence.incarnation > writer.incarnation and any(other.hits(writer) for other in earlier)
        return fence.hits(writer) and not is_later

    def _refuse(self, reasons: Iterable[tuple[_Save, str]]) -> tuple[RefuseCheckpoint, ...]:
        refused = {save.action.step: (save.action, reason) for save, reason in reasons if reason}
        self._saves = [save for save in self._saves if save.action.step not in refused]
        return tuple(
            RefuseCheckpoint(step=action.step, member=action.member, epoch=action.epoch, reason=reason)
            for action, reason in refused.values()
        )

    def _go_back(self, step: int) -> None:
        actions = (*self._compared, *(save.action for save in self._saves))
        self._compared = [action for action in actions if action.step <= step]
        self._saves.clear()
        self._forget()

    def _committed(self) -> None:
        for save in self._saves:
            save.num_commits += 1
            # A later incarnation of a fenced writer is another writer.
            save.writers -= {writer for writer in save.writers if any(fence.hits(writer) for fence in self._fences)}
        self._compared += [save.action for save in self._saves if save.num_commits >= _COMMITS]
        self._saves = [save for save in self._saves if save.num_commits < _COMMITS]
        self._forget()

    def _forget(self) -> None:
        self._fences.clear()
        self._wrong, self._is_explained = "", False


def _wrong_with(fence: Fence) -> str:
    """What is, or may be, wrong with the lost group's state; empty if nothing is."""
    found = fence.reason if fence.discard else fence.error
    return f"group {fence.group}: {found}" if found else ""


def why_refused(action: SaveCheckpoint, entries: Iterator[Entry]) -> str:
    """Why the checkpoint does not count, by the entries since its save began; empty if it does as far as they go."""
    validity = CheckpointValidity()
    validity.on_save(action)
    for entry in entries:
        for refusal in validity.fold(entry):
            return refusal.reason
    return ""
