"""Where the time of a recovery goes, as one group spends it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from spare_megatron.core.topology import GroupId
from spare_megatron.journal.records import RecoveryRecord

Stage = Literal["agree", "patch", "rebuild", "reduce"]


@dataclass(slots=True)
class _Recovery:
    step: int
    computed_at_s: float
    noticed_at_s: float
    lost: list[GroupId]
    lap_from_s: float
    num_patched: int = 0
    is_agreeing: bool = True
    is_committed: bool = False
    has_communicator: bool = False
    spent_s: dict[Stage, float] = field(default_factory=dict)


class RecoveryClock:
    """Times the recovery under way, if any. A further loss in the middle of a recovery belongs to it.

    A recovery is over when its step is committed and the new communicator is there, whichever comes last: after a
    loss that cost no sum, the communicator is only needed by the next step.
    """

    def __init__(self, group: GroupId) -> None:
        self._group = group
        self._computed_at_s = 0.0
        self._recovery: _Recovery | None = None

    def computed(self) -> None:
        """The group has finished the work of a step."""
        self._computed_at_s = time.time()
        if self._recovery is not None:
            self._recovery.lap_from_s = time.monotonic()

    def lost(self, step: int, group: GroupId) -> None:
        """A fence has been folded."""
        if self._recovery is None:
            now_s = time.time()
            self._recovery = _Recovery(
                step=step,
                computed_at_s=self._computed_at_s,
                noticed_at_s=now_s,
                lost=[],
                lap_from_s=time.monotonic(),
            )
        elif not self._recovery.is_agreeing:
            self._lap("reduce", time.monotonic())
        self._recovery.is_agreeing = True
        self._recovery.lost.append(group)
        self._recovery.has_communicator = False

    def patched(self, num_microbatches: int) -> None:
        """The group has computed its part of a patch."""
        if self._recovery is not None:
            self._recovery.num_patched += num_microbatches
            self._lap("patch", time.monotonic())

    def decided(self) -> None:
        """The attempt that was under way at the loss has been decided."""
        if self._recovery is not None and self._recovery.is_agreeing:
            self._lap("agree", time.monotonic())
            self._recovery.is_agreeing = False

    def reduced(self, ready_at_s: float | None) -> None:
        """A reduction has ended that had its communicator at this monotonic time, or never had one."""
        if self._recovery is not None and ready_at_s is not None:
            self._lap("rebuild", ready_at_s)
            self._recovery.has_communicator = True

    def committed(self) -> Iterable[RecoveryRecord]:
        """The step is committed. Yields the recovery if that ends it."""
        recovery = self._recovery
        if recovery is None:
            return
        if not recovery.is_committed:
            self._lap("reduce", time.monotonic())
            recovery.is_committed = True
        if recovery.has_communicator:
            self._recovery = None
            yield self._record(recovery)

    def stopped(self) -> Iterable[RecoveryRecord]:
        """The run stops. Yields a recovery that has not ended but for the communicator nobody needs any more."""
        if self._recovery is not None and self._recovery.is_committed:
            yield self._record(self._recovery)
        self._recovery = None

    def _lap(self, stage: Stage, until_s: float) -> None:
        assert self._recovery is not None
        spent_s = max(0.0, until_s - self._recovery.lap_from_s)
        self._recovery.spent_s[stage] = self._recovery.spent_s.get(stage, 0.0) + spent_s
        self._recovery.lap_from_s = max(until_s, self._recovery.lap_from_s)

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
