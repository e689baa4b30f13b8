"""What a rank needs to start again after a wipe-out: the checkpoints, and since when training stands still."""

import time

from spare_megatron.core.restart_messages import LoadCheckpoint
from spare_megatron.core.topology import Member
from spare_megatron.journal.records import RestartRecord


class StartOver:
    """One rank's part in a restart.

    Args:
        wiped_out_at_s: Monotonic time at which the rank's supervisor knew of the wipe-out; None if the rank's process
            was started before.

    Attributes:
        rejected: Checkpoints that cannot be used, and why, as of the last look.
    """

    def __init__(self, wiped_out_at_s: float | None) -> None:
        self._wiped_out_at_s = wiped_out_at_s
        self.rejected: tuple[str, ...] = ()

    def now_s(self) -> float:
        """The time for what the log says: up to the restart, that of the wipe-out."""
        return time.monotonic() if self._wiped_out_at_s is None else self._wiped_out_at_s

    def wiped_out(self) -> None:
        """The rank has read of a wipe-out in the log."""
        self._wiped_out_at_s = self.now_s()

    def left_out(self) -> None:
        """Training goes on without the rank, which comes too late."""
        self._wiped_out_at_s = None

    def valid_steps(self) -> tuple[int, ...]:
        """Committed steps of the newest checkpoints that are whole."""
        return ()

    def load(self, step: int) -> None:
        """Takes the checkpoint over; the beginning is what a new process has anyway."""
        assert step == 0, "nobody has found another checkpoint"

    def record(self, member: Member, action: LoadCheckpoint) -> RestartRecord:
        """For the journal, when it is loaded."""
        return RestartRecord(
            group=member.group,
            incarnation=member.incarnation,
            step=action.step,
            rework_steps=action.rework_steps,
            restart_s=round(time.monotonic() - self.now_s(), 6),
            rejected=list(self.rejected),
        )
