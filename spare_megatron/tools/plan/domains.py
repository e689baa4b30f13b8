"""Closed forms for runs in which whole racks or power domains are lost.

Symbols: N groups in D domains; r hosts of a shard, in e domains with n_1 to n_e hosts each. e decides how much a shard
endures; `stacking.placement.make_placement` with `groups_per_domain` spreads hosts so that e = r where possible. F and
F_d: mean time between losses of one group and of one domain; A: mean absence of a lost group. `domain_of` has the
domain of each group, 0 to D - 1; `counts` is `hosts_per_domain`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from spare_megatron.core.saves.survival import FloatArray, wiped_probabilities
from spare_megatron.stacking.placement import Placement
from spare_megatron.tools.plan.repair import RepairTimes

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossIntervals:
    """Mean seconds between independent losses; ValueError unless both are above 0."""

    group_s: float
    """F, of one group by itself."""
    domain_s: float
    """F_d, of one whole domain."""

    def __post_init__(self) -> None:
        if not (self.group_s > 0 and self.domain_s > 0):
            raise ValueError(f"group_s={self.group_s} and domain_s={self.domain_s} have to be above 0")


def consecutive_domains(num_groups: int, groups_per_domain: int) -> IntArray:
    """The domain of each group where a domain is a range of consecutive ids, as in `stacking.placement`."""
    return np.arange(num_groups) // groups_per_domain


def hosts_per_domain(placement: Placement, domain_of: IntArray) -> IntArray:
    """Counts the hosts of each shard in each domain: shape (num_shards, D). ValueError if the arguments do not fit."""
    if domain_of.shape != (placement.num_groups,) or domain_of.min() < 0:
        raise ValueError(f"domains of shape {domain_of.shape} do not fit {placement.num_groups} groups")
    num_domains = int(domain_of.max()) + 1
    cells = np.arange(placement.num_groups)[:, None] * num_domains + domain_of[placement.host_array]
    counts = np.bincount(cells.ravel(), minlength=placement.num_groups * num_domains)
    return counts.reshape(-1, num_domains).astype(np.int64)


def domain_coverage_probabilities(counts: IntArray) -> FloatArray:
    """P(no wipe-out after the loss of j whole domains), j from 0 to D, with no other losses.

    C(D - s, j) / C(D, j) for the s domains that hold all hosts of some shard, times the product over the other distinct
    sets of e domains of 1 - C(D - e, j - e) / C(D, j). Shards on the same domains count once; distinct sets are taken
    as independent. Derived.
    """
    num_domains = counts.shape[1]
    patterns = np.unique(counts > 0, axis=0)
    covered = np.ones(num_domains + 1)
    for num_needed, num_patterns in zip(*np.unique(patterns.sum(axis=1), return_counts=True), strict=True):
        if num_needed == 1:  # domains fatal alone: C(D - s, j) / C(D, j), all s among those left
            covered *= wiped_probabilities(num_domains, int(num_patterns))[::-1]
        else:
            covered *= (1 - wiped_probabilities(num_domains, int(num_needed))) ** int(num_patterns)
    return covered


def coverage_over_time(counts: IntArray, intervals: LossIntervals) -> tuple[FloatArray, FloatArray]:
    """Times, and P(no wipe-out by each time), with groups and whole domains that never come back.

    At time t: product over patterns of sum over h of P_h (1 - q_g^(r - h))^c, for the c shards with the same hosts per
    domain. h of their r hosts are lost with their domains, with probability P_h (a domain is lost with
    q_d = 1 - exp(-t / F_d)); each other host is lost by itself with q_g = 1 - exp(-t / F).
    Derived; exact within a pattern, patterns taken as independent, which by Harris's inequality is a lower bound.
    """
    times_s = times_to_look_at_s(intervals)
    lost_domain = -np.expm1(-times_s / intervals.domain_s)
    lost_group = -np.expm1(-times_s / intervals.group_s)
    covered = np.ones_like(times_s)
    patterns, num_shards = np.unique(_hosts_and_domains(counts), axis=0, return_counts=True)
    num_hosts = np.sort(patterns[:, : patterns.shape[1] // 2], axis=1)  # which domains they are makes no difference
    shapes = np.column_stack((num_shards, num_hosts))
    for shape, repeats in zip(*np.unique(shapes, axis=0, return_counts=True), strict=True):
        here = shape[1:][shape[1:] > 0].tolist()
        covered *= _pattern_coverage(here, int(shape[0]), lost_domain, lost_group) ** int(repeats)
    return times_s, covered


def _hosts_and_domains(counts: IntArray) -> IntArray:
    """For each shard the host count of each of its domains, then the ids of these domains; both padded with zeros."""
    shard, domain = np.nonzero(counts)
    num_domains = np.bincount(shard, minlength=len(counts))
    place = np.arange(len(shard)) - np.repeat(np.cumsum(num_domains) - num_domains, num_domains)
    most = int(num_domains.max())
    found = np.zeros((len(counts), 2 * most), dtype=np.int64)
    found[shard, place] = counts[shard, domain]
    found[shard, most + place] = domain
    return found


def times_to_look_at_s(intervals: LossIntervals) -> FloatArray:
    """The times at which survival is evaluated: 0, then 400 up to 100 times the shorter interval, log-spaced."""
    shortest_s = min(intervals.group_s, intervals.domain_s)
    return np.concatenate(([0.0], np.geomspace(1e-6, 1e2, 400) * shortest_s))


def _pattern_coverage(
    hosts_in: list[int], num_shards: int, lost_domain: FloatArray, lost_group: FloatArray
) -> FloatArray:
    """P(none of `num_shards` shards with the same hosts per domain has lost all hosts), at each time."""
    redundancy = sum(hosts_in)
    gone = np.zeros((redundancy + 1, lost_domain.size))  # gone[h]: P(h hosts are lost with their domains)
    gone[0] = 1.0
    for n in hosts_in:
        gone[n:] = gone[n:] * (1 - lost_domain) + gone[: redundancy + 1 - n] * lost_domain
        gone[:n] *= 1 - lost_domain
    left = redundancy - np.arange(redundancy + 1)
    covered: FloatArray = (gone * (1 - lost_group ** left[:, None]) ** num_shards).sum(axis=0)
    return covered


def domain_down_probabilities(num_groups: int, intervals: LossIntervals, absence_s: float) -> FloatArray:
    """P(i of a domain's groups are down), i from 0 to g = num_groups: the steady state of a Markov chain.

    i rises by one at rate (g - i) / F, jumps to g at rate 1 / F_d, and falls by one at rate i / A (A exponential).
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
    """P(k groups are down) over all domains together, k from 0 to N, with independent domains. `sizes`: groups of each
    domain; `of_one`: domain size -> P(0 to size groups down), shape (..., size + 1).
    """
    num_groups = int(sizes.sum())
    transformed = np.ones(1, dtype=np.complex128)
    for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
        transformed = transformed * np.fft.rfft(of_one[int(size)], num_groups + 1) ** int(count)
    pmf: FloatArray = np.maximum(np.fft.irfft(transformed, num_groups + 1), 0.0)
    return pmf


def down_without_repair(num_groups: int, intervals: LossIntervals, times_s: FloatArray) -> FloatArray:
    """P(i groups of one domain are down) at each time since all were up, with no repair; shape (times, g + 1).

    The domain is lost with 1 - exp(-t / F_d); otherwise each group is lost with 1 - exp(-t / F).
    """
    domain_lost = -np.expm1(-times_s / intervals.domain_s)[:, None]
    group_lost = -np.expm1(-times_s / intervals.group_s)[:, None]
    pmf: FloatArray = binom.pmf(np.arange(num_groups + 1), num_groups, group_lost) * (1 - domain_lost)
    pmf[:, -1] += domain_lost[:, 0]
    return pmf


def wipe_outs_per_s(counts: IntArray, intervals: LossIntervals, absence_s: float) -> float:
    """Steady-state rate at which shards lose their last host, each shard counted by itself.

    sum over shards of (r / A) times the product over domains of P(all n hosts in it are down): a shard enters the
    all-down state as often as it leaves it, at rate r / A. Derived. Exact for one shard; an upper bound for all, since
    one lost domain can take the last host of several.
    """
    most, redundancy = int(counts.max()), int(counts[0].sum())
    all_down = np.array([domain_down_probabilities(n, intervals, absence_s)[-1] for n in range(1, most + 1)])
    with np.errstate(divide="ignore"):
        log_of = np.log(np.concatenate(([1.0], all_down)))
    return float(redundancy / absence_s * np.exp(log_of[counts].sum(axis=1)).sum())


def equivalent_domain_repair(counts: IntArray, intervals: LossIntervals, absence_s: float) -> RepairTimes:
    """Repair times of independent groups whose shards lose their last host at the same rate (`wipe_outs_per_s`).

    Derived: independent groups that are down for a share u of the time do so N r u^r / A times a second; solved for u.
    """
    num_shards, redundancy = counts.shape[0], int(counts[0].sum())
    rate = wipe_outs_per_s(counts, intervals, absence_s)
    share = min(max((rate * absence_s / (num_shards * redundancy)) ** (1 / redundancy), 1e-12), 1 - 1e-6)
    return RepairTimes(group_interval_s=absence_s * (1 - share) / share, repair_s=absence_s)
