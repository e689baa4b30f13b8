"""Measures how long each stage of a recovery from a lost group takes in one group."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.journal.records import RecoveryRecord
from spare_megatron.journal.spans import RecoveryStage, RecoveryTimes
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Work

StageListener = Callable[[RecoveryStage, float, float], None]
"""Receives a stage and the monotonic times at which a recovery began and ended it."""


@dataclass(slots=True)
class _Recovery:
    step: int
    times: RecoveryTimes
    works: list[Work] = field(default_factory=list)
    """Computed for it: patches, and the whole step where its sums were discarded."""
    is_agreeing: bool = True
    has_communicator: bool = False


class RecoveryClock:
    """Times recoveries. A further loss before the commit of the step belongs to the recovery under way.

    A recovery ends when its step is committed and the new communicator is ready, whichever comes last; if another group
    is lost before that, without one.
    """

    def __init__(self, group: GroupId, listener: StageListener) -> None:
        self._group = group
        self._listener = listener
        self._computed_at_s = 0.0
        self._open: _Recovery | None = None
        self._without_communicator: _Recovery | None = None  # committed, and not over yet
        self._finished: list[_Recovery] = []

    def on_computed(self) -> None:
        self._computed_at_s = time.time()
        if self._without_communicator is not None:
            self._without_communicator.times.timed_until_s = time.monotonic()

    def on_group_lost(self, step: int, group: GroupId) -> None:
        now_s = time.monotonic()
        self._close(self._without_communicator)
        self._without_communicator = None
        if self._open is None:
            self._open = _Recovery(step, RecoveryTimes(self._computed_at_s, time.time(), timed_until_s=now_s))
        elif not self._open.is_agreeing:
            self._end_stage(self._open, "reduce", now_s)
        self._open.is_agreeing, self._open.has_communicator = True, False
        self._open.times.lost.append(group)

    def on_patched(self, work: Work) -> None:
        """The group has computed its part of this work of all groups."""
        if self._open is not None:
            self._open.works.append(work)
            self._end_stage(self._open, "patch", time.monotonic())

    def on_decided(self) -> None:
        """The attempt that was under way at the loss is decided."""
        if self._open is not None and self._open.is_agreeing:
            self._end_stage(self._open, "agree", time.monotonic())
            self._open.is_agreeing = False

    def on_reduced(self, ready_at_s: float | None) -> None:
        """A reduction has ended whose communicator was ready at this monotonic time; None if it never was."""
        recovery = self._open or self._without_communicator
        if recovery is None or ready_at_s is None:
            return
        self._end_stage(recovery, "rebuild", ready_at_s)
        recovery.has_communicator = True
        if recovery is self._without_communicator:
            self._close(recovery)
            self._without_communicator = None

    def on_commit(self) -> int:
        """Ends the recovery under way; returns the microbatches that all its survivors have computed for it."""
        if self._open is None:
            return 0
        recovery, self._open = self._open, None
        self._end_stage(recovery, "reduce", time.monotonic())
        if recovery.has_communicator:
            self._close(recovery)
        else:
            self._without_communicator = recovery
        lost = set(recovery.times.lost)
        return sum(work.num_microbatches - sum(len(work.of(group)) for group in lost) for work in recovery.works)

    def on_pause(self) -> None:
        """The step is begun anew later: the recovery under way ends without a record."""
        self.on_stop()
        self._open = None

    def on_stop(self) -> None:
        """The run stops: no recovery waits for a communicator any more."""
        self._close(self._without_communicator)
        self._without_communicator = None

    def pop_finished(self) -> list[RecoveryRecord]:
        """The recoveries that have ended since the last call."""
        finished, self._finished = self._finished, []
        return [
            recovery.times.record(self._group, recovery.step, sum(len(work.of(self._group)) for work in recovery.works))
            for recovery in finished
        ]

    def _end_stage(self, recovery: _Recovery, stage: RecoveryStage, at_s: float) -> None:
        began_s = recovery.times.timed_until_s
        if at_s > began_s:  # a communicator may have been ready before the stage began
            recovery.times.end_stage(stage, at_s)
            self._listener(stage, began_s, at_s)

    def _close(self, recovery: _Recovery | None) -> None:
        if recovery is not None:
            self._finished.append(recovery)
