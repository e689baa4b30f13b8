"""Chooses redundancy and save cadence: the plan with the least expected time to train.

Symbols: T_c seconds from the start of a save to the start of the next, T_s per save, T_f mean seconds of training and
saving until a wipe-out, T_r from a wipe-out until training resumes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, expm1, floor, log, log2
from typing import get_args

import numpy as np

from spare_megatron.core.saves.survival import optimal_cadence_s
from spare_megatron.stacking.golomb import check_redundancy
from spare_megatron.tools.plan.facts import ClusterFacts, HoldingLimits, Policy
from spare_megatron.tools.plan.forecast import Forecast, forecast, forecast_with_reform, forecast_with_rejoin

_LEAST = 1e-300


def availability(cadence_s: float, save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """A(T_c) = (T_c - T_s) / ((T_f + T_r) (exp(T_c / T_f) - 1)).

    J. T. Daly, Future Generation Computer Systems 22 (2006): exact if wipe-outs are a Poisson process and restarts do
    not fail themselves, as an interval of T_c then fails exp(T_c / T_f) - 1 times on average before it completes.
    ValueError unless T_c = `cadence_s` is at least T_s = `save_s` and above 0, and T_f = `mean_time_to_failure_s` is.

    >>> round(availability(3306.5, 60.0, 90000.0, 3600.0), 4)
    0.9269
    """
    if not (0 <= save_s <= cadence_s and cadence_s > 0):
        raise ValueError(f"cadence_s={cadence_s} has to be at least save_s={save_s} and above 0, and that 0 or more")
    if not (mean_time_to_failure_s > 0 and restart_s >= 0):
        raise ValueError(
            f"mean_time_to_failure_s={mean_time_to_failure_s} has to be above 0 and restart_s={restart_s} 0 or more"
        )
    t = cadence_s / mean_time_to_failure_s
    return (cadence_s - save_s) / (mean_time_to_failure_s + restart_s) * exp(-t) / -expm1(-t)


def best_availability(save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """A at the best cadence T_c*: A* = T_f / (T_f + T_r) exp(-T_c* / T_f). Arguments and errors as for `availability`.

    At the optimum T_c* - T_s = T_f (1 - exp(-T_c* / T_f)), by the equation in `core.saves.survival`. At least 1e-300,
    so that a time to train divided by it stays finite.

    >>> round(best_availability(60.0, 90000.0, 3600.0), 4)
    0.9269
    """
    if not restart_s >= 0:
        raise ValueError(f"restart_s={restart_s} has to be 0 or more")
    share = exp(-optimal_cadence_s(save_s, mean_time_to_failure_s) / mean_time_to_failure_s)
    return max(mean_time_to_failure_s / (mean_time_to_failure_s + restart_s) * share, _LEAST)


def closed_form_redundancy(num_groups: int) -> int:
    """r* = floor(log2 N + g / ln 2), g = 0.5772 Euler's constant, so floor(log2 N + 0.833); from 1 to N.

    arXiv 2603.00357; our derivation: c(k) jumps from 2 to 3 at k = N / 2, so r pays until mu = N / 2. With x = 1 / r,
    mu / N = Gamma(1 + x) N^-x, and Gamma(1 + x) ~ exp(-g x) for small x: 1/2 is reached at (g + ln N) / r = ln 2.

    >>> [closed_form_redundancy(n) for n in (200, 600, 1000)]
    [8, 10, 10]
    """
    return min(max(floor(log2(num_groups) + float(np.euler_gamma) / log(2)), 1), num_groups)


TOLERANCE = 1e-3
"""Share of the time to train that a higher redundancy must save, because holding shards is not free."""
FRUGAL_TOLERANCE = 0.02
"""Share of the time to train that a user short of memory may give up for fewer shards."""
MAX_CANDIDATE = 48
"""The highest redundancy tried: the best one grows with log2 N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A redundancy, and what to expect of it."""

    policy: Policy
    """Granularity, and whether groups come back."""
    redundancy: int
    cadence_s: float
    """T_c*, the best cadence."""
    endured_losses: float
    """Expected lost groups before a restart; a group that comes back counts each time."""
    time_to_wipe_out_s: float
    """T_f, from a restart on until a shard has no host and none is back within the time of one."""
    stretch: float
    """Mean step time over the step time without losses, between restarts."""
    availability: float
    """The share of time spent on steps that count: A* of the time that no pause takes."""
    time_to_train_ratio: float
    """stretch / availability: expected time to train over that without losses and saves."""
    pause_interval_s: float
    """Mean seconds of training between pauses for a host of a shard."""


@lru_cache(maxsize=512)  # the best plan of each policy and the frugal plan share candidates
def predict(facts: ClusterFacts, policy: Policy, redundancy: int) -> Plan:
    """The plan for one redundancy, at its best cadence: T_f and the stretch from `tools.plan.forecast`.

    ValueError: the redundancy is not from 1 to N, the policy is unknown, is "rejoin" without `facts.rejoin`, "reform"
    without `facts.reform`, or "stack" with hosts of last resort.
    """
    check_redundancy(facts.num_groups, redundancy)
    expected = _forecast(facts, policy, redundancy)
    time_s, slower = expected.lived_s, expected.stretch
    up = best_availability(facts.checkpoint.save_s, time_s, facts.checkpoint.restart_s)
    up = max(up * (1 - expected.pauses.share), _LEAST)
    return Plan(
        policy=policy,
        redundancy=redundancy,
        cadence_s=optimal_cadence_s(facts.checkpoint.save_s, time_s),
        endured_losses=time_s / facts.lost_group_interval_s - 1,
        time_to_wipe_out_s=time_s,
        stretch=slower,
        availability=up,
        time_to_train_ratio=slower / up,
        pause_interval_s=expected.pauses.interval_s,
    )


def candidates(facts: ClusterFacts, policy: Policy, limits: HoldingLimits | None = None) -> tuple[Plan, ...]:
    """The plans for every redundancy that the limits allow, up to MAX_CANDIDATE; ValueError if they allow none."""
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
    """The plan of least redundancy whose time to train is within a share `tolerance` of the least.

    The best cadence for each r has a closed form, so the joint optimum over (r, T_c) is a search over r. Errors as for
    `candidates`.

    >>> from spare_megatron.tools.plan.facts import CheckpointTimes
    >>> from spare_megatron.tools.plan.overhead import StepTimes
    >>> times = StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=300.0)
    >>> checkpoint = CheckpointTimes(save_s=60.0, restart_s=3600.0)
    >>> facts = ClusterFacts(num_groups=600, times=times, checkpoint=checkpoint, num_microbatches=16)
    >>> plans = [optimize(facts, "stack"), optimize(facts, "microbatch")]
    >>> [(plan.redundancy, round(plan.time_to_train_ratio, 2)) for plan in plans]
    [(8, 2.52), (5, 1.37)]
    """
    plans = candidates(facts, policy, limits)
    least = min(plan.time_to_train_ratio for plan in plans)
    return next(plan for plan in plans if plan.time_to_train_ratio <= least * (1 + tolerance))


def without_smaller_groups(facts: ClusterFacts, redundancy: int) -> tuple[Plan, ...]:
    """With whole groups alone, and then with one spare machine more; none if the facts have no smaller groups."""
    reform = facts.reform
    if reform is None or reform.least == reform.machines_per_group:
        return ()
    whole = replace(reform, least_machines=None)
    spared = replace(whole, num_spares=whole.num_spares + 1)
    return tuple(predict(replace(facts, reform=one), "reform", redundancy) for one in (whole, spared))


def _forecast(facts: ClusterFacts, policy: Policy, redundancy: int) -> Forecast:
    match policy:
        case "stack" if facts.last_resort:
            raise ValueError("last_resort takes single microbatches; the policy stack moves whole shards")
        case "stack":
            return forecast(facts, redundancy, 1)
        case "microbatch":
            return forecast(facts, redundancy, facts.num_microbatches)
        case "rejoin":
            if facts.rejoin is None:
                raise ValueError("the policy rejoin needs the time after which a lost group is back: rejoin.repair_s")
            return forecast_with_rejoin(facts, redundancy, facts.num_microbatches, facts.rejoin)
        case "reform":
            if facts.reform is None:
                raise ValueError("the policy reform needs the time to re-form a group and its machines: facts.reform")
            return forecast_with_reform(facts, redundancy, facts.num_microbatches, facts.reform)
        case _:
            raise ValueError(f"policy {policy!r} is unknown; known: {', '.join(get_args(Policy))}")
