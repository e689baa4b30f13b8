"""The result of `spare plan`, and its figures for programs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spare_megatron.tools.plan.facts import ClusterFacts, HoldingLimits
    from spare_megatron.tools.plan.partition_redundancy import PartitionPlan
    from spare_megatron.tools.plan.plan import Plan
    from spare_megatron.tools.plan.slow_group_costs import SlowCost
    from spare_megatron.tools.plan.width import WidthPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of `spare plan`."""

    facts: "ClusterFacts"
    plan: "Plan"
    """The plan of the requested policy."""
    frugal: "Plan"
    """The same policy with the least redundancy at which training hardly takes longer."""
    slices: "PartitionPlan"
    """How many groups should host each state partition."""
    alternatives: tuple["Plan", ...]
    """The best plan of each policy that the options allow."""
    limits: "HoldingLimits | None"
    assumed: frozenset[str]
    """Names of the facts that were not given."""
    widths: tuple["WidthPlan", ...] = ()
    """The plan of the policy for groups of each number of lanes asked for."""
    slow: "SlowCost | None" = None
    """What slow groups cost, if how often they are slow was given; beside the plan, which knows none."""


def as_figures(answer: Answer) -> dict[str, Any]:
    """The figures of `--json`; the first five keys are a contract."""
    from spare_megatron.tools.plan.audit_costs import audit_curve, audit_price, num_judges
    from spare_megatron.tools.plan.plan import closed_form_redundancy

    plan, limits = answer.plan, answer.limits
    figures: dict[str, Any] = {
        "redundancy": plan.redundancy,
        "cadence_s": plan.cadence_s,
        "endured_losses": plan.endured_losses,
        "time_to_train_ratio": plan.time_to_train_ratio,
        "availability": plan.availability,
        "policy": plan.policy,
        "stretch": plan.stretch,
        "time_to_wipe_out_s": plan.time_to_wipe_out_s,
        "frugal": asdict(answer.frugal),
        "closed_form_redundancy": closed_form_redundancy(answer.facts.num_groups),
        "stack_bytes": None if limits is None else plan.redundancy * limits.shard_bytes,
        "read_s_per_step": read_s(answer),
        "alternatives": {other.policy: asdict(other) for other in answer.alternatives},
        "slices": asdict(answer.slices),
        "audits": None
        if num_judges(plan.redundancy, last_resort=answer.facts.last_resort) == 1
        else asdict(audit_price(answer.facts.num_microbatches))
        | {"curve": [asdict(one) for one in audit_curve(answer.facts.num_microbatches)]},
        "facts": _as_facts(answer.facts),
        "assumed": sorted(answer.assumed),
    }
    if answer.slow is not None:
        figures["slow"] = asdict(answer.slow)
    if answer.widths:
        figures["widths"] = [asdict(one) for one in answer.widths]
    return figures


def _as_facts(facts: "ClusterFacts") -> dict[str, Any]:
    domain_interval_s = facts.domain_interval_s if facts.has_domains else None
    return asdict(facts) | {"domain_interval_s": domain_interval_s}


def read_s(answer: Answer) -> float | None:
    """Seconds to read the stack of one step; None unless size and rate are given."""
    if answer.limits is None or answer.limits.read_bytes_per_s is None:
        return None
    return answer.plan.redundancy * answer.limits.shard_bytes / answer.limits.read_bytes_per_s
