"""Judges the losses of the microbatches that one rank has computed, and journals those that are suspect."""

from spare_megatron.core.audits.suspicion import LossWatch
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.state.rank_progress import RankProgress


class Suspicions:
    """The watch over one rank's losses. It decides nothing. `has_audits`: votes name the suspects, to be audited."""

    def __init__(
        self, trainer: GroupTrainer, reports: RankReports, progress: RankProgress, *, has_audits: bool
    ) -> None:
        self._trainer, self._reports, self._progress = trainer, reports, progress
        self._has_audits = has_audits
        self._watch = LossWatch()

    def judge(self, step: int, attempt: int) -> None:
        """Notes the suspects among the microbatches computed since the last call, before the group votes.

        Waits for the device on ranks of the last stage.
        """
        losses = self._trainer.microbatch_losses()
        suspects = self._watch.on_losses(step, losses)
        samples = [self._trainer.corpus.addresses(step, suspect.microbatch.number) for suspect in suspects]
        self._reports.write_suspects(attempt, suspects, samples)
        if not self._has_audits:
            return
        now = self._progress.now
        now.losses.update(losses)
        now.suspects.update(suspect.microbatch.unit for suspect in suspects)
