"""When to save checkpoints, decided from the log and its clock, which ones to keep, and who saves without the store.

Times are those of the log's clock: seconds since the run began. Every commit carries its writer's time and sets the
clock of its readers, so no wall clock is needed.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean

from spare_megatron.core.log.actions import Cadence, RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.core.log.membership import LogTerms
from spare_megatron.core.saves.survival import optimal_cadence_s, time_to_wipe_out_s
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.state_partitions import Hosts


class LogClock:
    """Reads the log's clock: `at_s`, the last commit's time, then advanced by the process's own monotonic clock."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._ahead_s = 0.0

    def start(self, now_s: float) -> None:
        self._ahead_s = -now_s

    def set_by(self, at_s: float, now_s: float) -> None:
        """Sets the clock by a commit of `at_s`, read at `now_s`. The fastest delivery so far has the least error."""
        self.at_s = at_s
        self._ahead_s = max(self._ahead_s, at_s - now_s)

    def read_s(self, now_s: float) -> float:
        """The time, never before the last commit.

        >>> clock = LogClock()
        >>> clock.start(100.0)
        >>> clock.set_by(8.0, 105.0)
        >>> clock.read_s(106.0)
        9.0
        """
        return max(self.at_s, now_s + self._ahead_s)


PRIOR_SAVE_S = 1.0
"""Assumed cost of a save before the first one."""

LEAST_SAVE_S = 1e-3
"""Lower limit of a save's cost: free saves have no best interval."""

_LAST_SAVES = 8

_OVERDUE = 5.0
"""If a group is away for this many times the mean absence, no lost group is expected back."""


