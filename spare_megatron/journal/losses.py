"""Losses of groups, each once, whoever has told of it: a group may stand on several nodes."""

from dataclasses import replace

from spare_megatron.journal.records import LOST_A_PEER, LossRecord


class Losses:
    """Those told so far."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[float, LossRecord]] = {}  # by group and life

    def take(self, record: LossRecord, at_s: float) -> bool:
        """Takes what one of several nodes tells of a loss; returns whether it is more than is known."""
        life = record.group, record.incarnation
        if life not in self._told:
            self._told[life] = at_s, record
            return True
        found_s, known = self._told[life]
        pending = [*known.pending, *(rank for rank in record.pending if rank not in known.pending)]
        is_given_up = known.is_given_up or record.is_given_up
        culprit = record if known.cause == LOST_A_PEER else known  # the rank at fault may stand on another node
        self._told[life] = min(found_s, at_s), replace(culprit, is_given_up=is_given_up, pending=pending)
        return is_given_up and not known.is_given_up

    @property
    def found(self) -> list[tuple[float, LossRecord]]:
        """All, each with when it was found first."""
        return list(self._told.values())

    def of(self, group: int, incarnation: int) -> LossRecord | None:
        """That of a life, if it is lost."""
        return self._told.get((group, incarnation), (0.0, None))[1]
