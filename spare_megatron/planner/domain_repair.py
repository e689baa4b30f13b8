"""Groups that are lost by themselves and with their domains: how many are down, with and without coming back.

Symbols: N groups in D domains of g (the last may be smaller); F and F_d mean times until one group, one domain is lost;
A mean absence of a lost group, which comes back by itself.
"""

import numpy as np
from scipy.stats import binom

from spare_megatron.planner.domains import IntArray, LossIntervals
from spare_megatron.planner.endurance import FloatArray
from spare_megatron.planner.repair import RepairTimes


def domain_down_probabilities(num_groups: int, intervals: LossIntervals, absence_s: float) -> FloatArray:
    """P(i groups of one domain are down) in the steady state, i from 0 to g: a Markov chain.

    i rises by one at rate (g - i) / F, goes to g at rate 1 / F_d from anywhere, and falls by one at rate i / A.

    Args:
        num_groups: g, or any number of groups that stand in one domain.
        intervals: F and F_d.
        absence_s: A, taken as exponential.
    """
    i = np.arange(num_groups + 1)
    generator = np.zeros((num_groups + 1, num_groups + 1))
    generator[i[:-1], i[1:]] += (num_groups - i[:-1]) / intervals.group_s
    generator[i[:-1], num_groups] += 1 / intervals.domain_s
    generator[i[1:], i[:-1]] += i[1:] / absence_s
    generator[i, i] = -generator.sum(axis=1)
    balance = np.vstack((generator.T[:-1] * absence_s, np.ones(num_groups + 1)))
    right = np.zeros(num_groups + 1)
    right[-1] = 1.0
    pmf: FloatArray = np.maximum(np.linalg.solve(balance, right), 0.0)
    return pmf


def num_down_in_domains(sizes: IntArray, of_one: dict[int, FloatArray]) -> FloatArray:
    """P(k groups are down) in all domains together, k from 0 to N, domains being independent.

    Args:
        sizes: Groups of each domain.
        of_one: For each size the probabilities of 0 to size groups down, of shape (..., size + 1).
    """
    num_groups = int(sizes.sum())
    transformed = np.ones(1, dtype=np.complex128)
    for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
        transformed = transformed * np.fft.rfft(of_one[int(size)], num_groups + 1) ** int(count)
    pmf: FloatArray = np.maximum(np.fft.irfft(transformed, num_groups + 1), 0.0)
    return pmf


def down_without_repair(num_groups: int, intervals: LossIntervals, times_s: FloatArray) -> FloatArray:
    """P(i groups of one domain are down) at times since all were up, with nobody coming back; (times, g + 1).

    The domain is lost with 1 - exp(-t / F_d), and of one that is not each group with 1 - exp(-t / F).
    """
    domain_lost = -np.expm1(-times_s / intervals.domain_s)[:, None]
    group_lost = -np.expm1(-times_s / intervals.group_s)[:, None]
    pmf: FloatArray = binom.pmf(np.arange(num_groups + 1), num_groups, group_lost) * (1 - domain_lost)
    pmf[:, -1] += domain_lost[:, 0]
    return pmf


def wipe_outs_per_s(counts: IntArray, intervals: LossIntervals, absence_s: float) -> float:
    """How often some shard loses its last host, in the steady state, each shard counted by itself.

    sum over shards of (r / A) times the product over domains of P(all n hosts in it are down): what goes into the state
    of all r down goes out of it, at rate r / A.

    Args:
        counts: `planner.domains.hosts_per_domain`.
        intervals: F and F_d.
        absence_s: A.

    Notes:
        Derived. Exact for one shard. A domain may take several shards at once, which then count several times: an
        upper bound.
    """
    most, redundancy = int(counts.max()), int(counts[0].sum())
    all_down = np.array([domain_down_probabilities(n, intervals, absence_s)[-1] for n in range(1, most + 1)])
    with np.errstate(divide="ignore"):
        log_of = np.log(np.concatenate(([1.0], all_down)))
    return float(redundancy / absence_s * np.exp(log_of[counts].sum(axis=1)).sum())


def equivalent_domain_repair(counts: IntArray, intervals: LossIntervals, absence_s: float) -> RepairTimes:
    """Repair times of independent groups among which shards lose their last host as often (`wipe_outs_per_s`).

    With a share u down they do so N r u^r / A times per second.

    Notes:
        Derived. With `planner.repair.survival` the time to a wipe-out is 6 to 15% low against simulated events, N = 60
        in domains of 3, r from 2 to 4, hosts apart or not (benchmarks/planner_formulas.py).
    """
    num_shards, redundancy = counts.shape[0], int(counts[0].sum())
    rate = wipe_outs_per_s(counts, intervals, absence_s)
    share = min(max((rate * absence_s / (num_shards * redundancy)) ** (1 / redundancy), 1e-12), 1 - 1e-6)
    return RepairTimes(group_interval_s=absence_s * (1 - share) / share, repair_s=absence_s)
