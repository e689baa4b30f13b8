"""The redundancy and the cadence that train fastest on a given cluster."""

from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from spare_megatron.core.cadence import optimal_cadence_s
from spare_megatron.core.golomb import check_redundancy
from spare_megatron.planner.availability import best_availability
from spare_megatron.planner.facts import ClusterFacts, HoldingLimits, Policy
from spare_megatron.planner.outlook import Outlook, outlook, outlook_with_rejoin

TOLERANCE = 1e-3
"""A higher redundancy has to shorten the time to train by more than this share: holding shards is not free."""

FRUGAL_TOLERANCE = 0.02
"""What a user who is short of memory may give up of the time to train for fewer shards."""

MAX_CANDIDATE = 48
"""No higher redundancy is tried: the best one grows with log2 N."""


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


@lru_cache(maxsize=512)  # every policy's best and the frugal plan are looked for among the same
def predict(facts: ClusterFacts, policy: Policy, redundancy: int) -> Plan:
    """What to expect of one redundancy, at the best cadence for it.

    T_f and the stretch from `planner.outlook`, T_c* and A* from `core.cadence` and `planner.availability`.

    Args:
        facts: The cluster.
        policy: Granularity, and whether groups come back.
        redundancy: r, from 1 to N.

    Raises:
        ValueError: The redundancy or the policy does not fit, the policy is "rejoin" and nothing says how groups come
            back, or it is "stack" with hosts of last resort.

    Notes:
        Against simulated runs at the same assumptions within 1.2% (benchmarks/planner_formulas.py). With the published
        settings of SPARe (N = 200, 600, 1000) the best are 2.87, 2.52, 2.39 at r = 8, 8, 9 where the paper's
        simulation has 2.92, 2.49, 2.34 at r = 9, 8, 9.
    """
    check_redundancy(facts.num_groups, redundancy)
    expected = _outlook(facts, policy, redundancy)
    time_s, slower = expected.lived_s, expected.stretch
    up = best_availability(facts.checkpoint.save_s, time_s, facts.checkpoint.restart_s)
    return Plan(
        policy=policy,
        redundancy=redundancy,
        cadence_s=optimal_cadence_s(facts.checkpoint.save_s, time_s),
        endured_losses=time_s / facts.lost_group_interval_s - 1,
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


def optimize(
    facts: ClusterFacts, policy: Policy, limits: HoldingLimits | None = None, tolerance: float = TOLERANCE
) -> Plan:
    """The plan of least redundancy whose time to train is within the tolerance of the least.

    The best cadence for each r is known in closed form, so the joint optimum over (r, T_c) is a search over r.

    Args:
        facts: The cluster.
        policy: Granularity, and whether groups come back.
        limits: What stacks may cost.
        tolerance: Share of the least time to train.

    Raises:
        ValueError: As for `candidates`.

    >>> from spare_megatron.planner.optimum import CheckpointTimes
    >>> from spare_megatron.planner.overhead import StepTimes
    >>> times = StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=300.0)
    >>> facts = ClusterFacts(
    ...     num_groups=600, times=times, checkpoint=CheckpointTimes(save_s=60.0, restart_s=3600.0), num_microbatches=16
    ... )
    >>> plan = optimize(facts, "stack")
    >>> plan.redundancy, round(plan.time_to_train_ratio, 2), round(plan.availability, 3)
    (8, 2.52, 0.918)
    >>> plan = optimize(facts, "microbatch")
    >>> plan.redundancy, round(plan.time_to_train_ratio, 2)
    (5, 1.41)
    """
    plans = candidates(facts, policy, limits)
    least = min(plan.time_to_train_ratio for plan in plans)
    return next(plan for plan in plans if plan.time_to_train_ratio <= least * (1 + tolerance))


def _outlook(facts: ClusterFacts, policy: Policy, redundancy: int) -> Outlook:
    match policy:
        case "stack" if facts.last_resort:
            raise ValueError("last_resort takes single microbatches; the policy stack moves whole shards")
        case "stack":
            return outlook(facts, redundancy, 1)
        case "microbatch":
            return outlook(facts, redundancy, facts.num_microbatches)
        case "rejoin" if facts.rejoin is None:
            raise ValueError("the policy rejoin needs the time after which a lost group is back: rejoin.repair_s")
        case "rejoin":
            return outlook_with_rejoin(facts, redundancy, facts.num_microbatches, facts.rejoin)
        case _:
            raise ValueError(f"policy {policy!r} is unknown; known: {', '.join(get_args(Policy))}")
