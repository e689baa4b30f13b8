"""A rank's part in audits: computes disputed microbatches, and agrees on the digests that its group votes with."""

from collections.abc import Sequence

from spare_megatron.core.actions import ComputeAudits
from spare_megatron.core.audits import AuditWord, word_of
from spare_megatron.journal.records import AuditRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.rank.rank_progress import RankProgress
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.stacking.layout import Member
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.voting.agreement import GroupAgreement


class GroupAudits:
    """Carries out ComputeAudits, and makes the audit words of votes from the digests that the trainer has taken."""

    def __init__(
        self, *, trainer: GroupTrainer, agreement: GroupAgreement, reports: RankReports, progress: RankProgress
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._reports = reports
        self._progress = progress
        self._computed_for = -1  # attempt

    @property
    def _member(self) -> Member:
        return self._agreement.member

    def compute(self, action: ComputeAudits) -> None:
        """Collective over: all ranks of the group."""
        asked = action.asked_of(self._member.group)
        if self._progress.lacks_params or not asked or self._computed_for == action.attempt:
            return
        self._computed_for = action.attempt
        self._trainer.audit(asked)
        now = self._progress.now
        now.audited = [*now.audited, *(one for one in asked if one not in now.audited)]

    def words(self, attempt: int, disputed: Sequence[Microbatch]) -> tuple[AuditWord, ...]:
        """The group's digests of audited microbatches; those of disputed ones show what they are made of.

        Waits for the device. Collective over: all ranks of the group.
        """
        now = self._progress.now
        if not now.has_audits and not now.audited:
            return ()
        mine = [self._trainer.passes.boundaries(one) for one in now.audited]
        of_ranks = self._agreement.gathered(mine)
        words = []
        for number, microbatch in enumerate(now.audited):
            boundaries = tuple(sorted(one for of_rank in of_ranks for one in of_rank[number]))
            shown = boundaries if microbatch in disputed else ()
            words.append(AuditWord(*microbatch, word_of(boundaries), shown))
        record = AuditRecord(
            group=self._member.group,
            step=now.step,
            attempt=attempt,
            digests=[[int(word.shard), word.index, f"{word.digest:016x}"] for word in words],
            num_added=self._trainer.passes.num_added,
            incarnation=self._member.incarnation,
            boundaries=[
                [int(word.shard), word.index, one.kind, one.stage, one.rank, f"{one.digest:016x}"]
                for word in words
                for one in word.boundaries
            ],
        )
        self._reports.write_if_leader(record)
        return tuple(words)
