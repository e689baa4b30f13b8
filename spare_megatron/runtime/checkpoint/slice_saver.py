"""One rank's part in a save whose slices several groups write; in the writing thread.

Its leader learns from the control store and the log what the group is to do next (`core.slice_saves`), and its ranks do
it together. Hosts keep their copies until the save has ended, for they may have to write for another that is lost.
"""

import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from spare_megatron.core.saves import SaveCheckpoint
from spare_megatron.core.slice_saves import Abandon, Publish, WriteSlices, next_move
from spare_megatron.core.topology import Member, SliceId
from spare_megatron.mcore.checkpoint import METADATA_FNAME
from spare_megatron.runtime.checkpoint.checkpoints import StoredFile, sync_folder
from spare_megatron.runtime.checkpoint.save_board import SaveBoard, SaveFailed, WrittenShare

T = TypeVar("T")

_POLL_S = 0.05
_POLL_S_PER_GROUP = 0.001
"""All groups ask the store for what all groups say."""
_TURN_SHARE = 0.25
"""Of the longest save passes until ranks that wait for their leader hear that it is still there."""


class Agree(Protocol):
    """What the work gave on every rank of the group; where it failed on one, all raise."""

    def __call__(self, work: Callable[[], T]) -> Sequence[T]: ...


@dataclass(frozen=True, slots=True)
class _Over:
    """Somebody has ended the save."""


class SliceSaver:
    """One save.

    Args:
        action: The controller's.
        member: The group.
        board: What groups tell each other; None but on the leader.
        aside: Where the checkpoint is written.
        agree: The group's agreement.
        write: Writes slices into a folder that exists; returns this rank's files by name.
        timeout_s: How long it may take.
    """

    def __init__(
        self,
        *,
        action: SaveCheckpoint,
        member: Member,
        board: SaveBoard | None,
        aside: Path,
        agree: Agree,
        write: Callable[[Path, Sequence[SliceId]], dict[str, StoredFile]],
        timeout_s: float,
    ) -> None:
        self._action = action
        self._member = member
        self._board = board
        self._aside = aside
        self._agree = agree
        self._write = write
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._mine: list[WrittenShare] = []
        self.shares: list[WrittenShare] = []
        """On the leader of the group that saves, what all have written, when everything is there."""

    def run(self) -> bool:
        """Writes what the group is to write until there is no more to do.

        Collective over: all ranks of the group.

        Returns:
            Whether the group is to make the checkpoint visible: everything is there.

        Raises:
            SaveFailed: It cannot be completed, or somebody in this group could not write.
        """
        while True:
            match self._agree(self._next)[0]:
                case WriteSlices(slices=slices):
                    self._write_share(slices)
                case Publish():
                    return True
                case Abandon(reason=reason):
                    raise SaveFailed(reason)
                case _Over():
                    return False

    def _next(self) -> WriteSlices | Publish | Abandon | _Over | None:
        """On the leader, what comes next; None after a while in which nothing does, and on all others."""
        if self._board is None:
            return None
        turn_s = time.monotonic() + self._timeout_s * _TURN_SHARE
        pause_s = max(_POLL_S, _POLL_S_PER_GROUP * len(self._action.voters))
        while time.monotonic() < turn_s:
            if self._board.has_ended():
                return _Over()
            lost = self._board.lost()
            # Only who saves, or may have to write for another, has to know what others have written.
            is_asked = self._member == self._action.member or lost
            self.shares = self._board.told() if is_asked else self._mine
            move = next_move(self._action, self._member, self.shares, lost)
            has_place = not isinstance(move, WriteSlices) or self._board.has_begun()
            if move is not None and has_place:
                return move
            if time.monotonic() > self._end_s:
                return Abandon(reason=f"it has taken longer than checkpoint.timeout_s={self._timeout_s:g}")
            time.sleep(pause_s)
        return None

    def _write_share(self, slices: tuple[SliceId, ...]) -> None:
        name = f"slices-{self._member.group:04d}-{self._member.incarnation}-{len(self._mine)}"
        folder = self._aside / name
        self._agree(lambda: folder.mkdir() if self._board is not None else None)
        files = dict(ChainMap(*self._agree(lambda: self._write(folder, slices))))
        del files[METADATA_FNAME]  # what the group that saves puts together goes in its place
        self._mine.append(WrittenShare(member=self._member, slices=slices, folder=name, files=files))
        self._agree(lambda: self._tell(folder))

    def _tell(self, folder: Path) -> None:
        """On the leader, tells what the group has written when it is on the disk."""
        if self._board is not None:
            sync_folder(folder)
            self._board.tell(self._member, self._mine)
