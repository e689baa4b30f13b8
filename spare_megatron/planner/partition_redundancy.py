"""How often the state of a slice of the optimizer is lost with all its hosts, and how many hosts are enough.

Symbols: N groups and as many slices; r_o hosts of each slice; F mean time between two losses of one group; R_o mean
time from the loss of a host until another group has its copy and counts as a host.
"""

from dataclasses import dataclass

from spare_megatron.planner.endurance import coverage_probabilities, lost_counts
from spare_megatron.planner.facts import ClusterFacts
from spare_megatron.planner.plan import TOLERANCE, Plan, best_availability
from spare_megatron.planner.repair import RepairTimes, survival

MAX_CANDIDATE = 8
"""No higher r_o is tried: each host more lengthens the time to a wipe-out by about F / R_o."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """A number of hosts for the slices of the optimizer state, and what to expect of it.

    Attributes:
        redundancy: r_o.
        copy_s: Seconds in which one copy is made.
        time_to_wipe_out_s: Mean seconds until a slice has lost all hosts.
        time_to_wipe_out_without_copies_s: The same if no copy were ever made anew.
        time_to_train_ratio: Of the plan, with restarts for lost state, too.
    """

    redundancy: int
    copy_s: float
    time_to_wipe_out_s: float
    time_to_wipe_out_without_copies_s: float
    time_to_train_ratio: float


def state_time_to_wipe_out_s(num_groups: int, redundancy: int, group_interval_s: float, back_s: float | None) -> float:
    """Mean seconds until some slice has lost all its hosts, from when all have r_o.

    With copies made anew a slice is what a shard is where groups come back, with R_o in the place of the repair:
    `planner.repair.survival`. For R_o << F that is about F^r_o / (N r_o R_o^(r_o - 1)): r_o losses among the hosts of
    one slice, all within the time of one copy. Without, a group is a host of its first slices until its first loss,
    whether it comes back or not. With k groups lost once the next first loss comes after F / (N - k) on average, so
    that the mean is the sum over k of P(no wipe-out after k losses) F / (N - k).

    Args:
        num_groups: N.
        redundancy: r_o, from 1 to N.
        group_interval_s: F.
        back_s: R_o, above 0; None if no copies are made.

    Raises:
        ValueError: The redundancy or a time does not fit.

    Notes:
        Derived. Against random losses of `stacking.state_partitions` within 9%, N from 12 to 60, r_o = 2 and 3, of
        which up to 6% is noise (tests/unit/test_planner_slices.py has fewer samples of the same, and a simulated run).

    >>> round(state_time_to_wipe_out_s(600, 1, 180000.0, 60.0))
    300
    >>> round(state_time_to_wipe_out_s(600, 2, 180000.0, 60.0) / 3600)
    125
    """
    if back_s is not None:
        repair = RepairTimes(group_interval_s=group_interval_s, repair_s=back_s)
        return survival(num_groups, redundancy, repair).mean_s
    counts = lost_counts(num_groups)
    covered = coverage_probabilities(num_groups, redundancy, counts.middle) * counts.width
    return float((covered * group_interval_s / (num_groups - counts.middle)).sum())


def plan_slices(facts: ClusterFacts, plan: Plan, copy_s: float) -> SlicePlan:
    """The least r_o with which lost state costs next to nothing beside lost shards.

    State and shards are taken to be wiped out independently, so that their rates add up. A loss is acted on when the
    groups have done their work of the step, and a copy counts from the next commit on: R_o is the time of the copy and
    a step, half of it before and half after.

    Args:
        facts: The cluster.
        plan: What it trains with.
        copy_s: Seconds in which one copy is made, above 0.

    Returns:
        The plan of the least r_o whose time to train is within `planner.plan.TOLERANCE` of that without slices, else of
        the largest that was tried.
    """
    back_s = copy_s + facts.times.step_s * plan.stretch
    group_interval_s = facts.num_groups * facts.lost_group_interval_s
    found = None
    for redundancy in range(1, min(facts.num_groups, MAX_CANDIDATE) + 1):
        time_s, without_s = (
            state_time_to_wipe_out_s(facts.num_groups, redundancy, group_interval_s, after_s)
            for after_s in (back_s, None)
        )
        lived_s = 1 / (1 / plan.time_to_wipe_out_s + 1 / time_s)
        up = best_availability(facts.checkpoint.save_s, lived_s, facts.checkpoint.restart_s)
        found = SlicePlan(
            redundancy=redundancy,
            copy_s=copy_s,
            time_to_wipe_out_s=time_s,
            time_to_wipe_out_without_copies_s=without_s,
            time_to_train_ratio=plan.stretch / up,
        )
        if found.time_to_train_ratio <= plan.time_to_train_ratio * (1 + TOLERANCE):
            break
    assert found is not None, "there is at least one group"
    return found
