"""Inputs of a plan: the cluster, its failures, and limits on what a stack may cost."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.readmission import RejoinTimes
from spare_megatron.tools.plan.reforming_costs import ReformTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTimes:
    save_s: float
    """T_s, seconds that training stops for a save; above 0."""
    restart_s: float
    """T_r, seconds from a wipe-out until training resumes."""


Policy = Literal["stack", "microbatch", "rejoin", "reform"]
"""SPARe's reordering of whole shards; reordering of single microbatches; the latter with lost groups that come back; or
with groups that are re-formed from the machines of broken ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The cluster that a plan is for. ValueError if a value is out of its range or does not fit another."""

    num_groups: int
    """N, data-parallel groups, and shards of a batch."""
    times: StepTimes
    """Step times and the interval between losses of single groups. The loss rate of the whole system is constant; only
    the policies "rejoin" and "reform" take it per group that is up."""
    checkpoint: CheckpointTimes
    num_microbatches: int = 1
    """m, microbatches per shard; unused by the policy "stack"."""
    rejoin: RejoinTimes | None = None
    """How lost groups come back; used only by the policy "rejoin"."""
    reform: ReformTimes | None = None
    """How groups are re-formed; used only by the policy "reform", for which a loss takes one machine."""
    groups_per_domain: int = 1
    """Groups of consecutive ids that form a domain (rack, power) and are lost together."""
    domain_interval_s: float = inf
    """Mean seconds between losses of any whole domain; infinite for none."""
    last_resort: bool = False
    """Any survivor can compute any shard, so only the loss of all groups is a wipe-out. Not with the policy "stack"."""
    fetch_s: float = 0.0
    """Seconds from the start of a step or patch until a group has data of shards that it does not host."""
    notice_s: float = 0.0
    """Notice of each loss: a group that learns of its own leaves at the next commit, and owes nothing."""

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"num_groups={self.num_groups} and num_microbatches={self.num_microbatches} have to be 1 or more"
            )
        if not self.notice_s >= 0:
            raise ValueError(f"notice_s={self.notice_s} has to be 0 or more")
        if not (1 <= self.groups_per_domain <= self.num_groups and self.domain_interval_s > 0 and self.fetch_s >= 0):
            raise ValueError(
                f"groups_per_domain={self.groups_per_domain} has to be from 1 to num_groups={self.num_groups}, "
                f"domain_interval_s={self.domain_interval_s} above 0, fetch_s={self.fetch_s} 0 or more"
            )
        reform = self.reform
        if self.has_domains and reform is not None and not (self.last_resort and reform.repair_s):
            raise ValueError(
                f"reform_s={reform.reform_s}: re-forming is planned with domains of {self.groups_per_domain} groups "
                "where all groups can read all data and machines are repaired; set last_resort and repair_s"
            )
        if self.has_domains and self.rejoin is not None and self.rejoin.num_spares > 0:
            raise ValueError(
                f"num_spares={self.rejoin.num_spares}: a pool of spares is planned for groups that are lost one "
                f"by one, not for domains of {self.groups_per_domain}; leave out one of them"
            )

    @property
    def has_domains(self) -> bool:
        return self.domain_interval_s < inf

    @property
    def num_domains(self) -> int:
        """The number of domains; the last may be smaller."""
        return -(-self.num_groups // self.groups_per_domain)

    @property
    def group_interval_s(self) -> float:
        """Mean seconds from when a group is up until it is lost by itself."""
        return self.num_groups * self.times.loss_interval_s

    @property
    def event_interval_s(self) -> float:
        """Mean seconds between losses, with the loss of a whole domain counted once."""
        return 1 / (1 / self.times.loss_interval_s + 1 / self.domain_interval_s)

    @property
    def lost_group_interval_s(self) -> float:
        """Mean seconds per lost group, with the loss of a domain counted once per group."""
        per_domain = self.num_groups / self.num_domains
        return 1 / (1 / self.times.loss_interval_s + per_domain / self.domain_interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingLimits:
    """What holding a stack costs a group, and its limits. A limit of None does not bind."""

    shard_bytes: int
    """Bytes of one shard in memory."""
    memory_bytes: int | None = None
    """Memory of a group for its stack."""
    read_bytes_per_s: float | None = None
    """Read rate of a group. A stack is read for every step during the step before, which limits r."""

    def largest_redundancy(self, num_groups: int, times: StepTimes) -> int:
        """The largest r from 0 to N whose stack fits into memory and is read within a step without losses."""
        largest = num_groups
        if self.memory_bytes is not None:
            largest = min(largest, self.memory_bytes // self.shard_bytes)
        if self.read_bytes_per_s is not None:
            largest = min(largest, int(self.read_bytes_per_s * times.step_s / self.shard_bytes))
        return largest
