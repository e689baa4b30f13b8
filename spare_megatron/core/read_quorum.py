"""Whether a checkpoint is what was written: told by all groups that wait together, each of which reads some files.

At a glance everybody sees that files are missing or have other sizes. A changed bit shows only to whoever reads the
file from its first to its last byte, which takes minutes where checkpoints are large. So the files are divided among
the groups, which say what they have found. A file that is whole for one group is whole. One that is damaged for one is
read by another, too: it may be the way of the first one to the storage that is bad. What two find damaged is damaged.
"""

from collections.abc import Iterable, Sequence

from spare_megatron.core.actions import CheckpointCandidate
from spare_megatron.core.events import RestartState
from spare_megatron.stacking.layout import GroupId

_NUM_WITNESSES = 2
"""Groups that have to find a file damaged, if there are as many."""


class FileVerification:
    """What has been read of one checkpoint.

    Args:
        offer: The checkpoint.
        waiting: What all groups say, each once.
        readers: Among whom its files are divided, ascending, at least one.
    """

    def __init__(self, offer: CheckpointCandidate, waiting: Iterable[RestartState], readers: Sequence[GroupId]) -> None:
        self._offer = offer
        self._readers = readers
        self._told = {
            item.member.group: reading for item in waiting for reading in item.readings if reading.offer == offer
        }
        self._whole = {number for reading in self._told.values() for number in reading.whole}
        self._damaged: dict[int, set[GroupId]] = {}
        for group, reading in self._told.items():
            for number in reading.damaged:
                self._damaged.setdefault(number, set()).add(group)

    @property
    def is_whole(self) -> bool:
        """Whether every file is."""
        return len(self._whole) == self._offer.num_files

    def damage(self) -> str:
        """What is wrong with it; empty while that is not known."""
        damaged = [number for number in self._damaged if number not in self._whole and self._is_certain(number)]
        if not damaged:
            return ""
        witness = min(self._damaged[min(damaged)])
        return self._told[witness].reason

    def against(self, group: GroupId) -> str:
        """Why the group must not load it: it is damaged, or another finds whole what this group does not."""
        reason = self.damage()
        if not reason and group in self._told and self._whole.intersection(self._told[group].damaged):
            reason = f"{self._told[group].reason}; another group finds it whole"
        return reason

    def to_read(self, group: GroupId) -> tuple[int, ...]:
        """The files that the group has to read now, if any."""
        return tuple(
            number
            for number in range(self._offer.num_files)
            if number not in self._whole and not self._is_certain(number) and self._next_reader(number) == group
        )

    def _is_certain(self, number: int) -> bool:
        return len(self._damaged.get(number, ())) >= min(_NUM_WITNESSES, len(self._readers))

    def _next_reader(self, number: int) -> GroupId | None:
        """The groups in turn; after one that finds it damaged the next."""
        readers, seen = self._readers, self._damaged.get(number, set())
        first = number % len(readers)
        in_turn = (readers[(first + shift) % len(readers)] for shift in range(len(readers)))
        return next((reader for reader in in_turn if reader not in seen), None)
