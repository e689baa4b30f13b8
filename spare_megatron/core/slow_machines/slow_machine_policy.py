"""Decides whether a machine that holds the run back is drained and replaced.

Dealing work by pace comes first, at once and for nothing. A change costs time, so it is made only if the steps that are
left gain `MARGIN` times its cost, and when the machine has cost the run as much since it was named (the rule for ski
rental: in hindsight at most twice the least is lost).
"""

from dataclasses import dataclass
from typing import Literal

from spare_megatron.core.slow_machines.culprit import Cause

MARGIN = 2.0
LEAST_HOSTS = 2
"""Hosts of each shard that stay: one more loss must not end the run."""
REST_S = 3600.0
"""Seconds after it was drained in which the same machine is not drained again."""
ADMISSION_INTERVALS, ADMISSION_STEPS = 4.0, 5.0
"""Heartbeat intervals, and steps, that an admission is taken to cost at least until one has been measured."""
ADMISSIONS = 2
"""Of a change: of the replacement, and of the machine itself once it has passed its examination."""

Replacement = Literal["group", "machine", "none"]
"""A further group that is asked to take part, a machine of a broken group, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a machine that holds the run back."""

    machine: int
    cause: Cause
    excess_s: float
    """By which it makes a step longer: the median of the last reports, as `step_s` is."""
    mended_ratio: float
    """A step dealt by pace over one without the slow groups, if its passes are slow and work is dealt; else 0."""
    step_s: float
    lost_steps: int
    """Since it was named."""
    steps_left: int
    num_members: int
    """Groups that take part."""
    num_leaving: int
    """Those of them that have ranks on the machine."""
    least_hosts: int | None
    """Hosts that each shard has without these at least; None if every group can compute every shard."""
    replacement: Replacement
    admission_s: float
    """By which an admission makes a step longer."""
    since_drain_s: float | None = None
    """Since the machine was last drained; None if it has not been."""
    under_way: bool = False
    """Whether a machine is in quarantine."""


Rule = Literal["drain", "under way", "drained before", "redundancy", "no gain", "not yet", "too late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether the machine is drained, and by which rule; seconds that each step gains by it, and what it costs."""

    rule: Rule
    gain_s: float
    cost_s: float


def decide(of: Situation) -> Decision:
    """What to do about it. Without a replacement the other groups take its work: a step grows by k / (N - k) at most.

    >>> slow = Situation(
    ...     machine=3, cause=Cause.LINK, excess_s=0.5, mended_ratio=0.0, step_s=2.0, lost_steps=200, steps_left=1000,
    ...     num_members=8, num_leaving=1, least_hosts=2, replacement="none", admission_s=10.0,
    ... )
    >>> decide(slow)
    Decision(rule='drain', gain_s=0.2142857142857143, cost_s=20.0)
    """
    gain_s = of.step_s * (1 - 1 / of.mended_ratio) if of.mended_ratio else of.excess_s
    num_staying = of.num_members - of.num_leaving
    if of.replacement == "none" and num_staying:
        gain_s -= of.step_s * of.num_leaving / num_staying
    cost_s = ADMISSIONS * max(of.admission_s, of.step_s)  # one that was hardly seen still empties places for a while
    return Decision(rule=_rule(of, gain_s, cost_s, num_staying), gain_s=gain_s, cost_s=cost_s)


def _rule(of: Situation, gain_s: float, cost_s: float, num_staying: int) -> Rule:
    if of.under_way or not of.num_leaving:
        return "under way"
    if of.since_drain_s is not None and of.since_drain_s < REST_S:
        return "drained before"
    if num_staying < LEAST_HOSTS or (of.least_hosts is not None and of.least_hosts < LEAST_HOSTS):
        return "redundancy"
    if gain_s <= 0.0:
        return "no gain"
    if gain_s * of.steps_left < MARGIN * cost_s:
        return "too late"
    return "drain" if gain_s * of.lost_steps >= cost_s else "not yet"
