"""Compares how fast ranks compute, waiting excluded, with the same rank position in the other groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

MOST_SAMPLES = 1024
"""Attempts that are kept; of a longer run every second, fourth and so on."""
_LEAST_STEPS = 16
"""Steps in which a rank must have computed to be called slow, if any rank has computed in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The slowest rank and the second slowest, by position in the group."""

    group: int
    rank: int
    ratio: float
    """Median over steps of its time per microbatch, over that of the same position in the other groups."""
    next_group: int
    next_rank: int
    next_ratio: float


class RankPaces:
    """Seconds per microbatch of each rank, for one in `every` attempts, at most `MOST_SAMPLES` of them."""

    def __init__(self, num_groups: int, turns: Sequence[int]) -> None:
        """`turns`: as in `RunRecord`."""
        self.every = 1
        self._turns = np.array(turns)
        self._num_turns = max(turns, default=0) + 1
        self._shape = (MOST_SAMPLES, num_groups, len(turns))
        self._pace_s: Array = np.empty((0, num_groups, len(turns)), np.float32)

    def add(self, attempt: int, group: int, compute_s: Sequence[float], load: float) -> None:
        if len(compute_s) != self._shape[2] or not load > 0:
            return
        if not len(self._pace_s):  # a simulated run has none
            self._pace_s = np.full(self._shape, np.nan, np.float32)
        while attempt // self.every >= MOST_SAMPLES:
            self._pace_s[: MOST_SAMPLES // 2] = self._pace_s[::2]
            self._pace_s[MOST_SAMPLES // 2 :] = np.nan
            self.every *= 2
        if attempt % self.every == 0:
            passes = np.ceil((load - self._turns) / self._num_turns)  # of a patch possibly one more
            pace_s = np.where(passes > 0, np.asarray(compute_s) / np.maximum(passes, 1), np.nan)
            self._pace_s[attempt // self.every, group] = pace_s

    def of(self, attempts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], Array]:
        """Indices of the attempts that are kept, and their paces: shape (kept, groups, ranks), NaN if unknown."""
        is_kept = (attempts % self.every == 0) & (attempts // self.every < len(self._pace_s))
        kept = np.flatnonzero(is_kept)
        return kept, self._pace_s[attempts[kept] // self.every]


def over_others(pace_s: Array) -> Array:
    """Each rank's pace over the median of its position in the other groups; shape (steps, groups, ranks), or NaN."""
    num_there = np.sum(~np.isnan(pace_s), axis=1, keepdims=True)
    order = np.argsort(pace_s, axis=1)  # NaN come last
    place = np.argsort(order, axis=1)
    ordered = np.take_along_axis(pace_s, order, axis=1)
    others = []
    for middle in ((num_there - 2) // 2, (num_there - 1) // 2):  # of the ordered others, without the rank itself
        skipping = np.maximum(middle, 0) + (middle >= place)
        others.append(np.take_along_axis(ordered, np.minimum(skipping, pace_s.shape[1] - 1), axis=1))
    return np.where(num_there > 1, pace_s * 2 / (others[0] + others[1]), np.nan).astype(np.float32)


def find_slowest(ratios: Array) -> Slowest | None:
    """The slowest rank by the ratios of `over_others`; None unless two ranks can be compared."""
    num_steps = np.sum(~np.isnan(ratios), axis=0)
    enough = min(_LEAST_STEPS, int(num_steps.max(initial=0)))
    if not enough:
        return None
    typical = np.nanmedian(np.where(num_steps < enough, -np.inf, ratios), axis=0)
    first, second = np.argsort(-typical, axis=None, kind="stable")[:2]
    (group, rank), (next_group, next_rank) = (divmod(int(index), typical.shape[1]) for index in (first, second))
    return Slowest(
        group=group,
        rank=rank,
        ratio=float(typical[group, rank]),
        next_group=next_group,
        next_rank=next_rank,
        next_ratio=float(typical[next_group, next_rank]),
    )
