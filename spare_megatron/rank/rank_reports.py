"""Where a rank puts what it has done: its journal, reports to its supervisor, and the times of recoveries."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spare_megatron.core.audits.suspects import Suspect
from spare_megatron.core.log.actions import ChangePaces, ReportEvaluation
from spare_megatron.core.log.loss_sums import losses_of, mean_loss
from spare_megatron.journal.records import PacesRecord, RecoveryRecord, SuspicionRecord, UpdateRecord
from spare_megatron.journal.spans import RecoveryStage
from spare_megatron.journal.step_values import MEMORY
from spare_megatron.mcore.trainer import UpdateResult
from spare_megatron.process.reports import EvaluationDecided, RunPaused, StepCommitted
from spare_megatron.rank.recovery_clock import RecoveryClock
from spare_megatron.stacking.layout import ShardId
from spare_megatron.state.rank_context import RankContext


class RankReports:
    """What one rank journals and reports of its steps; `clock` times recoveries."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._sends_steps = ctx.config.parallel.is_first_on_node(ctx.spec.group, ctx.spec.rank)
        self.clock = RecoveryClock(ctx.member.group, self._record_stage)

    def write_suspects(self, attempt: int, suspects: Sequence[Suspect], samples: Sequence[list[str]]) -> None:
        """Journals suspect microbatches of the step under way, with the addresses of their samples."""
        for suspect, of_suspect in zip(suspects, samples, strict=True):
            unit, number = suspect.microbatch
            record = SuspicionRecord(
                group=self._ctx.member.group,
                rank=self._ctx.spec.rank,
                step=self._ctx.progress.now.step,
                attempt=attempt,
                shard=unit.shard,
                index=unit.index,
                number=number,
                loss=suspect.loss if math.isfinite(suspect.loss) else None,
                median=suspect.median,
                samples=of_suspect,
                incarnation=self._ctx.member.incarnation,
            )
            self._ctx.journal.write(record)

    def write_recoveries(self) -> list[RecoveryRecord]:
        """Journals the recoveries that have ended since the last call, and returns them."""
        num_restarts = self._ctx.progress.num_restarts
        ended = [replace(record, num_restarts=num_restarts) for record in self.clock.pop_finished()]
        for record in ended:
            self._ctx.write_if_leader(record)
        return ended

    def write_update(
        self, attempt: int, result: UpdateResult, figures: Mapping[str, float], step_s: float, bytes_over_groups: int
    ) -> UpdateRecord:
        """Journals the update with the sums of this attempt, and returns the record: all `values` on the leader."""
        step, opinion = self._ctx.progress.now, self._ctx.progress.now.opinion
        assert opinion is not None, "a commit needs the group's own complete sum"
        values = {key: value for key, value in zip(MEMORY, opinion.memory, strict=True) if value}
        if self._ctx.agreement.is_leader:
            values |= self._ctx.trainer.corpus.consumed(step.step + 1)
        record = UpdateRecord(
            group=self._ctx.member.group,
            step=step.step,
            attempt=attempt,
            num_microbatches=result.num_microbatches,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            terms=dict(result.terms),
            makespan=step.makespan,
            step_s=round(step_s, 6),
            compute_s=[round(spent_s, 6) for spent_s in opinion.compute_s],
            bytes_over_groups=bytes_over_groups,
            values={**values, **figures},
        )
        self._ctx.write_if_leader(record)
        return record

    def write_paces(self, action: ChangePaces) -> None:
        permille = {str(group): pace for group, pace in action.permille.items()}
        self._ctx.write_if_leader(PacesRecord(group=self._ctx.member.group, step=action.step, permille=permille))

    def send_step(self, update: UpdateRecord, recoveries: Sequence[RecoveryRecord], *, is_last: bool) -> None:
        """Reports the committed step, if this rank does."""
        split_s = self._ctx.probe.heartbeat.end_step()
        if not self._sends_steps:
            return
        step = self._ctx.progress.now
        report = StepCommitted(
            update=update,
            num_alive=step.num_alive,
            split_s=split_s,
            head=self._ctx.controller.head,
            epoch=step.epoch,
            num_recomputed=step.num_recomputed,
            recoveries=tuple(recoveries),
            is_last=is_last,
            num_missing_stages=step.num_missing_stages,
        )
        self._ctx.send(report)

    def send_pause(self, step: int, shards: tuple[ShardId, ...] = ()) -> None:
        """Reports that training pauses for hosts of these shards or, without shards, goes on, if this rank does."""
        if self._sends_steps:
            self._ctx.send(RunPaused(group=self._ctx.member.group, step=step, shards=shards))

    def send_evaluation(self, action: ReportEvaluation) -> None:
        """Reports the result of an evaluation, if this rank does."""
        spent_s = sum(self._ctx.probe.heartbeat.take_split().values())  # not the next step's
        if not self._sends_steps:
            return
        report = EvaluationDecided(
            group=self._ctx.member.group,
            step=action.step,
            attempt=action.attempt,
            loss=mean_loss(action.sums),
            losses=losses_of(action.sums),
            spent_s=spent_s,
        )
        self._ctx.send(report)

    def _record_stage(self, stage: RecoveryStage, began_s: float, ended_s: float) -> None:
        if self._ctx.agreement.is_leader:
            self._ctx.probe.heartbeat.spans.recovered(stage, began_s, ended_s)
