"""Computes a step or evaluation and its patches on one rank, and updates the model once a step is committed."""

import time

from spare_megatron.core.log.actions import AttemptReduce, ComputePatch, ComputeStep, UpdateModel
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.rank.reduction import Reduction
from spare_megatron.rank.step_profile import StepProfile
from spare_megatron.stacking.plans import StepPlan
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.rank_progress import StepUnderWay
from spare_megatron.state.transfer.served_state import StateSource
from spare_megatron.state.transfer.state_digests import StateDigests


class StepExecutor:
    """Carries out ComputeStep, ComputePatch and UpdateModel. It decides nothing."""

    def __init__(
        self,
        ctx: RankContext,
        *,
        reduction: Reduction,
        source: StateSource,
        saves: GroupSaves,
        digests: StateDigests,
        reports: RankReports,
        profile: StepProfile | None,
    ) -> None:
        self._ctx = ctx
        self._reduction = reduction
        self._source = source
        self._saves = saves
        self._digests = digests
        self._reports = reports
        self._profile = profile

    def compute_step(self, action: ComputeStep, num_alive: int) -> None:
        """Starts the step or evaluation and computes this group's part of the plan from zero sums.

        Returns at once if the plan is already computed. A group that lacks parameters starts the step and computes
        nothing.
        """
        plan, before = action.plan, self._ctx.progress.step
        if before is not None and (before.step, before.is_evaluation) != (plan.step, plan.is_evaluation):
            before = None
        if before is not None and plan.digest in before.plans:
            return
        self._ctx.probe.begin_step(plan.step)
        if self._profile is not None and before is None:
            self._profile.end_step()
            if not plan.is_evaluation:
                self._profile.begin_step(plan.step)
        self._ctx.progress.step = StepUnderWay(
            step=plan.step,
            started_s=time.monotonic() if before is None else before.started_s,
            makespan=plan.work.makespan,
            num_alive=num_alive,
            is_evaluation=plan.is_evaluation,
        )
        if self._ctx.progress.lacks_params:
            return
        if plan.is_evaluation:
            self._ctx.trainer.evaluator.reset(plan.step)
        else:
            self._ctx.trainer.begin_step(plan.step)
        self._compute(plan, action.into)
        if before is not None and before.plans:
            self._reports.clock.on_patched(plan.work)
        else:
            self._reports.clock.on_computed()

    def compute_patch(self, action: ComputePatch) -> None:
        """Adds this group's part of a patch to the local sums that are not kept, once, if it has all parameters."""
        if self._ctx.progress.lacks_params or action.plan.digest in self._ctx.progress.now.plans:
            return
        self._start_attempt(action.into)
        self._ctx.probe(FaultPoint.EVALUATION_PATCH if action.plan.is_evaluation else FaultPoint.PATCH)
        self._compute(action.plan, action.into)
        self._reports.clock.on_patched(action.plan.work)

    def _compute(self, plan: StepPlan, into: AttemptReduce | None) -> None:
        self._start_attempt(into)
        now, work, on_ready = self._ctx.progress.now, plan.work.of(self._ctx.member.group), None
        if into is not None and work:
            on_ready = self._reduction.send_early(into, [*now.computed, *work])
        if plan.is_evaluation:
            now.computed.extend(self._ctx.trainer.evaluator.compute(work))
        else:
            audited, audits = plan.audited_of(self._ctx.member.group), plan.audited_by(self._ctx.member.group)
            now.computed.extend(self._ctx.trainer.compute(work, on_ready, audited=audited, audits=audits))
            now.has_audits |= bool(plan.audits)
            now.audited.extend(sorted({*audited, *audits}))
            now.num_planned += len({*audited, *audits})
        now.plans.append(plan.digest)

    def _start_attempt(self, into: AttemptReduce | None) -> None:
        if into is not None:
            self._reduction.start_attempt(into)

    def update_model(self, action: UpdateModel) -> None:
        """Applies the sums of the committed attempt."""
        self._digests.on_proven(action.proven)
        self._ctx.progress.now.num_recomputed = self._reports.clock.on_commit()
        self._reduction.commit()
        recoveries = self._reports.write_recoveries()
        self._ctx.probe(FaultPoint.AFTER_COMMIT)
        num_steps = action.step + 1
        self._saves.await_copies(num_steps)
        assert self._reduction.loss is not None, "a commit needs the group's own complete sum"
        with self._ctx.probe.during(Operation.UPDATE), self._source.changing(num_steps):
            result = self._ctx.trainer.update(self._reduction.loss, self._reduction.squares, self._reduction.terms)
        step_s = self._ctx.progress.now.spent_s
        reduction = self._reduction
        self._reports.write_update(
            action.attempt, result, reduction.compute_s, step_s, bytes_over_groups=reduction.bytes_over_groups
        )
        self._saves.report_finished()
        if self._ctx.trainer.stacked is not None:  # all other parameters are those of the step before
            self._ctx.progress.lacks_params = True
            self._digests.forget()
        else:
            self._ctx.progress.num_steps = num_steps
            self._digests.compare_if_due(num_steps)
        self._reports.send_step(result, step_s, recoveries, is_last=action.is_last)

    def stop(self, step: int, *, is_final: bool) -> None:
        """Journals how the group ends and waits for its saves; `is_final` unless it is to restart.

        Collective over: all ranks of the group.
        """
        if self._profile is not None:
            self._profile.end_step()
        self._reports.clock.on_stop()
        self._reports.write_recoveries()
        if not self._ctx.progress.lacks_params:
            self._digests.end(step, has_sha256=is_final)
        self._saves.finish()
        self._saves.report_finished()
