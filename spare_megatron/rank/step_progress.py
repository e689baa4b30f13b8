"""The progress of one rank through the step under way, and the records made of it after the commit."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spare_megatron.core.failure_detector import Operation
from spare_megatron.journal.records import RecoveryRecord, UpdateRecord
from spare_megatron.mcore.trainer import UpdateResult
from spare_megatron.process.reports import StepCommitted
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Microbatch


@dataclass(slots=True)
class StepUnderWay:
    """The step under way.

    Attributes:
        started_s: Monotonic time.
        makespan: Largest load of the plan, in microbatches.
        computed: The microbatches in the rank's local sums.
        plans: Digests of the plans that are computed.
        num_recomputed: Microbatches recomputed by all groups.
        epoch: Epoch of the last attempt.
    """

    step: int
    started_s: float
    makespan: int
    num_alive: int
    computed: list[Microbatch] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    num_recomputed: int = 0
    epoch: int = 0

    def update_record(
        self, group: GroupId, attempt: int, result: UpdateResult, compute_s: Sequence[float], step_s: float
    ) -> UpdateRecord:
        """The journal's record of the update with the sums of this attempt."""
        return UpdateRecord(
            group=group,
            step=self.step,
            attempt=attempt,
            num_microbatches=result.num_microbatches,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            makespan=self.makespan,
            step_s=round(step_s, 6),
            compute_s=[round(spent_s, 6) for spent_s in compute_s],
        )

    def report(
        self,
        group: GroupId,
        result: UpdateResult,
        *,
        step_s: float,
        split_s: Mapping[Operation, float],
        head: int,
        recoveries: Sequence[RecoveryRecord],
    ) -> StepCommitted:
        return StepCommitted(
            group=group,
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            num_alive=self.num_alive,
            makespan=self.makespan,
            step_s=step_s,
            split_s=split_s,
            head=head,
            epoch=self.epoch,
            num_recomputed=self.num_recomputed,
            recoveries=tuple(recoveries),
        )

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.started_s
