"""The redundancy and the cadence that train fastest on a given cluster."""

from dataclasses import dataclass
from typing import Literal, get_args

from spare_megatron.core.cadence import optimal_cadence_s
from spare_megatron.core.golomb import check_redundancy
from spare_megatron.planner.availability import best_availability
from spare_megatron.planner.endurance import endured_losses
from spare_megatron.planner.optimum import CheckpointTimes
from spare_megatron.planner.overhead import StepTimes, stretch
from spare_megatron.planner.repair import RepairTimes, stretch_with_repair, survival

Policy = Literal["stack", "microbatch", "rejoin"]
"""Whole shards as in SPARe; single microbatches; single microbatches and lost groups that come back."""

TOLERANCE = 1e-3
"""A higher redundancy has to shorten the time to train by more than this share: holding shards is not free."""

MAX_CANDIDATE = 48
"""No higher redundancy is tried: the best one grows with log2 N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What a plan depends on.

    Attributes:
        num_groups: N, data-parallel groups, and shards of a batch.
        times: Times of a step, and how often a group is lost while all are up. Losses come from all groups together
            at this constant rate; only the policy "rejoin" counts it per group that is up.
        checkpoint: What saves and restarts take.
        num_microbatches: m, microbatches per shard; not used by the policy "stack".
        repair_s: Mean seconds from the loss of a group until it takes part again; used by the policy "rejoin" alone.

    Raises:
        ValueError: A count or time is out of its range.
    """

    num_groups: int
    times: StepTimes
    checkpoint: CheckpointTimes
    num_microbatches: int = 1
    repair_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"num_groups={self.num_groups} and num_microbatches={self.num_microbatches} have to be 1 or more"
            )

    @property
    def repair(self) -> RepairTimes:
        """Repair times of one group.

        Raises:
            ValueError: There is no repair time.
        """
        if self.repair_s is None:
            raise ValueError("the policy rejoin needs the time after which a lost group is back: repair_s")
        return RepairTimes(group_interval_s=self.num_groups * self.times.loss_interval_s, repair_s=self.repair_s)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A redundancy, and what to expect of it.

    Attributes:
        policy: Granularity, and whether groups come back.
        redundancy: r.
        cadence_s: T_c*, seconds from save to save.
        endured_losses: Expected losses before a wipe-out; with groups that come back, counting each loss.
        time_to_wipe_out_s: T_f, mean seconds from a restart to the next wipe-out.
        stretch: Mean step over the step without losses, between wipe-outs.
        availability: A*, the share of time that goes into steps that count.
        time_to_train_ratio: stretch / availability: expected time to train over that with no losses and no saves.
    """

    policy: Policy
    redundancy: int
    cadence_s: float
    endured_losses: float
    time_to_wipe_out_s: float
    stretch: float
    availability: float
    time_to_train_ratio: float


def predict(facts: ClusterFacts, policy: Policy, redundancy: int) -> Plan:
    """What to expect of one redundancy, at the best cadence for it.

    T_f = loss_interval_s * (endured_losses + 1), or with rejoining groups the mean of `planner.repair.survival`;
    T_c* and A* from `core.cadence` and `planner.availability`; the stretch from `planner.overhead.stretch` or
    `planner.repair.stretch_with_repair`.

    Args:
        facts: The cluster.
        policy: Granularity, and whether groups come back.
        redundancy: r, from 1 to N.

    Raises:
        ValueError: The redundancy or the policy does not fit, or the policy is "rejoin" and there is no repair time.

    Notes:
        Against simulated runs at the same assumptions within 1.2% (benchmarks/planner_formulas.py). With the published
        settings of SPARe (N = 200, 600, 1000) the best are 2.86, 2.52, 2.39 at r = 8, 8, 9 where the paper's
        simulation has 2.92, 2.49, 2.34 at r = 9, 8, 9.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy {policy!r} is unknown; known: {', '.join(get_args(Policy))}")
    check_redundancy(facts.num_groups, redundancy)
    time_s, slower = _time_and_stretch(facts, policy, redundancy)
    up = best_availability(facts.checkpoint.save_s, time_s, facts.checkpoint.restart_s)
    return Plan(
        policy=policy,
        redundancy=redundancy,
        cadence_s=optimal_cadence_s(facts.checkpoint.save_s, time_s, facts.checkpoint.restart_s),
        endured_losses=time_s / facts.times.loss_interval_s - 1,
        time_to_wipe_out_s=time_s,
        stretch=slower,
        availability=up,
        time_to_train_ratio=slower / up,
    )


def candidates(facts: ClusterFacts, policy: Policy, limits: HoldingLimits | None = None) -> tuple[Plan, ...]:
    """The plans for every redundancy that the limits allow, up to MAX_CANDIDATE.

    Raises:
        ValueError: As for `predict`, or the limits allow no redundancy at all.
    """
    largest = facts.num_groups if limits is None else limits.largest_redundancy(facts.num_groups, facts.times)
    if limits is not None and largest < 1:
        raise ValueError(
            f"a group cannot hold even one shard of {limits.shard_bytes} bytes: "
            f"memory_bytes={limits.memory_bytes}, read_bytes_per_s={limits.read_bytes_per_s}"
        )
    return tuple(predict(facts, policy, r) for r in range(1, min(largest, MAX_CANDIDATE) + 1))


def optimize(facts: ClusterFacts, policy: Policy, limits: HoldingLimits | None = None) -> Plan:
    """The plan of least redundancy whose time to train is within TOLERANCE of the least.

    The best cadence for each r is known in closed form, so the joint optimum over (r, T_c) is a search over r.

    Args:
        facts: The cluster.
        policy: Granularity, and whether groups come back.
        limits: What stacks may cost.

    Raises:
        ValueError: As for `candidates`.

    >>> times = StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=300.0)
    >>> facts = ClusterFacts(
    ...     num_groups=600, times=times, checkpoint=CheckpointTimes(save_s=60.0, restart_s=3600.0), num_microbatches=16
    ... )
    >>> plan = optimize(facts, "stack")
    >>> plan.redundancy, round(plan.time_to_train_ratio, 2), round(plan.availability, 3)
    (8, 2.52, 0.919)
    >>> plan = optimize(facts, "microbatch")
    >>> plan.redundancy, round(plan.time_to_train_ratio, 2)
    (5, 1.41)
    """
    plans = candidates(facts, policy, limits)
    least = min(plan.time_to_train_ratio for plan in plans)
    return next(plan for plan in plans if plan.time_to_train_ratio <= least * (1 + TOLERANCE))


def _time_and_stretch(facts: ClusterFacts, policy: Policy, redundancy: int) -> tuple[float, float]:
    """T_f in seconds, and the stretch."""
    n, times = facts.num_groups, facts.times
    if policy == "rejoin":
        lived_s = survival(n, redundancy, facts.repair).mean_s
        return lived_s, stretch_with_repair(n, redundancy, times, facts.repair, facts.num_microbatches)
    num_microbatches = facts.num_microbatches if policy == "microbatch" else 1
    lived_s = times.loss_interval_s * (endured_losses(n, redundancy) + 1)
    return lived_s, stretch(n, redundancy, times, num_microbatches)
