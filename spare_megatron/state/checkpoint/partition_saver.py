"""What groups tell each other of one save whose slices several of them write, in the control store.

Keys: `save/{head}/begun` is there when there is a folder to write into, `save/{head}/over` when the save has ended.
`save/{head}/{group}/{incarnation}` holds what a group has written, or why it could not. `head` is the number of log
entries after which the save began, the same in all groups.
"""

import json
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from spare_megatron.core.actions import SaveCheckpoint
from spare_megatron.core.entries import Fence, decode_entry
from spare_megatron.core.partition_saves import Abandon, Publish, WriteShare, WriteSlices, next_move
from spare_megatron.mcore.checkpoint import METADATA_FNAME
from spare_megatron.stacking.layout import Member, SliceId
from spare_megatron.state.checkpoint.checkpoint_folder import StoredFile, sync_folder
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore

_READ_TIMEOUT_S = 60.0
"""An entry that is written is there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShare(WriteShare):
    """Slices that a group has written, and where.

    Attributes:
        folder: Name of the folder inside that of the checkpoint.
        files: What is in it, by name.
    """

    folder: str
    files: Mapping[str, StoredFile]


class SaveFailed(Exception):
    """The save cannot be completed; the text says why."""


class SaveBoard:
    """One group's view of one save.

    Args:
        store: A connection that the calling thread has for itself.
        head: Entries of the log that had been folded when the save began.
        voters: All groups that took part then.
    """

    def __init__(self, store: ControlStore, head: int, voters: Sequence[Member]) -> None:
        self._store = store
        self._log = DecisionLog(store)
        self._head = head
        self._next = head
        self._voters = voters
        self._lost: set[Member] = set()

    def tell(self, member: Member, shares: Sequence[WrittenShare], failure: str = "") -> None:
        """Says all that a group has written so far, or why it cannot write."""
        self._store.put(self._key(member), json.dumps({"shares": list(map(_row, shares)), "failure": failure}))

    def told(self) -> list[WrittenShare]:
        """What all groups have written so far.

        Raises:
            SaveFailed: One of them cannot write.
        """
        texts = self._store.get([self._key(voter) for voter in self._voters])
        shares = []
        for member, text in zip(self._voters, texts, strict=True):
            if text is None:
                continue
            told = json.loads(text)
            if told["failure"]:
                raise SaveFailed(f"group {member.group}: {told['failure']}")
            shares += [_share(member, row) for row in told["shares"]]
        return shares

    def lost(self) -> frozenset[Member]:
        """The groups that the log has lost since the save began."""
        while self._log.has(self._next):
            entry = decode_entry(self._log.wait(self._next, _READ_TIMEOUT_S))
            if isinstance(entry, Fence):
                self._lost.update(voter for voter in self._voters if entry.hits(voter))
            self._next += 1
        return frozenset(self._lost)

    def begin(self) -> None:
        """Says that there is a folder to write into."""
        self._store.put(self._begun, "")

    def has_begun(self) -> bool:
        return self._store.exists(self._begun)

    def end(self) -> None:
        """Says that the save has ended, well or not: nobody has to wait for it any more."""
        self._store.put(self._over, "")

    def has_ended(self) -> bool:
        return self._store.exists(self._over)

    def forget(self, member: Member) -> None:
        """Removes what a group has told, when nobody will ask for it any more."""
        self._store.delete([self._key(member)])

    @property
    def _begun(self) -> str:
        return f"save/{self._head}/begun"

    @property
    def _over(self) -> str:
        return f"save/{self._head}/over"

    def _key(self, member: Member) -> str:
        return f"save/{self._head}/{member.group}/{member.incarnation}"


def _row(share: WrittenShare) -> dict[str, Any]:
    files = {name: asdict(file) for name, file in share.files.items()}
    return {"slices": share.slices, "folder": share.folder, "files": files}


def _share(member: Member, row: Mapping[str, Any]) -> WrittenShare:
    files = {name: StoredFile(**fields) for name, fields in row["files"].items()}
    return WrittenShare(member=member, slices=tuple(row["slices"]), folder=row["folder"], files=files)


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