class Experience:
    """Losses, absences and saves measured in a run, and the cadence that follows; equal on all ranks.

    Losses of a group are a Poisson process whose rate has the prior Gamma(1, group_life_s): after k losses in the
    exposure T the mean rate is (1 + k) / (group_life_s + T). There is no cadence without a prior. `pause_s`: longest
    pause for shards without a host. `absence_s`: mean absence of a lost group before the first return; None: for good.
    """

    def __init__(
        self, group_life_s: float | None, terms: LogTerms, pause_s: float | None = None, absence_s: float | None = None
    ) -> None:
        self._group_life_s = group_life_s
        self._prior_absence_s = absence_s
        self._terms = terms
        self._pause_s = pause_s
        self._at_s = 0.0
        self._num_losses = 0
        self._exposure_s = 0.0
        self._is_restarting = False
        self._step_s = 0.0  # the last step without a restart
        self._num_members = 0
        self._lost_at_s: dict[GroupId, float] = {}
        self._absences_s: list[float] = []
        self._lacking_since_s: float | None = None  # copies of state partitions
        self._copies_s: list[float] = []
        self._saves_s: list[float] = []
        self._cadence_of: tuple[tuple[object, ...], Cadence] | None = None

    def on_commit(self, at_s: float, num_members: int, *, lacks_copies: bool = False) -> None:
        passed_s, self._at_s = at_s - self._at_s, at_s
        if not self._is_restarting:
            self._step_s = passed_s
        self._is_restarting, self._num_members = False, num_members
        self._exposure_s += self._step_s * num_members
        if self._terms.partitions and self._lacking_since_s is not None and not lacks_copies:
            self._copies_s.append(self._at_s - self._lacking_since_s)
            self._lacking_since_s = None

    def on_loss(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            self._num_losses += 1
            self._lost_at_s[group] = self._at_s
            if self._lacking_since_s is None:
                self._lacking_since_s = self._at_s

    def on_admission(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            if group in self._lost_at_s:
                self._absences_s.append(self._at_s - self._lost_at_s.pop(group))

    def on_save(self, stall_s: float) -> None:
        self._saves_s = [*self._saves_s, stall_s][-_LAST_SAVES:]

    def on_restart(self) -> None:
        """Training restarts; the exposure counts its first step as a last known step, the interrupted one as half."""
        self._is_restarting = True
        self._exposure_s += 0.5 * self._step_s * self._num_members
        self._lost_at_s.clear()
        self._lacking_since_s = None

    def cadence(self, members: Collection[GroupId], hosts: Hosts = ()) -> Cadence | None:
        """`hosts`: those of each state partition, empty if every group holds all state."""
        if self._group_life_s is None:
            return None
        # The cadence grows only with the square root of times, so a coarse exposure serves as key.
        exposure = int(16 * log2(1 + self._exposure_s / self._group_life_s))
        known = (self._num_losses, len(self._absences_s), len(self._copies_s), self._absence_s() is None, exposure)
        key = (tuple(members), tuple(self._saves_s), known, tuple(map(len, hosts)))
        if self._cadence_of is None or self._cadence_of[0] != key:
            self._cadence_of = (key, self._choose(self._group_life_s, members, hosts))
        return self._cadence_of[1]

    def _choose(self, group_life_s: float, members: Collection[GroupId], hosts: Hosts) -> Cadence:
        group_interval_s = (group_life_s + self._exposure_s) / (1 + self._num_losses)
        save_s = max(fmean(self._saves_s) if self._saves_s else PRIOR_SAVE_S, LEAST_SAVE_S)
        absence_s = self._absence_s()
        time_s = self._time_to_wipe_out_s(members, group_interval_s, absence_s)
        if partitions := self._terms.partitions if time_s else None:
            state_s = self._time_to_lost_state_s(hosts, partitions.redundancy, group_interval_s)
            time_s = 1 / (1 / time_s + 1 / state_s)
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
        if not self._absences_s and self._prior_absence_s is None:
            return None
        mean_s = max(fmean(self._absences_s or [self._prior_absence_s or 0.0]), LEAST_SAVE_S)
        is_overdue = any(self._at_s - lost_at_s > _OVERDUE * mean_s for lost_at_s in self._lost_at_s.values())
        return None if is_overdue else mean_s

    def _time_to_wipe_out_s(
        self, members: Collection[GroupId], group_interval_s: float, absence_s: float | None
    ) -> float:
        # Until the last group and with it all state is lost, without returns: rarer than that is not relied on.
        last_s = group_interval_s * sum(1 / left for left in range(1, len(members) + 1))
        if self._terms.last_resort:
            return last_s
        placement = self._terms.placement
        mask = placement.alive_mask(frozenset(members))
        num_shards = Counter(int(count) for count in mask[placement.host_array].sum(axis=1))
        if num_shards[0]:
            return 0.0
        found_s = time_to_wipe_out_s(num_shards, placement.redundancy, group_interval_s, absence_s, self._pause_s)
        return min(found_s, last_s)

    def _time_to_lost_state_s(self, hosts: Hosts, redundancy: int, group_interval_s: float) -> float:
        """Mean seconds until a state partition has no copy: like shards, whose hosts are back once others copied it."""
        num_partitions = Counter(min(len(row), redundancy) for row in hosts)
        copy_s = max(fmean(self._copies_s), LEAST_SAVE_S) if self._copies_s else None
        return time_to_wipe_out_s(num_partitions, redundancy, group_interval_s, copy_s)


def superseded(
    steps: Iterable[int],
    doubtful: Collection[int],
    keep_last: int,
    keep_every_steps: int | None,
    audited_steps: int | None = None,
) -> frozenset[int]:
    """Steps of the checkpoints that are no longer needed.

    Only checkpoints known to be right supersede others; a doubtful one stays until a later one is right. The newest
    `keep_last` right ones stay, the newest right one of `audited_steps` at most, and for good the first right one in
    every `keep_every_steps` steps, if any.

    >>> sorted(superseded([10, 20, 30, 40, 50], [50], 2, None))
    [10, 20]
    >>> sorted(superseded([10, 20, 30, 40, 50], [20, 50], 1, 25))
    [20]
    >>> sorted(superseded([10, 20, 30, 40, 50], [], 2, None, 25))
    [10, 30]
    """
    all_steps = frozenset(steps)
    right = sorted(all_steps.difference(doubtful))
    kept = {step for step in all_steps if not right or step > right[-1]} | set(right[-keep_last:])
    if audited_steps is not None:
        kept |= set([step for step in right if step <= audited_steps][-1:])
    if keep_every_steps is not None:
        first_of: dict[int, int] = {}
        for step in right:
            first_of.setdefault(step // keep_every_steps, step)
        kept |= set(first_of.values())
    return all_steps - kept


_FIRST_RETRY = 1 / 8
"""Share of an interval in seconds until a failed save is repeated; doubles with every further failure, up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When checkpoints are due: seconds or steps after the last one, or by what the run measures; None is never."""

    interval_s: float | None = None
    interval_steps: int | None = None
    group_life_s: float | None = None
    """Prior mean time until a given group is lost; with it the interval follows from measurements."""
    group_absence_s: float | None = None
    """Likewise until a lost group is back; None expects none before the first one has come back."""
    saves_last: bool = False
    """Whether the last step of the run is saved, too."""


class Saves:
    """Saves in the log so far, and when the next is due. `pause_s`: longest pause for shards without a host, if any."""

    def __init__(self, policy: SavePolicy | None, terms: LogTerms, pause_s: float | None = None) -> None:
        self._policy = SavePolicy() if policy is None else policy
        self._num_steps = terms.num_steps
        self._is_last_wanted = self._policy.saves_last
        self._last_at_s = 0.0
        self._last_step = self._first_step = terms.first_step
        self._num_saves = 0
        self._num_failed = 0  # in a row
        self._share = 1.0  # share of an interval in seconds until the next save
        self._under_way: dict[int, Member] = {}  # writers of saves that have not ended, by committed steps
        self._newest: int | None = None  # of these the save that is due again if it fails
        self._gone: set[Member] = set()  # since the last save was begun
        self._taken: set[int] = set()  # committed steps, without those refused or undone
        self._refused: Member | None = None  # writer of the save refused last
        self.void: set[int] = set()
        """Steps with a save that is refused or undone."""
        self._experience = Experience(self._policy.group_life_s, terms, pause_s, self._policy.group_absence_s)

    @property
    def saved(self) -> frozenset[int]:
        """Steps of which this training may have sound checkpoints, including the one it began with."""
        return frozenset((self._first_step, *self._taken))

    @property
    def writers(self) -> frozenset[Member]:
        """The groups whose saves have not ended yet, as far as the log has it."""
        return frozenset(self._under_way.values())

    def is_due(
        self,
        step: int,
        at_s: float,
        members: Sequence[GroupId],
        hosts: Hosts = (),
        *,
        is_last: bool,
        is_asked: bool = False,
    ) -> bool:
        """Whether the commit that brings the run to `step` takes a checkpoint. `is_last`: it ends it early, or on
        request (`is_asked`), which is saved by any policy.
        """
        policy = self._policy
        if is_asked or (policy.saves_last and (is_last or step == self._num_steps)):
            return True
        cadence = self._experience.cadence(members, hosts)
        interval_s = policy.interval_s if cadence is None else cadence.interval_s
        if interval_s is not None and at_s - self._last_at_s >= interval_s * self._share:
            return True
        return policy.interval_steps is not None and step - self._last_step >= policy.interval_steps

    def on_commit(self, at_s: float, num_members: int, ends: Iterable[SaveEnd], *, lacks_copies: bool = False) -> None:
        """A commit, after which so many groups take part; `lacks_copies`: some state partitions have too few hosts."""
        self._experience.on_commit(at_s, num_members, lacks_copies=lacks_copies)
        for end in ends:
            self._on_save_end(end, at_s)
        if self._newest is not None and self._under_way[self._newest] in self._gone:
            self._newest, self._share = None, 0.0
        self._under_way = {step: member for step, member in self._under_way.items() if member not in self._gone}

    def _on_save_end(self, end: SaveEnd, at_s: float) -> None:
        if end.is_saved:
            self._experience.on_save(end.stall_s)
        self._under_way.pop(end.step, None)
        if self._newest != end.step:
            return
        self._newest = None
        if end.is_saved:
            self._num_failed = 0
            return
        self._num_failed += 1
        self._last_at_s = at_s
        self._share = min(1.0, _FIRST_RETRY * 2 ** (self._num_failed - 1))

    def on_loss(self, members: Iterable[Member]) -> None:
        """The save of a lost member is due again at once, except by an interval in steps."""
        gone = set(members)
        self._gone |= gone
        self._experience.on_loss(member.group for member in gone)

    def on_refusal(self, refusals: Iterable[RefuseCheckpoint]) -> None:
        for refusal in refusals:
            self._taken.remove(refusal.step)
            self.void.add(refusal.step)
            self._refused = refusal.member

    def lacks_last(self, step: int) -> bool:
        """Whether a save of this last step is wanted and no valid one exists."""
        return self._is_last_wanted and step not in self.saved

    def on_admission(self, members: Iterable[Member]) -> None:
        self._experience.on_admission(member.group for member in members)

    def on_undo(self, step: int) -> None:
        """Training goes back to the state after this many committed steps: later saves are undone."""
        self.void |= {saved for saved in self._taken if saved > step}
        self._taken = {saved for saved in self._taken if saved <= step}
        self._under_way = {saved: member for saved, member in self._under_way.items() if saved <= step}
        self._newest = self._newest if self._newest in self._under_way else None
        self._last_step = min(self._last_step, step)

    def on_restart(self, step: int, at_s: float) -> None:
        """As `on_undo`, after a wipe-out."""
        self.on_undo(step)
        self._restart_interval(step, at_s)
        self._under_way, self._newest = {}, None
        self._experience.on_restart()

    def start_save(
        self,
        step: int,
        at_s: float,
        voters: tuple[Member, ...],
        epoch: int,
        hosts: Hosts = (),
        *,
        is_last: bool = False,
    ) -> SaveCheckpoint:
        """The save that a commit asks for. Groups take turns, also after a refused save of the same steps."""
        cadence = self._experience.cadence(tuple(voter.group for voter in voters), hosts)
        self._restart_interval(step, at_s)
        able = [voter for voter in voters if voter != self._refused] or voters
        member = able[self._num_saves % len(able)]
        self._num_saves += 1
        self._is_last_wanted |= is_last
        self._refused = None
        self._under_way[step], self._newest = member, step
        self._taken.add(step)
        self.void.discard(step)
        return SaveCheckpoint(
            step=step,
            member=member,
            voters=voters,
            epoch=epoch,
            cadence=cadence,
            hosts=hosts,
            is_last=is_last,
        )

    def _restart_interval(self, step: int, at_s: float) -> None:
        self._last_at_s, self._last_step, self._share = at_s, step, 1.0
        self._gone.clear()


_EMERGENCY_SAVERS = 2
"""Groups that save without the store if each holds all state: two, as one may be lost at the same time."""


def emergency_save(
    member: Member,
    step: int,
    voters: tuple[Member, ...],
    epoch: int,
    hosts: Hosts,
    *,
    first_step: int,
    has_params: bool,
    shorter: Collection[GroupId] = (),
) -> SaveCheckpoint | None:
    """What a group saves by itself once the store is lost for good or shards stay without a host, or None.

    With state partitions all groups save; no group whose parameters (`has_params`) are not those after `step` committed
    steps, nor one of the `shorter`, which lack stages: files of their ranks would fit no other group. Nothing is saved
    of a run's `first_step`: an emergency checkpoint that it began with would be overwritten, with nothing to prove it.

    >>> voters = tuple(Member(GroupId(group)) for group in range(4))
    >>> saves = [emergency_save(member, 5, voters, 0, (), first_step=0, has_params=True) for member in voters]
    >>> [save is not None for save in saves]
    [True, True, False, False]
    """
    whole = [voter for voter in voters if voter.group not in shorter]
    savers = whole if hosts else whole[:_EMERGENCY_SAVERS]
    if step <= first_step or not has_params or member not in savers:
        return None
    return SaveCheckpoint(step=step, member=member, voters=voters, epoch=epoch, hosts=hosts)
