"""Judges the losses of the microbatches that one rank has computed, and journals those that are suspect."""

from collections.abc import Sequence

from spare_megatron.core.suspicion import LossWatch, Suspect
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.rank.rank_reports import RankReports


class Suspicions:
    """The watch over one rank's losses. It decides nothing."""

    def __init__(self, trainer: GroupTrainer, reports: RankReports) -> None:
        self._trainer, self._reports = trainer, reports
        self._watch = LossWatch()

    def judge(self, step: int, attempt: int) -> Sequence[Suspect]:
        """The suspects among the microbatches computed since the last call, before the group votes on the attempt.

        Waits for the device on ranks of the last stage.
        """
        suspects = self._watch.on_losses(step, self._trainer.microbatch_losses())
        samples = [self._trainer.corpus.addresses(step, suspect.microbatch.number) for suspect in suspects]
        self._reports.write_suspects(attempt, suspects, samples)
        return suspects
