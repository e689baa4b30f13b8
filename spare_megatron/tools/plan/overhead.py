"""Closed forms for how much longer a step takes with groups lost: their share of the work, and patches.

Symbols: N = num_groups, and as many shards; r = redundancy, hosts per shard; m = num_microbatches, per shard; k groups
lost, 0 to N - 1 or those of `num_lost`. Work counts in stacks, the compute of one whole shard: `makespans` are stacks
per step, `patch` per round of patches, for each k. Stack granularity is the case m = 1.
"""

from dataclasses import dataclass
from math import ceil, comb, floor

import numpy as np

from spare_megatron.core.saves.survival import FloatArray, coverage_probabilities, wiped_probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The parts of a step without a loss, and how often groups are lost. ValueError if a time is out of its range."""

    shard_s: float
    """Seconds to compute one shard."""
    reduce_s: float
    """Seconds of a step that do not grow with the load, mainly the reduction."""
    loss_interval_s: float
    """Mean seconds between two losses anywhere, exponentially distributed."""

    def __post_init__(self) -> None:
        if not (self.shard_s > 0 and self.reduce_s >= 0 and self.loss_interval_s > 0):
            raise ValueError(
                f"shard_s={self.shard_s} and loss_interval_s={self.loss_interval_s} have to be above 0, "
                f"reduce_s={self.reduce_s} 0 or more"
            )

    @property
    def step_s(self) -> float:
        return self.shard_s + self.reduce_s


def least_makespans(
    num_groups: int,
    num_microbatches: int = 1,
    num_lost: FloatArray | None = None,
    num_machines: int = 1,
    least_machines: int = 1,
) -> FloatArray:
    """ceil(N m / (N - k)) / m stacks, the least that any placement allows; c(k) for m = 1. Golomb placements reach it
    nearly always: at small r, 4, the last host of several shards may dictate the makespan.

    With M = `num_machines` of a group, k are machines, and groups go on with as few as `least_machines`. With M N - k
    of them, of which groups have s or s + 1, N m / (N - k / M) is rounded up to a multiple of M / s or M / (s + 1), the
    times of a microbatch.

    >>> least_makespans(4).tolist(), least_makespans(4, 4)[:2].tolist()
    ([1.0, 2.0, 2.0, 4.0], [1.0, 1.5])
    >>> least_makespans(4, 16, np.arange(5.0), 4, 3).round(3).tolist()
    [1.0, 1.083, 1.167, 1.25, 1.333]
    """
    n, m = num_groups, num_microbatches
    alive = n * num_machines - (np.arange(n * num_machines) if num_lost is None else num_lost)
    smaller = np.clip(alive // n, least_machines, num_machines)
    sizes = np.stack((smaller, np.minimum(smaller + 1, num_machines)))
    found: FloatArray = (-(-n * m * sizes // alive) * num_machines / sizes / m).min(axis=0)
    return found


def patch_stacks(
    num_groups: int,
    redundancy: int,
    num_microbatches: int = 1,
    num_lost: FloatArray | None = None,
    *,
    fetch: float | None = None,
) -> FloatArray:
    """Expected makespan in stacks of the patch for one more loss after k; 0 for r = 1, where no loss can be patched.

    Derived: of each of min(r, m) shards a group owes ceil(m / (1 + H)) microbatches, which the H other hosts share, H ~
    Binomial(r - 1, (N - 1 - k) / (N - 1)) (really hypergeometric): E[max over shards], given that every H is 1 or more,
    and at least what all it owes, N m / (N - k), takes on all N - 1 - k survivors. With `fetch`, in stacks, any of them
    computes any shard after so long: there is no condition, and `shared_patch` takes the place of that.

    >>> float(patch_stacks(600, 5, 16)[0]), float(patch_stacks(600, 5, 16, fetch=0.0)[0])
    (0.0625, 0.0625)
    """
    k = np.arange(num_groups, dtype=np.float64) if num_lost is None else num_lost
    m, other = num_microbatches, redundancy - 1
    alive = 1 - k / max(num_groups - 1, 1)
    if other == 0 and fetch is None:
        return np.zeros_like(k)
    survivors, owed = np.maximum(num_groups - 1 - k, 1), np.ceil(num_groups * m / np.maximum(num_groups - k, 1))
    if fetch is not None:
        patch = np.zeros_like(k)
        for h in range(other + 1):
            weight = comb(other, h) * alive**h * (1 - alive) ** (other - h)
            patch += weight * shared_patch(owed, h * min(redundancy, m), survivors, fetch * m) / m
        return patch
    weights = {h: comb(other, h) * alive**h * (1 - alive) ** (other - h) for h in range(1, other + 1)}
    some = np.sum(list(weights.values()), axis=0)
    patch, below = np.zeros_like(k), np.zeros_like(k)
    for longest in sorted({_part(m, h) for h in weights}):
        share = np.sum([weight for h, weight in weights.items() if _part(m, h) <= longest], axis=0)
        upto = np.divide(share, some, out=np.zeros_like(k), where=some > 1e-12) ** min(redundancy, m)
        patch += (upto - below) * longest / m
        below = upto
    # With all other hosts lost the loss is a wipe-out; the limit for few survivors is one host that computes all.
    return np.maximum(np.where(some > 1e-12, patch, 1.0), np.ceil(owed / survivors) / m)


def _part(num_microbatches: int, num_others: int) -> int:
    """What each other host of a shard takes of what one more host owed of it."""
    return ceil(ceil(num_microbatches / (1 + num_others)) / num_others)


def shared_patch(
    num_microbatches: FloatArray | int, num_hosts: int, num_survivors: FloatArray, fetch: float
) -> FloatArray:
    """Least time T, in microbatches, in which some hosts of microbatches and all other survivors compute them: each
    host takes floor(T), each other one floor(T - fetch). Exact, as T is a whole number or that plus `fetch`.

    >>> shared_patch(64, 3, np.array([599.0, 10.0]), 0.25).tolist(), shared_patch(6, 2, np.array([599.0]), 9.0).tolist()
    ([1.25, 7.25], [3.0])
    """
    m, h, s = num_microbatches, np.minimum(num_hosts, num_survivors), num_survivors
    late = fetch + np.maximum(np.ceil((m - h * floor(fetch)) / s), 1)
    whole = np.ceil((m + (s - h) * ceil(fetch)) / s)
    least = np.where(whole > ceil(fetch), np.minimum(late, whole), late)
    return np.minimum(least, np.ceil(m / h)) if num_hosts else least


def mean_step_s(
    makespans: FloatArray, patch: FloatArray, times: StepTimes, pause_s: FloatArray | float = 0.0
) -> FloatArray:
    """Mean seconds of a step, for each k: t + (1 - exp(-t / i)) exp(p / i) p.

    t = pause_s + makespan shard_s + reduce_s is the step without losses, p = patch shard_s one round of patches, i the
    mean seconds between losses. A loss during t causes a first round and a loss during a round a further one: rounds
    are geometric with mean exp(p / i). Groups may be lost in the pause before the step, too.
    Derived. k is fixed over a step, so steps must be short relative to k mean loss intervals.
    """
    step_s = pause_s + makespans * times.shard_s + times.reduce_s
    patch_s = patch * times.shard_s
    with np.errstate(over="ignore"):  # infinity: no patch ends without a further loss
        rounds = -np.expm1(-step_s / times.loss_interval_s) * np.exp(patch_s / times.loss_interval_s)
    return step_s + np.where(patch_s > 0, rounds * patch_s, 0.0)


def wait_for_data(
    num_groups: int, redundancy: int, num_microbatches: int, fetch: float, num_lost: FloatArray | None = None
) -> FloatArray:
    """Stacks by which a step ends later because groups compute shards that they do not host, for each k. Their data are
    there after `fetch` stacks; meanwhile the groups compute what they host.

    U = N p_k shards have no host left on average; with probability P there is any. Then U / P shards are dealt out in
    single microbatches, ceil(m U / P / (N - k)) of them to each survivor. Derived; p_k from
    `core.saves.survival.wiped_probabilities`, 1 - P from `coverage_probabilities`, so `num_lost` must rise.

    >>> wait_for_data(4, 1, 4, 0.5).tolist(), wait_for_data(4, 1, 4, 1.5)[1:].tolist()
    ([0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5])
    """
    k = np.arange(num_groups, dtype=np.float64) if num_lost is None else num_lost
    orphaned = 1 - coverage_probabilities(num_groups, redundancy, k)
    num_shards = num_groups * wiped_probabilities(num_groups, redundancy, k)
    given = np.divide(num_shards, orphaned, out=np.zeros_like(k), where=orphaned > 1e-12)
    given = np.where(orphaned > 1e-12, np.maximum(given, 1.0), 0.0)
    each = np.ceil(given * num_microbatches / (num_groups - k) - 1e-9) / num_microbatches
    return orphaned * np.maximum(fetch + each - least_makespans(num_groups, num_microbatches, k), 0.0)
