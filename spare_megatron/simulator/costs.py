"""What everything takes in a simulated run."""

from dataclasses import dataclass, fields
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds, group by group. The string below each field is its help.

    Raises:
        ValueError: A time is negative or not finite, or a group computes nothing.
    """

    compute_s: float
    """One group computes one whole shard (m microbatches) with nobody slowing it down, pipeline fill included."""
    reduce_s: float = 0.0
    """One cross-group reduction up to the commit; the optimizer step too, unless it has its own update_s."""
    update_s: float = 0.0
    """The optimizer step, after the commit."""
    jitter: float = 0.0
    """Standard deviation of the factor N(1, jitter^2) on the compute of a step; a share, not seconds."""
    pipeline_fill: float = 0.0
    """Filling and draining the pipeline lengthens every stretch of work by the time of this many microbatches:
    (stages - 1) / model chunks per stage."""
    full_speed_groups: float = inf
    """Groups that can compute at full speed at the same time; below their number where they share processors."""
    detect_s: float = 0.0
    """From the loss of a group to its fence. The survivors compute meanwhile; only what is left is waited for."""
    agree_s: float = 0.0
    """From the fence to the new plan: votes, decision, controller."""
    rebuild_s: float = 0.0
    """A new communicator after losses, from the fence on. It is built meanwhile; only what agreement and patch leave
    of it is waited for."""
    retry_s: float = 0.0
    """Reducing again after losses takes this much longer than reduce_s."""
    save_s: float = 0.0
    """Training stands still for one save; asynchronous saves are a small value."""
    restart_s: float = 0.0
    """From a wipe-out to training again with all groups."""
    join_s: float = 0.0
    """Everybody waits when groups are taken in, once for all that are taken in together."""
    state_transfer_s: float = 0.0
    """A group that is back fetches the state before it can be taken in; stalls nobody else."""
    fetch_s: float = 0.0
    """A host of last resort reads a shard that is not in its stack; each such shard in each step."""

    def __post_init__(self) -> None:
        for name, value in self.terms().items():
            if not 0 <= value < inf and (name, value) != ("full_speed_groups", inf):
                raise ValueError(f"costs.{name}={value} has to be 0 or more, and finite")
        for name in ("compute_s", "full_speed_groups"):
            if getattr(self, name) == 0:
                raise ValueError(f"costs.{name}=0.0 has to be above 0")

    def terms(self) -> dict[str, float]:
        """All terms by name, for printing."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
