"""How much longer a step takes with groups lost: their share of the work, and patches.

Symbols: N groups and as many shards, r hosts of each shard, m microbatches per shard, k groups lost. Work is counted
in stacks: the compute of one whole shard. Stack granularity is the case m = 1.
"""

from dataclasses import dataclass
from math import comb, floor

import numpy as np

from spare_megatron.planner.endurance import (
    FloatArray,
    asymptotic_endured_losses,
    coverage_probabilities,
    lost_counts,
    wiped_probabilities,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What a step without a loss consists of, and how often groups are lost.

    Attributes:
        shard_s: Seconds to compute one shard.
        reduce_s: Seconds of a step that do not grow with the load: the reduction above all.
        loss_interval_s: Mean seconds between two losses anywhere, taken as exponentially distributed.

    Raises:
        ValueError: A time is out of its range.
    """

    shard_s: float
    reduce_s: float
    loss_interval_s: float

    def __post_init__(self) -> None:
        if not (self.shard_s > 0 and self.reduce_s >= 0 and self.loss_interval_s > 0):
            raise ValueError(
                f"shard_s={self.shard_s} and loss_interval_s={self.loss_interval_s} have to be above 0, "
                f"reduce_s={self.reduce_s} 0 or more"
            )

    @property
    def step_s(self) -> float:
        """Seconds of a step with nothing lost."""
        return self.shard_s + self.reduce_s


def least_makespans(num_groups: int, num_microbatches: int = 1, num_lost: FloatArray | None = None) -> FloatArray:
    """ceil(N m / (N - k)) / m stacks for k from 0 to N - 1: the least that any placement allows; c(k) for m = 1.

    Args:
        num_groups: N.
        num_microbatches: m.
        num_lost: Other k.

    Notes:
        Golomb placements reach it nearly always. On average until wipe-out, for N in {200, 600, 1000} and r in
        {4, 8, 12, 20}, `stacking.reorder` at m = 16 is 0.5 to 2.5% above at r = 4, where the last host of several
        shards comes to dictate the makespan, and less than 0.2% elsewhere; `stacking.stack_reorder` less than 0.2%.

    >>> least_makespans(4).tolist(), least_makespans(4, 4)[:2].tolist()
    ([1.0, 2.0, 2.0, 4.0], [1.0, 1.5])
    """
    alive = num_groups - (np.arange(num_groups) if num_lost is None else num_lost)
    return -(-num_groups * num_microbatches // alive) / num_microbatches


def patch_stacks(
    num_groups: int,
    redundancy: int,
    num_microbatches: int = 1,
    num_lost: FloatArray | None = None,
    *,
    last_resort: bool = False,
) -> FloatArray:
    """Expected makespan of a patch in stacks when a group is lost with k lost before it, for k from 0 to N - 1.

    E[ceil(m / H) | H >= 1] / m, H ~ Binomial(r - 1, (N - 1 - k) / (N - 1)) the surviving other hosts of the lost
    group's home shard: they share its m microbatches. What the group had from other shards are smaller pieces on other
    hosts and computed meanwhile. One stack for m = 1; 0 for r = 1, where no loss can be patched. With hosts of last
    resort there is no condition H >= 1: for H = 0 all N - 1 - k survivors share the shard.

    Args:
        num_groups: N.
        redundancy: r.
        num_microbatches: m.
        num_lost: Other k.
        last_resort: Any survivor can compute any shard.

    Notes:
        Derived. H is binomial for hypergeometric. Against `stacking.reorder.patch_work` until wipe-out, N in
        {200, 600, 1000}: 11 to 12% high at r = 4, 1 to 9% at r = 8, within 5% at r = 12 and 20. High because a group
        has given away some of its home shard by the time it is lost.

    >>> float(patch_stacks(600, 5, 16)[0])
    0.25
    """
    k = np.arange(num_groups, dtype=np.float64) if num_lost is None else num_lost
    patch = np.zeros_like(k)
    other = redundancy - 1
    if other == 0 and not last_resort:
        return patch
    alive = 1 - k / max(num_groups - 1, 1)
    some = np.zeros_like(k)
    if last_resort:
        survivors = np.maximum(num_groups - 1 - k, 1)
        some = (1 - alive) ** other
        patch = some * -(-num_microbatches // survivors) / num_microbatches
    for h in range(1, other + 1):
        weight = comb(other, h) * alive**h * (1 - alive) ** (other - h)
        patch += weight * -(-num_microbatches // h) / num_microbatches
        some += weight
    # With all others lost the loss is a wipe-out; the limit of few survivors is one host for everything.
    return np.divide(patch, some, out=np.ones_like(k), where=some > 1e-12)


def patch_probabilities(makespans: FloatArray, patch: FloatArray, times: StepTimes) -> FloatArray:
    """Rho / patch: the probability P_k that a step needs a patch, the patch counted as part of the step.

    P = 1 - exp(-T / loss_interval_s) with T = (makespan + P patch) shard_s + reduce_s, by fixed-point iteration. The
    iteration rises from P = 0 and is bounded by 1, so it converges to the least solution.

    Args:
        makespans: Stacks per step, for each k.
        patch: Stacks per patch, for each k.
        times: Times of a step.

    Notes:
        Derived; gives the paper's mean overhead with patches. `mean_step_s` counts rounds of patches instead.
    """
    probability = np.zeros_like(makespans)
    for _ in range(200):
        step_s = (makespans + probability * patch) * times.shard_s + times.reduce_s
        probability = -np.expm1(-step_s / times.loss_interval_s)
    return probability


def mean_overhead(num_groups: int, redundancy: int, times: StepTimes | None = None) -> float:
    """S_bar = (1 / floor(mu)) sum over k < floor(mu) of (c(k) + rho_k), stacks per step as SPARe counts them.

    mu(N, r) is `asymptotic_endured_losses`, c(k) = ceil(N / (N - k)), and rho_k = P_k (`patch_probabilities`): a patch
    takes one stack.

    Args:
        num_groups: N.
        redundancy: r.
        times: Times of a step; without them rho is left out and S_bar is a lower bound.

    Notes:
        arXiv 2603.00357; rho is our derivation. Every count of losses has the same weight, so this is the mean stretch
        of a step per loss, not per step: long steps are fewer (`planner.forecast` weighs them rightly and is smaller).
        Without rho it is 0.69% off Monte Carlo on average over N in {200, 600, 1000}, r from 2 to 20, where the mean of
        c(k), k below the losses endured, is taken in each order of losses; 0.79% with the state after the last of them;
        0.49% with the mu that Monte Carlo has for this mu(N, r). The paper states 0.60% and not which of them. Noise is
        0.03%: what is left is mu, which is low at high r, and that c(k) bends between floor(mu) and the losses of one
        order (benchmarks/planner_formulas.py). `mean_makespan` is 0.1% off.

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


def mean_step_s(
    makespans: FloatArray, patch: FloatArray, times: StepTimes, pause_s: FloatArray | float = 0.0
) -> FloatArray:
    """Mean seconds of a step, for each k: t + (1 - exp(-t / i)) exp(p / i) p.

    t = pause + makespan shard_s + reduce_s is the step without losses, p = patch shard_s one round of patches, i the
    mean seconds between losses. A first round follows when anything is lost during t, a further one when anything is
    lost during the round before, so rounds are geometric with mean 1 / exp(-p / i).

    Args:
        makespans: Stacks per step, for each k.
        patch: Stacks per patch, for each k.
        times: Times of a step.
        pause_s: Mean seconds that pass before the step, in which groups may be lost, too.

    Notes:
        Derived. Takes k as fixed over a step, so it wants steps short beside k mean loss intervals.
    """
    step_s = pause_s + makespans * times.shard_s + times.reduce_s
    patch_s = patch * times.shard_s
    with np.errstate(over="ignore"):  # infinite: a patch never ends without a further loss
        rounds = -np.expm1(-step_s / times.loss_interval_s) * np.exp(patch_s / times.loss_interval_s)
    return step_s + np.where(patch_s > 0, rounds * patch_s, 0.0)


def borrowed_shards(
    num_groups: int, redundancy: int, num_microbatches: int, num_lost: FloatArray | None = None
) -> FloatArray:
    """Shards beyond its stack that the group with most of them reads, with k groups lost, k from 0 to N - 1.

    For hosts of last resort. U = N p_k shards have no host left on average, P is the chance that any has none: then
    U / P are shared out in single microbatches, of which a survivor has m U / P / (N - k), rounded up, each of another
    shard; on average P min(U / P, ceil(m U / P / (N - k))).

    Args:
        num_groups: N.
        redundancy: r.
        num_microbatches: m.
        num_lost: Other k, rising.

    Notes:
        Derived; p_k from `planner.endurance.wiped_probabilities`, 1 - P from `coverage_probabilities`.

    >>> borrowed_shards(4, 1, 3)[1:].tolist()
    [1.0, 2.0, 3.0]
    """
    k = np.arange(num_groups, dtype=np.float64) if num_lost is None else num_lost
    orphaned = 1 - coverage_probabilities(num_groups, redundancy, k)
    num_shards = num_groups * wiped_probabilities(num_groups, redundancy, k)
    given = np.divide(num_shards, orphaned, out=np.zeros_like(k), where=orphaned > 1e-12)
    given = np.where(orphaned > 1e-12, np.maximum(given, 1.0), 0.0)
    each = np.ceil(given * num_microbatches / (num_groups - k) - 1e-9)
    return orphaned * np.minimum(given, each)


def mean_makespan(num_groups: int, redundancy: int, num_microbatches: int = 1) -> float:
    """Mean stacks per step over the counts of losses until wipe-out, patches left out.

    sum over k of w_k ceil(N m / (N - k)) / m, w_k = P(L > k) / sum of P(L > j): the expectation of what `mean_overhead`
    takes at floor(mu), and for any m.

    Args:
        num_groups: N.
        redundancy: r.
        num_microbatches: m.

    >>> round(mean_makespan(600, 9), 3), round(mean_makespan(600, 9, 16), 3)
    (2.018, 1.394)
    """
    counts = lost_counts(num_groups)
    weights = coverage_probabilities(num_groups, redundancy, counts.middle) * counts.width
    return float((weights * least_makespans(num_groups, num_microbatches, counts.middle)).sum() / weights.sum())
