"""What everything takes in a simulated run."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds, group by group. The string below each field is its help.

    Raises:
        ValueError: A time is negative or not finite, or a group computes nothing.
    """

    compute_s: float
    """One group computes one whole shard (m microbatches)."""
    reduce_s: float = 0.0
    """One cross-group reduction, optimizer step included."""
    jitter: float = 0.0
    """Standard deviation of the factor N(1, jitter^2) on the compute of a step; a share, not seconds."""
    detect_s: float = 0.0
    """From the loss of a group, or the end of the survivors' own compute if that is later, to its fence."""
    agree_s: float = 0.0
    """From the fence to the new plan: votes, decision, controller."""
    rebuild_s: float = 0.0
    """A new communicator after losses, built after the patch is computed."""
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
            if not 0 <= value < float("inf"):
                raise ValueError(f"costs.{name}={value} has to be 0 or more, and finite")
        if self.compute_s == 0:
            raise ValueError("costs.compute_s=0.0 has to be above 0")

    def terms(self) -> dict[str, float]:
        """All terms by name, for printing."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
