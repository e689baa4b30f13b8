"""SPARe's own model (arXiv 2603.00357): endured losses, mean overhead, availability, cadence and best redundancy.

The lost half interval counts as time beyond T_f here, so the best interval grows with the time of a restart. The
planner counts it as part of T_f (`tools.plan.plan`); the two agree where T_f is well above T_r and T_c. Symbols and
array shapes as in `tools.plan.overhead`.
"""

from math import floor, gamma, sqrt

import numpy as np

from spare_megatron.core.saves.survival import FloatArray, coverage_probabilities, lost_counts
from spare_megatron.tools.plan.facts import CheckpointTimes
from spare_megatron.tools.plan.overhead import StepTimes, least_makespans
from spare_megatron.tools.plan.plan import closed_form_redundancy


def asymptotic_endured_losses(num_groups: int, redundancy: int) -> float:
    """Expected losses before a wipe-out as SPARe defines it: mu(N, r) = Gamma(1/r) / r * N^(1 - 1/r).

    arXiv 2603.00357: the integral of exp(-N (k/N)^r) over k >= 0, with independent shards and groups drawn with
    replacement. Against Monte Carlo of Golomb placements, N in {200, 600, 1000}, r from 2 to 20: 0.68% off on average
    (the paper states 1.13%), at most 4.5% (N = 200, r = 2); `endured_losses` is 0.17% off, at most 0.5%
    (benchmarks/planner_formulas.py, 8000 orders of losses and more).

    >>> round(asymptotic_endured_losses(600, 20))
    424
    """
    return float(gamma(1 / redundancy) / redundancy * num_groups ** (1 - 1 / redundancy))


def patch_probabilities(makespans: FloatArray, patch: FloatArray, times: StepTimes) -> FloatArray:
    """P_k = rho_k / patch: the probability that a step needs a patch, with the patch counted as part of the step.

    P = 1 - exp(-T / loss_interval_s), T = (makespan + P patch) shard_s + reduce_s. The iteration rises from P = 0 and
    is bounded by 1, so it converges to the least solution. Derived; gives the paper's mean overhead with patches.
    `tools.plan.overhead.mean_step_s` counts rounds of patches instead.
    """
    probability = np.zeros_like(makespans)
    for _ in range(200):
        step_s = (makespans + probability * patch) * times.shard_s + times.reduce_s
        probability = -np.expm1(-step_s / times.loss_interval_s)
    return probability


def mean_overhead(num_groups: int, redundancy: int, times: StepTimes | None = None) -> float:
    """S_bar = (1 / floor(mu)) sum over k < floor(mu) of (c(k) + rho_k), stacks per step as SPARe counts them.

    arXiv 2603.00357. mu(N, r) is `asymptotic_endured_losses`, c(k) = ceil(N / (N - k)), and rho_k = P_k
    (`patch_probabilities`, our derivation) with patches of one stack. Without `times` rho is left out: a lower bound.
    All counts of losses weigh the same, so this is the mean stretch per loss, not per step; `tools.plan.forecast`
    weights steps by their number and is smaller.

    Without rho 0.69% off Monte Carlo on average, N in {200, 600, 1000}, r from 2 to 20 (the paper states 0.60%),
    chiefly since mu is low at high r: 0.49% with the mu of Monte Carlo; `mean_makespan` is 0.1% off
    (benchmarks/planner_formulas.py).

    >>> round(mean_overhead(600, 20), 2)
    2.34
    >>> round(mean_overhead(600, 20, StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=300.0)), 2)
    2.8
    """
    num_counts = min(floor(asymptotic_endured_losses(num_groups, redundancy)), num_groups)
    depths = least_makespans(num_groups)[:num_counts]
    if times is None:
        return float(depths.mean())
    return float((depths + patch_probabilities(depths, np.ones_like(depths), times)).mean())


def mean_makespan(num_groups: int, redundancy: int, num_microbatches: int = 1) -> float:
    """Mean stacks per step over the counts of losses until wipe-out, without patches.

    sum over k of w_k ceil(N m / (N - k)) / m, w_k = P(L > k) / sum of P(L > j): the expectation that `mean_overhead`
    approximates at floor(mu), for any m.

    >>> round(mean_makespan(600, 9), 3), round(mean_makespan(600, 9, 16), 3)
    (2.018, 1.394)
    """
    counts = lost_counts(num_groups)
    weights = coverage_probabilities(num_groups, redundancy, counts.middle) * counts.width
    return float((weights * least_makespans(num_groups, num_microbatches, counts.middle)).sum() / weights.sum())


def paper_cadence_s(time_to_failure_s: float, checkpoint: CheckpointTimes) -> float:
    """T_c* = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r)), at which `paper_availability` is highest.

    >>> round(paper_cadence_s(90000.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 1)
    3412.0
    """
    save_s = checkpoint.save_s
    return save_s + sqrt(save_s**2 + 2 * save_s * (time_to_failure_s + checkpoint.restart_s))


def paper_availability(cadence_s: float, time_to_failure_s: float, checkpoint: CheckpointTimes) -> float:
    """A(T_c) = (1 - T_s / T_c) * T_f / (T_f + T_r + T_c / 2), derived from this paper and arXiv 2410.18124.

    >>> round(paper_availability(3412.0, 90000.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 4)
    0.9277
    """
    cycle_s = time_to_failure_s + checkpoint.restart_s + cadence_s / 2
    return (1 - checkpoint.save_s / cadence_s) * time_to_failure_s / cycle_s


def paper_time_to_train(
    num_groups: int,
    redundancy: int,
    loss_interval_s: float,
    checkpoint: CheckpointTimes,
    times: StepTimes | None = None,
) -> float:
    """J(r) = S_bar / A*(mu m), time to train over the time without failures as SPARe estimates it.

    S_bar is `mean_overhead`, A* is the highest `paper_availability` at T_f = mu m: losses come every m seconds, mu are
    endured.

    Args:
        num_groups: N.
        redundancy: r.
        loss_interval_s: m, mean seconds between two losses anywhere.
        checkpoint: T_s and T_r.
        times: For the patch term of S_bar; left out without.

    >>> round(paper_time_to_train(600, 10, 300.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 3)
    2.152
    """
    time_to_failure_s = asymptotic_endured_losses(num_groups, redundancy) * loss_interval_s
    up = paper_availability(paper_cadence_s(time_to_failure_s, checkpoint), time_to_failure_s, checkpoint)
    return mean_overhead(num_groups, redundancy, times) / up


def paper_redundancy(
    num_groups: int, loss_interval_s: float, checkpoint: CheckpointTimes, times: StepTimes | None = None
) -> int:
    """The r of least J(r); the lowest of several. Arguments as for `paper_time_to_train`.

    >>> paper_redundancy(600, 300.0, CheckpointTimes(save_s=60.0, restart_s=3600.0))
    10
    """
    candidates = range(1, min(num_groups, 4 * closed_form_redundancy(num_groups)) + 1)
    return min(candidates, key=lambda r: paper_time_to_train(num_groups, r, loss_interval_s, checkpoint, times))
