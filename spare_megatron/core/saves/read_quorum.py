"""Verifies a checkpoint after a wipe-out: the waiting groups divide its files and read them.

A file that is whole for one group is whole. It takes a quorum of two groups to call a file damaged, because one group's
path to the storage may be bad.
"""

from collections.abc import Iterable, Sequence

from spare_megatron.core.log.actions import CheckpointCandidate
from spare_megatron.core.log.events import RestartState
from spare_megatron.stacking.layout import GroupId

_NUM_WITNESSES = 2
"""Groups that must find a file damaged, if there are as many."""


class FileVerification:
    """What all groups have read of one checkpoint. The `readers` (ascending, one or more) divide its files."""

    def __init__(
        self, candidate: CheckpointCandidate, waiting: Iterable[RestartState], readers: Sequence[GroupId]
    ) -> None:
        self._candidate = candidate
        self._readers = readers
        self._readings = {
            item.member.group: reading
            for item in waiting
            for reading in item.readings
            if reading.candidate == candidate
        }
        self._whole = {number for reading in self._readings.values() for number in reading.whole}
        self._damaged: dict[int, set[GroupId]] = {}
        for group, reading in self._readings.items():
            for number in reading.damaged:
                self._damaged.setdefault(number, set()).add(group)

    @property
    def is_whole(self) -> bool:
        return len(self._whole) == self._candidate.num_files

    def damage(self) -> str:
        """What is wrong with the checkpoint; empty while that is not known."""
        damaged = [number for number in self._damaged if number not in self._whole and self._is_certain(number)]
        if not damaged:
            return ""
        witness = min(self._damaged[min(damaged)])
        return self._readings[witness].reason

    def against(self, group: GroupId) -> str:
        """Why the group must not load it: it is damaged, for all or for this group."""
        reason = self.damage()
        if not reason and group in self._readings and self._whole.intersection(self._readings[group].damaged):
            reason = f"{self._readings[group].reason}; another group finds it whole"
        return reason

    def to_read(self, group: GroupId) -> tuple[int, ...]:
        return tuple(
            number
            for number in range(self._candidate.num_files)
            if number not in self._whole and not self._is_certain(number) and self._next_reader(number) == group
        )

    def _is_certain(self, number: int) -> bool:
        return len(self._damaged.get(number, ())) >= min(_NUM_WITNESSES, len(self._readers))

    def _next_reader(self, number: int) -> GroupId | None:
        """The reader of a file: groups take turns, skipping those that have found it damaged."""
        readers, seen = self._readers, self._damaged.get(number, set())
        first = number % len(readers)
        in_turn = (readers[(first + shift) % len(readers)] for shift in range(len(readers)))
        return next((reader for reader in in_turn if reader not in seen), None)
