"""How wide groups should be: plans for the same ranks in groups of several lanes.

Symbols: N groups of one lane, so N / D of D lanes; m microbatches that a lane computes in a step without losses. A
shard then has D m microbatches, which a group computes D at a time: ceil(ceil((N / D) D m / alive) / D) =
ceil((N / D) m / alive), so that step and patch in stacks are those of N / D groups with m microbatches per shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spare_megatron.tools.plan.facts import ClusterFacts, HoldingLimits, Policy
from spare_megatron.tools.plan.plan import Plan, optimize, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthPlan:
    num_lanes: int
    """D."""
    num_groups: int
    plan: Plan
    lost_share: float
    """Share of all ranks that a loss takes away until a group is whole again: a group, or with the policy "reform" at
    most a group."""


def plans_by_width(
    facts: ClusterFacts,
    policy: Policy,
    widths: Sequence[int],
    *,
    over_groups_s: float = 0.0,
    redundancy: int | None = None,
    limits: HoldingLimits | None = None,
) -> tuple[WidthPlan, ...]:
    """The best plan, or that of `redundancy`, at each number of lanes; `facts` are those of one lane.

    Of `facts.times.reduce_s`, `over_groups_s` are transfers between groups, which fall by D. ValueError: a width does
    not divide the groups or a domain, or errors as for `optimize`.
    """
    found = []
    for width in widths:
        wide = widened(facts, width, over_groups_s)
        plan = optimize(wide, policy, limits) if redundancy is None else predict(wide, policy, redundancy)
        # The step without losses differs from that of one lane, in which times to train are counted.
        ratio = plan.time_to_train_ratio * wide.times.step_s / facts.times.step_s
        found.append(
            WidthPlan(
                num_lanes=width,
                num_groups=wide.num_groups,
                plan=replace(plan, time_to_train_ratio=ratio),
                lost_share=1 / wide.num_groups,
            )
        )
    return tuple(found)


def widened(facts: ClusterFacts, width: int, over_groups_s: float = 0.0) -> ClusterFacts:
    """The same ranks in groups of `width` times as many; arguments and errors as for `plans_by_width`."""
    if width < 1 or facts.num_groups % width:
        raise ValueError(f"{width} lanes do not divide the {facts.num_groups} groups of one lane")
    if facts.has_domains and facts.groups_per_domain % width:
        raise ValueError(f"{width} lanes do not divide a domain of {facts.groups_per_domain} groups of one lane")
    if not 0 <= over_groups_s <= facts.times.reduce_s:
        raise ValueError(f"over_groups_s={over_groups_s} has to be from 0 to reduce_s={facts.times.reduce_s}")
    reduce_s = facts.times.reduce_s - over_groups_s * (1 - 1 / width)
    rejoin, reform = facts.rejoin, facts.reform
    if reform is not None:
        least = None if reform.least_machines is None else reform.least_machines * width
        reform = replace(reform, machines_per_group=reform.machines_per_group * width, least_machines=least)
    return replace(
        facts,
        num_groups=facts.num_groups // width,
        times=replace(facts.times, reduce_s=reduce_s),
        rejoin=None if rejoin is None else replace(rejoin, num_spares=rejoin.num_spares // width),
        reform=reform,
        groups_per_domain=max(1, facts.groups_per_domain // width),
    )
