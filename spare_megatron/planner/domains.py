"""Racks and power domains: what it takes when all groups of a domain are lost together.

Symbols: N groups in D domains; a shard has hosts in e of them, n_1 to n_e hosts in each. What matters is e: a placement
that spreads the hosts of a shard over domains has e = r: `stacking.placement.make_placement` with `groups_per_domain`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.integrate import trapezoid
from scipy.stats import binom

from spare_megatron.planner.endurance import FloatArray, wiped_probabilities
from spare_megatron.planner.repair import RepairTimes
from spare_megatron.stacking.placement import Placement

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossIntervals:
    """Mean seconds between losses; losses come independently of each other.

    Attributes:
        group_s: Of one group, for reasons of its own.
        domain_s: Of one whole domain.

    Raises:
        ValueError: A time is not above 0.
    """

    group_s: float
    domain_s: float

    def __post_init__(self) -> None:
        if not (self.group_s > 0 and self.domain_s > 0):
            raise ValueError(f"group_s={self.group_s} and domain_s={self.domain_s} have to be above 0")


def consecutive_domains(num_groups: int, groups_per_domain: int) -> IntArray:
    """For each group its domain, where domains are groups of consecutive ids, as in `stacking.placement`.

    >>> consecutive_domains(5, 2).tolist()
    [0, 0, 1, 1, 2]
    """
    return np.arange(num_groups) // groups_per_domain


def hosts_per_domain(placement: Placement, domain_of: IntArray) -> IntArray:
    """How many hosts each shard has in each domain: shape (num_shards, D).

    Args:
        placement: The hosts of every shard.
        domain_of: For each group its domain, 0 to D - 1.

    Raises:
        ValueError: The domains do not fit the placement.
    """
    if domain_of.shape != (placement.num_groups,) or domain_of.min() < 0:
        raise ValueError(f"domains of shape {domain_of.shape} do not fit {placement.num_groups} groups")
    num_domains = int(domain_of.max()) + 1
    cells = np.arange(placement.num_groups)[:, None] * num_domains + domain_of[placement.host_array]
    counts = np.bincount(cells.ravel(), minlength=placement.num_groups * num_domains)
    return counts.reshape(-1, num_domains).astype(np.int64)


def domain_coverage_probabilities(counts: IntArray) -> FloatArray:
    """P(no wipe-out after j whole domains are lost), j from 0 to D, groups being lost in no other way.

    C(D - s, j) / C(D, j) for the s domains that hold all hosts of some shard, times the product over other shards of
    1 - C(D - e, j - e) / C(D, j): shards with the same domains counted once (they are lost together) and different
    ones taken as independent.

    Args:
        counts: `hosts_per_domain`.

    Notes:
        Derived; `planner.endurance.coverage_probabilities` with domains for groups. Expected domains endured are the
        sum from j = 1: against exact enumeration within 20% for N = 24, D from 6 to 12, r from 2 to 3; against Monte
        Carlo within 4% for Golomb and 7% for consecutive offsets, N = 200, D = 50, r from 3 to 8.
    """
    num_domains = counts.shape[1]
    patterns = np.unique(counts > 0, axis=0)
    covered = np.ones(num_domains + 1)
    for num_needed, num_patterns in zip(*np.unique(patterns.sum(axis=1), return_counts=True), strict=True):
        if num_needed == 1:  # domains that are fatal alone: C(D - s, j) / C(D, j), as if they all were among those left
            covered *= wiped_probabilities(num_domains, int(num_patterns))[::-1]
        else:
            covered *= (1 - wiped_probabilities(num_domains, int(num_needed))) ** int(num_patterns)
    return covered


def endured_domains(counts: IntArray) -> float:
    """Expected losses of whole domains before a wipe-out. Times the groups per domain: the groups lost by then.

    Args:
        counts: `hosts_per_domain`.
    """
    return float(domain_coverage_probabilities(counts)[1:].sum())


def wipe_out_probability(counts: IntArray, domain_of: IntArray, num_lost: int) -> float:
    """P(the loss of one whole domain is a wipe-out), any domain alike, when k groups at random are lost elsewhere.

    1 - mean over domains of the product over shards with n >= 1 hosts in it of
    1 - C(N - d - (r - n), k - (r - n)) / C(N - d, k), d the groups of the domain: the shard's other r - n hosts are
    among the k lost of the N - d others. Shards with the same hosts outside the domain are taken as independent.

    Args:
        counts: `hosts_per_domain`.
        domain_of: For each group its domain.
        num_lost: k, groups lost before, none of them in this domain; taken to be no wipe-out by themselves.

    Raises:
        ValueError: More are lost than there are groups outside a domain.

    Notes:
        Derived. Against Monte Carlo within 0.006 for Golomb and 0.05 for consecutive offsets, N = 200 in domains of 4,
        r from 3 to 8.
    """
    sizes = np.bincount(domain_of)
    redundancy = int(counts[0].sum())
    survived = []
    for domain, size in enumerate(sizes.tolist()):
        num_outside = len(domain_of) - size
        if not 0 <= num_lost <= num_outside:
            raise ValueError(f"num_lost={num_lost} has to be from 0 to {num_outside}, the groups outside a domain")
        inside = counts[:, domain]
        log_covered = 0.0
        for n, num_shards in zip(*np.unique(inside[inside > 0], return_counts=True), strict=True):
            wiped = wiped_probabilities(num_outside, redundancy - int(n))[num_lost]
            log_covered += -np.inf if wiped >= 1 else float(num_shards * np.log1p(-wiped))
        survived.append(np.exp(log_covered))
    return 1 - float(np.mean(survived))


def time_to_wipe_out_s(counts: IntArray, intervals: LossIntervals) -> float:
    """Mean seconds from all groups up to a wipe-out: the integral over time of `coverage_over_time`."""
    times_s, covered = coverage_over_time(counts, intervals)
    return float(trapezoid(covered, times_s))


def coverage_over_time(counts: IntArray, intervals: LossIntervals) -> tuple[FloatArray, FloatArray]:
    """Times, and P(no wipe-out by then), with groups and whole domains lost for good.

    At time t: product over patterns of sum over h of P_h (1 - q_g^(r - h))^c, for the c shards with the same
    hosts per domain: h of their r hosts are gone with their domains, with probability P_h (each domain is lost with
    q_d = 1 - exp(-t / domain_s)), and each of the others by itself with q_g = 1 - exp(-t / group_s).

    Args:
        counts: `hosts_per_domain`.
        intervals: Of one group and of one domain.

    Notes:
        Derived; patterns are taken as independent of each other, shards of one pattern exactly. That makes it a lower
        bound (Harris's inequality: to lose no shard of one pattern makes losing none of another more likely). Against
        simulated losses, N = 200 in domains of 4, r from 3 to 8: 4 to 6% low for Golomb offsets, 10 to 35% for
        consecutive ones. Trapezoids at 400 times evenly spaced in their logarithm.
    """
    times_s = times_to_look_at_s(intervals)
    lost_domain = -np.expm1(-times_s / intervals.domain_s)
    lost_group = -np.expm1(-times_s / intervals.group_s)
    covered = np.ones_like(times_s)
    patterns, num_shards = np.unique(_hosts_and_domains(counts), axis=0, return_counts=True)
    num_hosts = np.sort(patterns[:, : patterns.shape[1] // 2], axis=1)  # which domains they are does not matter
    shapes = np.column_stack((num_shards, num_hosts))
    for shape, repeats in zip(*np.unique(shapes, axis=0, return_counts=True), strict=True):
        here = shape[1:][shape[1:] > 0].tolist()
        covered *= _pattern_coverage(here, int(shape[0]), lost_domain, lost_group) ** int(repeats)
    return times_s, covered


def _hosts_and_domains(counts: IntArray) -> IntArray:
    """For each shard the hosts in each of its domains, and then these domains; zeros at the end where it has fewer."""
    shard, domain = np.nonzero(counts)
    num_domains = np.bincount(shard, minlength=len(counts))
    place = np.arange(len(shard)) - np.repeat(np.cumsum(num_domains) - num_domains, num_domains)
    most = int(num_domains.max())
    found = np.zeros((len(counts), 2 * most), dtype=np.int64)
    found[shard, place] = counts[shard, domain]
    found[shard, most + place] = domain
    return found


def times_to_look_at_s(intervals: LossIntervals) -> FloatArray:
    """Times from 0 on at which the run is looked at, evenly spaced in their logarithm."""
    shortest_s = min(intervals.group_s, intervals.domain_s)
    return np.concatenate(([0.0], np.geomspace(1e-6, 1e2, 400) * shortest_s))


def _pattern_coverage(
    hosts_in: list[int], num_shards: int, lost_domain: FloatArray, lost_group: FloatArray
) -> FloatArray:
    """P(none of some shards with the same hosts per domain has lost all hosts), at each time."""
    redundancy = sum(hosts_in)
    gone = np.zeros((redundancy + 1, lost_domain.size))  # gone[h]: P(h hosts are gone with their domains)
    gone[0] = 1.0
    for n in hosts_in:
        gone[n:] = gone[n:] * (1 - lost_domain) + gone[: redundancy + 1 - n] * lost_domain
        gone[:n] *= 1 - lost_domain
    left = redundancy - np.arange(redundancy + 1)
    covered: FloatArray = (gone * (1 - lost_group ** left[:, None]) ** num_shards).sum(axis=0)
    return covered


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
