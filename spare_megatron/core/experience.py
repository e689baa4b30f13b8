"""What a run has learned of its saves and losses, all of it read off the log, and the cadence that follows.

Every group that has read the same entries knows the same, also one that has only just begun to.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import log2
from statistics import fmean

from spare_megatron.core.cadence import optimal_cadence_s
from spare_megatron.core.placement import Placement
from spare_megatron.core.survival import time_to_wipe_out_s
from spare_megatron.core.topology import GroupId

PRIOR_SAVE_S = 1.0
"""What a save is taken to cost before the first one."""
LEAST_SAVE_S = 1e-3
"""With free saves there is no best interval."""

_LAST_SAVES = 8
_OVERDUE = 5.0
"""A group that is away for this many times the mean absence is taken not to come back, and nobody else either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """An interval between saves, and all that it follows from.

    Attributes:
        interval_s: Seconds from one save to the next.
        save_s: Seconds that training stands still for a save.
        group_interval_s: Mean seconds until a given group is lost.
        absence_s: Mean seconds until a lost group takes part again; None if none does.
        time_to_wipe_out_s: Mean seconds until some shard has no host, with the groups that are there now; 0 if one has
            none already: what is committed is saved before the wipe-out that follows.
        num_losses: Groups lost so far.
        exposure_s: Seconds that groups have taken part so far, over all of them.
        num_members: Groups that take part now.
    """

    interval_s: float
    save_s: float
    group_interval_s: float
    absence_s: float | None
    time_to_wipe_out_s: float
    num_losses: int
    exposure_s: float
    num_members: int


class Experience:
    """Folded by everybody. All times are those of the log's clock.

    Args:
        group_life_s: Prior mean seconds until a given group is lost.
        placement: Who hosts what.
        last_resort: Every group can compute every shard.

    Notes:
        Losses of a group are a Poisson process whose rate has the prior Gamma(1, group_life_s): it weighs as much as
        one loss seen in group_life_s. After k losses in the exposure T its mean is (1 + k) / (group_life_s + T).
    """

    def __init__(self, group_life_s: float, placement: Placement, *, last_resort: bool) -> None:
        self._group_life_s = group_life_s
        self._placement = placement
        self._last_resort = last_resort
        self._at_s = 0.0
        self._num_losses = 0
        self._exposure_s = 0.0
        self._is_restarting = False
        self._step_s = 0.0  # the last that no restart is in
        self._num_members = 0
        self._lost_at_s: dict[GroupId, float] = {}
        self._absences_s: list[float] = []
        self._saves_s: list[float] = []
        self._cadence_of: tuple[tuple[object, ...], Cadence] | None = None

    def committed(self, at_s: float, num_members: int) -> None:
        """A step of this many groups is committed."""
        passed_s, self._at_s = at_s - self._at_s, at_s
        if not self._is_restarting:
            self._step_s = passed_s
        self._is_restarting, self._num_members = False, num_members
        self._exposure_s += self._step_s * num_members

    def lost(self, groups: Iterable[GroupId]) -> None:
        """Groups that took part are lost."""
        for group in groups:
            self._num_losses += 1
            self._lost_at_s[group] = self._at_s

    def admitted(self, groups: Iterable[GroupId]) -> None:
        """Groups take part again."""
        for group in groups:
            if group in self._lost_at_s:
                self._absences_s.append(self._at_s - self._lost_at_s.pop(group))

    def saved(self, stall_s: float) -> None:
        """A save has ended well."""
        self._saves_s = [*self._saves_s, stall_s][-_LAST_SAVES:]

    def restarted(self) -> None:
        """Training starts again.

        How long the restart took is not told apart from what its first step and the one that was struck took: they
        count as one and as half of one like the last before.
        """
        self._is_restarting = True
        self._exposure_s += 0.5 * self._step_s * self._num_members
        self._lost_at_s.clear()

    def cadence(self, members: Collection[GroupId]) -> Cadence:
        """The best interval with these groups, by all that is known."""
        # Times change it little from one step to the next: by their square root.
        exposure = int(16 * log2(1 + self._exposure_s / self._group_life_s))
        known = (self._num_losses, len(self._absences_s), self._absence_s() is None, exposure)
        key = (tuple(members), tuple(self._saves_s), known)
        if self._cadence_of is None or self._cadence_of[0] != key:
            self._cadence_of = (key, self._choose(members))
        return self._cadence_of[1]

    def _choose(self, members: Collection[GroupId]) -> Cadence:
        group_interval_s = (self._group_life_s + self._exposure_s) / (1 + self._num_losses)
        save_s = max(fmean(self._saves_s) if self._saves_s else PRIOR_SAVE_S, LEAST_SAVE_S)
        absence_s = self._absence_s()
        time_s = self._time_to_wipe_out_s(members, group_interval_s, absence_s)
        return Cadence(
            interval_s=optimal_cadence_s(save_s, time_s) if time_s else 0.0,
            save_s=save_s,
            group_interval_s=group_interval_s,
            absence_s=absence_s,
            time_to_wipe_out_s=time_s,
            num_losses=self._num_losses,
            exposure_s=self._exposure_s,
            num_members=len(members),
        )

    def _absence_s(self) -> float | None:
        if not self._absences_s:
            return None
        mean_s = max(fmean(self._absences_s), LEAST_SAVE_S)
        is_overdue = any(self._at_s - lost_at_s > _OVERDUE * mean_s for lost_at_s in self._lost_at_s.values())
        return None if is_overdue else mean_s

    def _time_to_wipe_out_s(
        self, members: Collection[GroupId], group_interval_s: float, absence_s: float | None
    ) -> float:
        if self._last_resort:  # until the last is lost, as if nobody came back
            return group_interval_s * sum(1 / left for left in range(1, len(members) + 1))
        mask = self._placement.alive_mask(frozenset(members))
        num_shards = Counter(int(count) for count in mask[self._placement.host_array].sum(axis=1))
        if num_shards[0]:
            return 0.0
        return time_to_wipe_out_s(num_shards, self._placement.redundancy, group_interval_s, absence_s)
