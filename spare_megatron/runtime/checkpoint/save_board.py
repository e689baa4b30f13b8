"""What groups tell each other of one save whose slices several of them write, in the control store.

Keys: `save/{head}/begun` is there when there is a folder to write into, `save/{head}/over` when the save has ended.
`save/{head}/{group}/{incarnation}` holds what a group has written, or why it could not. `head` is the number of log
entries after which the save began, the same in all groups.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.store import ControlStore
from spare_megatron.core.messages import Fence, decode_entry
from spare_megatron.core.slice_saves import Share
from spare_megatron.core.topology import Member
from spare_megatron.runtime.checkpoint.checkpoints import StoredFile

_READ_TIMEOUT_S = 60.0
"""An entry that is written is there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShare(Share):
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
