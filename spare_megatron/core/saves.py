"""When a checkpoint is taken, and by which group."""

from dataclasses import dataclass

from spare_megatron.core.topology import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """An action: save the parameters and all state after this many committed steps.

    Attributes:
        step: The committed steps.
        member: Who saves.
        voters: Who takes part then, and may be writing an earlier checkpoint.
        epoch: Number of the set of groups.
    """

    step: int
    member: Member
    voters: tuple[Member, ...]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When checkpoints are due.

    Attributes:
        interval_s: Seconds from one checkpoint to the next; None saves at no time.
        interval_steps: Steps from one checkpoint to the next; None saves after no number of steps.
        saves_last: The last step of the run is saved, too.
    """

    interval_s: float | None = None
    interval_steps: int | None = None
    saves_last: bool = False


class Saves:
    """What the log has said of saves so far.

    Args:
        policy: When they are due; None: never.
        first_step: Committed steps with which the run begins.
        num_steps: Those with which it ends at the latest.
    """

    def __init__(self, policy: SavePolicy | None, first_step: int, num_steps: int) -> None:
        self._policy = SavePolicy() if policy is None else policy
        self._num_steps = num_steps
        self._last_at_s = 0.0
        self._last_step = first_step
        self._num_saves = 0

    def began(self, step: int, now_s: float) -> None:
        """Training begins, or begins again, after this many committed steps."""
        self._last_at_s, self._last_step = now_s, step

    def is_due(self, step: int, now_s: float, *, is_last: bool) -> bool:
        """Whether the commit after which this many steps are committed takes a checkpoint.

        Args:
            step: The steps.
            now_s: The clock of whoever writes the commit.
            is_last: It ends the run before all steps are trained.
        """
        policy = self._policy
        if policy.saves_last and (is_last or step == self._num_steps):
            return True
        if policy.interval_s is not None and now_s - self._last_at_s >= policy.interval_s:
            return True
        return policy.interval_steps is not None and step - self._last_step >= policy.interval_steps

    def take(self, step: int, now_s: float, voters: tuple[Member, ...], epoch: int) -> SaveCheckpoint:
        """The save that a commit asks for: by the groups in turn, for where one cannot write, the next may."""
        self.began(step, now_s)
        member = voters[self._num_saves % len(voters)]
        self._num_saves += 1
        return SaveCheckpoint(step=step, member=member, voters=voters, epoch=epoch)
