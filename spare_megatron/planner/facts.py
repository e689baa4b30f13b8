"""What a plan depends on: the cluster, what stacks may cost, and how lost work is shared out."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from spare_megatron.planner.overhead import StepTimes
from spare_megatron.planner.readmission import RejoinTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTimes:
    """What saves and restarts take.

    Attributes:
        save_s: T_s, seconds that training stands still for a save; above 0.
        restart_s: T_r, seconds from a wipe-out to training again.
    """

    save_s: float
    restart_s: float


Policy = Literal["stack", "microbatch", "rejoin"]
"""Whole shards as in SPARe; single microbatches; single microbatches and lost groups that come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What a plan depends on.

    Attributes:
        num_groups: N, data-parallel groups, and shards of a batch.
        times: Times of a step, and how often a single group is lost. Losses come from all groups together at this
            constant rate; only the policy "rejoin" counts it per group that is up.
        checkpoint: What saves and restarts take.
        num_microbatches: m, microbatches per shard; not used by the policy "stack".
        rejoin: How lost groups come back; used by the policy "rejoin" alone.
        groups_per_domain: Groups of consecutive ids that stand in a domain (rack, power) and are lost together.
        domain_interval_s: Mean seconds between losses of any whole domain; infinite for none.
        last_resort: Any survivor can compute any shard, so that only the loss of all groups is a wipe-out. Not with
            the policy "stack", which moves whole shards between hosts.
        fetch_s: Seconds for which a group reads a shard that is not in its stack, in each step.

    Raises:
        ValueError: A count or time is out of its range, or two of them cannot be combined.
    """

    num_groups: int
    times: StepTimes
    checkpoint: CheckpointTimes
    num_microbatches: int = 1
    rejoin: RejoinTimes | None = None
    groups_per_domain: int = 1
    domain_interval_s: float = inf
    last_resort: bool = False
    fetch_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"num_groups={self.num_groups} and num_microbatches={self.num_microbatches} have to be 1 or more"
            )
        if not (1 <= self.groups_per_domain <= self.num_groups and self.domain_interval_s > 0 and self.fetch_s >= 0):
            raise ValueError(
                f"groups_per_domain={self.groups_per_domain} has to be from 1 to num_groups={self.num_groups}, "
                f"domain_interval_s={self.domain_interval_s} above 0, fetch_s={self.fetch_s} 0 or more"
            )
        if self.has_domains and self.rejoin is not None and self.rejoin.num_spares > 0:
            raise ValueError(
                f"num_spares={self.rejoin.num_spares}: a pool of spares is planned for groups that are lost one "
                f"by one, not for domains of {self.groups_per_domain}; leave out one of them"
            )

    @property
    def has_domains(self) -> bool:
        """Whether whole domains are lost, too."""
        return self.domain_interval_s < inf

    @property
    def num_domains(self) -> int:
        """Domains; the last may be smaller."""
        return -(-self.num_groups // self.groups_per_domain)

    @property
    def group_interval_s(self) -> float:
        """Mean seconds from when a group is up until it is lost by itself."""
        return self.num_groups * self.times.loss_interval_s

    @property
    def event_interval_s(self) -> float:
        """Mean seconds between losses, those of a whole domain counted once."""
        return 1 / (1 / self.times.loss_interval_s + 1 / self.domain_interval_s)

    @property
    def lost_group_interval_s(self) -> float:
        """Mean seconds per lost group, with domains counted by their groups."""
        per_domain = self.num_groups / self.num_domains
        return 1 / (1 / self.times.loss_interval_s + per_domain / self.domain_interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingLimits:
    """What holding a stack costs a group, and what it may cost. A limit that is None does not bind.

    Attributes:
        shard_bytes: Bytes of one shard as held in memory.
        memory_bytes: Memory of a group for its stack.
        read_bytes_per_s: At what rate a group can read. A stack is read anew for every step, while the step before
            is computed; the redundancy is held low enough for that.
    """

    shard_bytes: int
    memory_bytes: int | None = None
    read_bytes_per_s: float | None = None

    def largest_redundancy(self, num_groups: int, times: StepTimes) -> int:
        """The largest r from 0 to N whose stack fits into the memory and can be read within a step without losses."""
        largest = num_groups
        if self.memory_bytes is not None:
            largest = min(largest, self.memory_bytes // self.shard_bytes)
        if self.read_bytes_per_s is not None:
            largest = min(largest, int(self.read_bytes_per_s * times.step_s / self.shard_bytes))
        return largest
