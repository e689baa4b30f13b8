"""Exact results for small placements by enumerating every set of lost groups; cost O(2^N N)."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import numpy.typing as npt

from spare_megatron.core.saves.survival import FloatArray
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.reorder import even_owners, reorder_microbatches

MAX_GROUPS = 22
"""More groups or domains raise ValueError: the 2^N sets take too long."""


def covered_shares(placement: Placement) -> FloatArray:
    """P(L > k) for k from 0 to N: the share of sets of k lost groups that are no wipe-out."""
    return _shares(placement.num_groups, [_bits(row) for row in placement.host_array.tolist()])


def covered_domain_shares(placement: Placement, domain_of: npt.NDArray[np.int64]) -> FloatArray:
    """`covered_shares` for lost domains: the share of sets of j whole domains that are no wipe-out, j from 0 to D."""
    return _shares(int(domain_of.max()) + 1, [_bits(row) for row in domain_of[placement.host_array].tolist()])


def mean_makespans(placement: Placement, num_microbatches: int) -> FloatArray:
    """Mean makespan of `stacking.reorder` in stacks over the sets of k lost groups that are no wipe-out.

    Entry k is that for k lost; entries stop before the first k for which every set is a wipe-out.
    """
    _check(placement.num_groups)
    means = []
    for k in range(placement.num_groups):
        makespans = list(_makespans(placement, k, num_microbatches))
        if not makespans:
            break
        means.append(np.mean(makespans) / num_microbatches)
    return np.array(means)


def _makespans(placement: Placement, num_lost: int, num_microbatches: int) -> Iterator[int]:
    everyone = frozenset(map(GroupId, range(placement.num_groups)))
    owners = even_owners(placement, num_microbatches)
    for lost in combinations(sorted(everyone), num_lost):
        alive = everyone.difference(lost)
        if not placement.uncovered(alive):
            yield reorder_microbatches(placement, alive, owners).makespan


def _shares(num_items: int, fatal: list[int]) -> FloatArray:
    """For each set size, the share of item sets that contain none of the `fatal` ones; sets are bit masks."""
    _check(num_items)
    sets = np.arange(2**num_items, dtype=np.int64)
    is_covered = np.ones(sets.size, dtype=np.bool_)
    for mask in set(fatal):
        is_covered &= (sets & mask) != mask
    size = sum((sets >> bit) & 1 for bit in range(num_items))
    return np.bincount(size, weights=is_covered) / np.bincount(size)


def _bits(items: list[int]) -> int:
    return sum(1 << item for item in set(items))


def _check(num_items: int) -> None:
    if num_items > MAX_GROUPS:
        raise ValueError(f"{num_items} groups or domains have too many sets to enumerate; up to {MAX_GROUPS} will do")
