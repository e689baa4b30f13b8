"""Measures how long each stage of a recovery from a lost group takes in one group."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.journal.records import RecoveryRecord
from spare_megatron.journal.spans import RecoveryStage
from spare_megatron.stacking.layout import GroupId

StageListener = Callable[[RecoveryStage, float, float], None]
"""Receives a stage and the monotonic times at which a recovery began and ended it."""


@dataclass(slots=True)
class _Recovery:
    step: int
    computed_at_s: float
    noticed_at_s: float
    lost: list[GroupId]
    lap_from_s: float
    listener: StageListener
    num_patched: int = 0
    is_agreeing: bool = True
    has_communicator: bool = False
    spent_s: dict[RecoveryStage, float] = field(default_factory=dict)

    def lap(self, stage: RecoveryStage, until_s: float) -> None:
        """Assigns the time since the last lap to this stage."""
        if until_s > self.lap_from_s:
            self.spent_s[stage] = self.spent_s.get(stage, 0.0) + until_s - self.lap_from_s
            self.listener(stage, self.lap_from_s, until_s)
            self.lap_from_s = until_s


class RecoveryClock:
    """Times recoveries. A further loss before the commit of the step belongs to the recovery under way.

    A recovery ends when its step is committed and the new communicator is ready, whichever comes last: after a loss
    that cost no sum, only the next step needs the communicator. If another group is lost before that, it ends without
    one.
    """

    def __init__(self, group: GroupId, listener: StageListener) -> None:
        self._group = group
        self._listener = listener
        self._computed_at_s = 0.0
        self._open: _Recovery | None = None
        self._without_communicator: _Recovery | None = None  # committed, and not over yet
        self._finished: list[_Recovery] = []

    def computed(self) -> None:
        self._computed_at_s = time.time()
        if self._without_communicator is not None:
            self._without_communicator.lap_from_s = time.monotonic()

    def lost(self, step: int, group: GroupId) -> None:
        now_s = time.monotonic()
        self._close(self._without_communicator)
        self._without_communicator = None
        if self._open is None:
            self._open = _Recovery(
                step=step,
                computed_at_s=self._computed_at_s,
                noticed_at_s=time.time(),
                lost=[],
                lap_from_s=now_s,
                listener=self._listener,
            )
        elif not self._open.is_agreeing:
            self._open.lap("reduce", now_s)
        self._open.is_agreeing, self._open.has_communicator = True, False
        self._open.lost.append(group)

    def patched(self, num_microbatches: int) -> None:
        if self._open is not None:
            self._open.num_patched += num_microbatches
            self._open.lap("patch", time.monotonic())

    def decided(self) -> None:
        """The attempt that was under way at the loss is decided."""
        if self._open is not None and self._open.is_agreeing:
            self._open.lap("agree", time.monotonic())
            self._open.is_agreeing = False

    def reduced(self, ready_at_s: float | None) -> None:
        """A reduction has ended whose communicator was ready at this monotonic time; None if it never was."""
        recovery = self._open or self._without_communicator
        if recovery is None or ready_at_s is None:
            return
        recovery.lap("rebuild", ready_at_s)
        recovery.has_communicator = True
        if recovery is self._without_communicator:
            self._close(recovery)
            self._without_communicator = None

    def committed(self) -> None:
        if self._open is None:
            return
        self._open.lap("reduce", time.monotonic())
        if self._open.has_communicator:
            self._close(self._open)
        else:
            self._without_communicator = self._open
        self._open = None

    def stopped(self) -> None:
        """The run stops: no recovery waits for a communicator any more."""
        self._close(self._without_communicator)
        self._without_communicator = None

    def take_finished(self) -> list[RecoveryRecord]:
        """The recoveries that have ended since the last call."""
        finished, self._finished = self._finished, []
        return [self._record(recovery) for recovery in finished]

    def _close(self, recovery: _Recovery | None) -> None:
        if recovery is not None:
            self._finished.append(recovery)

    def _record(self, recovery: _Recovery) -> RecoveryRecord:
        spent_s = recovery.spent_s
        return RecoveryRecord(
            group=self._group,
            step=recovery.step,
            lost=[int(group) for group in recovery.lost],
            computed_at_s=recovery.computed_at_s,
            noticed_at_s=recovery.noticed_at_s,
            agree_s=spent_s.get("agree", 0.0),
            patch_s=spent_s.get("patch", 0.0),
            rebuild_s=spent_s.get("rebuild", 0.0),
            reduce_s=spent_s.get("reduce", 0.0),
            num_patched=recovery.num_patched,
        )
