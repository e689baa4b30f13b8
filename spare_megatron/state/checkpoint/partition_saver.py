"""A save to which several groups contribute optimizer state partitions, coordinated in the control store.

Keys lie under `save/{head}/`, `head` being the number of log entries folded when the save began: `begun` (there is a
folder), `over` (the save has ended), `{group}/{incarnation}` (what the group has written, or why it could not).
"""

import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.core.log.entries import Fence, decode_entry
from spare_megatron.core.saves.partition_saves import Abandon, Publish, WritePartitions, next_move
from spare_megatron.mcore.group_checkpoint import METADATA_FNAME
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.state.checkpoint.checkpoint_folder import StoredFile, sync_folder
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog, poll_interval_s
from spare_megatron.store.interface import ControlStore, read_values, write_value

T = TypeVar("T")

_TURN_SHARE = 0.25
"""The other ranks of a group wait for their leader, which polls the store. It reports to them after this share of their
time limit, even without news."""
_READ_TIMEOUT_S = 60.0
"""An entry that is known to be written arrives at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShare:
    """State partitions that a group has written: `files` by name, in `folder` inside that of the checkpoint."""

    member: Member
    partitions: tuple[PartitionId, ...]
    folder: str
    files: Mapping[str, StoredFile]


class _Report(NamedTuple):
    shares: tuple[WrittenShare, ...]
    failure: str


class SaveFailed(Exception):
    """The save cannot be completed; the text says why."""


class SaveBoard:
    """One view of a save in the control store, for one thread; `voters` are all groups that took part when it began."""

    def __init__(self, store: ControlStore, head: int, voters: Sequence[Member]) -> None:
        self._store = store
        self._log = DecisionLog(store)
        self._head = head
        self._next = head
        self._voters = voters
        self._fenced: set[Member] = set()

    def report(self, member: Member, shares: Sequence[WrittenShare], failure: str = "") -> None:
        """Publishes all that a group has written so far, or why it cannot write."""
        write_value(self._store, keys.save_shares(self._head, member), _Report(tuple(shares), failure))

    def read_shares(self) -> list[WrittenShare]:
        """What all groups have written so far. Raises `SaveFailed` if one of them cannot write."""
        reports = read_values(self._store, [keys.save_shares(self._head, voter) for voter in self._voters], _Report)
        shares: list[WrittenShare] = []
        for member, report in zip(self._voters, reports, strict=True):
            if report is None:
                continue
            if report.failure:
                raise SaveFailed(f"group {member.group}: {report.failure}")
            shares += report.shares
        return shares

    def read_fenced(self) -> frozenset[Member]:
        """The groups that were fenced since the save began."""
        while self._log.has(self._next):
            entry = decode_entry(self._log.wait(self._next, _READ_TIMEOUT_S))
            if isinstance(entry, Fence):
                self._fenced.update(voter for voter in self._voters if entry.hits(voter))
            self._next += 1
        return frozenset(self._fenced)

    def announce_folder(self) -> None:
        """Announces that there is a folder to write into."""
        self._store.put(keys.save_begun(self._head), "")

    def has_folder(self) -> bool:
        return self._store.exists(keys.save_begun(self._head))

    def announce_end(self) -> None:
        """Announces that the save has ended, well or not: no group waits for it any more."""
        self._store.put(keys.save_over(self._head), "")

    def has_ended(self) -> bool:
        return self._store.exists(keys.save_over(self._head))

    def remove_report(self, member: Member) -> None:
        """Removes a group's key once no other group reads it."""
        self._store.delete([keys.save_shares(self._head, member)])


class Agree(Protocol):
    """Runs `work` on every rank of the group; returns all results, or raises on all ranks."""

    def __call__(self, work: Callable[[], T]) -> Sequence[T]: ...


@dataclass(frozen=True, slots=True)
class _SaveEnded:
    """The group that saves has ended the save."""


@dataclass(kw_only=True)
class PartitionSaver:
    """One group's part in one save; `board` is None except on the leader. `aside` is the checkpoint's temporary folder;
    `write` writes what is asked for into a folder and returns files by name.
    """

    action: SaveCheckpoint
    member: Member
    board: SaveBoard | None
    aside: Path
    agree: Agree
    write: Callable[[Path, WritePartitions], dict[str, StoredFile]]
    timeout_s: float
    shares: list[WrittenShare] = field(default_factory=list)
    """What all groups have written, once that is everything; on the leader of the group that publishes."""
    _mine: list[WrittenShare] = field(default_factory=list)
    _end_s: float = 0.0

    def run(self) -> bool:
        """Writes the group's partitions and waits; True if this group is to publish the checkpoint. Collective over:
        all ranks of the group. Raises `SaveFailed` if the save or a rank here fails.
        """
        self._end_s = time.monotonic() + self.timeout_s
        while True:
            match self.agree(self._next_move)[0]:
                case WritePartitions() as move:
                    self._write_share(move)
                case Publish():
                    return True
                case Abandon(reason=reason):
                    raise SaveFailed(reason)
                case _SaveEnded():
                    return False

    def _next_move(self) -> WritePartitions | Publish | Abandon | _SaveEnded | None:
        """On the leader, the next move, None after a while without one; None on all other ranks."""
        if self.board is None:
            return None
        turn_s = time.monotonic() + self.timeout_s * _TURN_SHARE
        pause_s = poll_interval_s(len(self.action.voters))
        while time.monotonic() < turn_s:
            if self.board.has_ended():
                return _SaveEnded()
            lost = self.board.read_fenced()
            # Only the group that saves, or one that may replace a lost writer, needs to know what others have written.
            needs_all = self.member == self.action.member or lost
            self.shares = self.board.read_shares() if needs_all else self._mine
            written = {number for share in self.shares for number in share.partitions}
            move = next_move(self.action, self.member, written, lost)
            has_place = not isinstance(move, WritePartitions) or self.board.has_folder()
            if move is not None and has_place:
                return move
            if time.monotonic() > self._end_s:
                return Abandon(reason=f"it has taken longer than checkpoint.timeout_s={self.timeout_s:g}")
            time.sleep(pause_s)
        return None

    def _write_share(self, move: WritePartitions) -> None:
        name = f"slices-{self.member.group:04d}-{self.member.incarnation}-{len(self._mine)}"
        folder = self.aside / name
        self.agree(lambda: folder.mkdir() if self.board is not None else None)
        files = dict(ChainMap(*self.agree(lambda: self.write(folder, move))))
        del files[METADATA_FNAME]  # the group that saves writes one for the whole checkpoint
        self._mine.append(WrittenShare(member=self.member, partitions=move.partitions, folder=name, files=files))
        self.agree(lambda: self._report(folder))

    def _report(self, folder: Path) -> None:
        if self.board is not None:
            sync_folder(folder)
            self.board.report(self.member, self._mine)
