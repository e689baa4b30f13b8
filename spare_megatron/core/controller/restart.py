"""What follows when shards have no host left: a pause, or a restart from a checkpoint or snapshot; or the run ends.

Training pauses while every piece of state has a host: survivors keep the state and wait for hosts. The step is then
computed again from zero sums with the groups that have come back, and no committed step is done again. Else all groups
start again; each reports its candidates and snapshots, and together they verify the newest candidate: they divide its
files. A group that sees enough groups waiting and the checkpoint whole writes the entry.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spare_megatron.core.log import actions
from spare_megatron.core.log.actions import CheckpointCandidate
from spare_megatron.core.log.entries import GiveUp, Restart, Resume
from spare_megatron.core.log.events import RestartState, WaitingRead
from spare_megatron.core.log.membership import LogTerms
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy, Snapshots, WholeSnapshot
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.placement import Placement

MAX_RESUMES_WITHOUT_COMMIT = 5
"""Pauses of one step or evaluation that may end with a return; another wipe-out of it ends the run."""


def decide_pause(
    pause: actions.AwaitHosts,
    placement: Placement,
    attempt: int,
    waiting: Sequence[Member],
    waited_s: float,
    wait_s: float,
    *,
    is_end_due: bool = False,
) -> Resume | GiveUp | None:
    """The entry that ends the pause, or None to wait.

    Training resumes with all `waiting` members as soon as they and the voters host every shard. Otherwise the run ends
    once it is to end, or nothing has come for `wait_s` seconds: a restart would lack the same hosts.

    >>> from spare_megatron.stacking.placement import make_placement
    >>> ring = make_placement("golomb", 3, 1)
    >>> left = actions.AwaitHosts(index=7, step=4, epoch=2, voters=(Member(0),), shards=(1, 2))
    >>> decide_pause(left, ring, 5, [Member(1, 1)], 0.0, 60.0) is None
    True
    >>> decide_pause(left, ring, 5, [Member(1, 1), Member(2, 3)], 0.0, 60.0).admit
    (Member(group=1, incarnation=1), Member(group=2, incarnation=3))
    """
    groups = frozenset(member.group for member in (*pause.voters, *waiting))
    uncovered = placement.uncovered(groups)
    if not uncovered:
        return Resume(step=pause.step, attempt=attempt, admit=tuple(waiting))
    if is_end_due:
        return GiveUp(step=pause.step, reason="the run is to end, and no step can be completed before that")
    if waited_s < wait_s:
        return None
    return GiveUp(step=pause.step, reason=_hosts_not_back(placement, uncovered, wait_s))


def _hosts_not_back(placement: Placement, uncovered: Sequence[ShardId], wait_s: float) -> str:
    hosts = sorted({int(host) for shard in uncovered for host in placement.hosts[shard]})
    return (
        f"none of groups {hosts}, which host shards {[int(shard) for shard in uncovered]}, has come back within "
        f"checkpoint.restart_wait_s={wait_s:g}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """After `max_restarts` within `window_s`, on the clock of the log, the next wipe-out ends the run."""

    max_restarts: int
    window_s: float = 3600.0
    wait_s: float
    """After which the others restart without groups that are absent or make no progress in reading."""


class Restarts:
    """Wipe-outs and restarts of one run, as the log has them; without `limits` the driver restarts."""

    def __init__(self, limits: RestartLimits | None, terms: LogTerms, snapshots: SnapshotPolicy | None = None) -> None:
        self._limits = limits
        self._terms = terms
        self._restarted_at_s: list[float] = []
        self.wipe_out: actions.StopWipeOut | None = None
        self.snapshots = Snapshots(snapshots)

    def on_wipe_out(self, stop: actions.StopWipeOut) -> tuple[actions.StopWipeOut]:
        """Records the wipe-out; the returned action is final if no restart can follow."""
        may_restart = self._limits is None or self._limits.max_restarts > 0
        self.wipe_out = replace(stop, is_final=bool(stop.reason) or not may_restart)
        return (self.wipe_out,)

    def on_restart(self, step: int, at_s: float) -> None:
        self.wipe_out = None
        self._restarted_at_s.append(at_s)
        self.snapshots.on_restart(step)

    def decide(
        self, event: WaitingRead, saved: Collection[int], over: Mapping[GroupId, int], at_s: float, head: int
    ) -> tuple[()] | tuple[actions.AppendEntry | actions.ReadFiles | actions.WithdrawCandidates]:
        """What follows from the waiting groups, of later incarnations than in `over`, for the group that asks.

        Checkpoints of steps not in `saved` are undone or wrong. `head` is the index of the next entry.
        """
        if self._limits is None or self.wipe_out is None or self.wipe_out.reason:
            return ()
        waiting = [
            replace(item, candidates=tuple(candidate for candidate in item.candidates if candidate.step in saved))
            for item in event.waiting
            if item.member.incarnation > over.get(item.member.group, -1)
        ]
        snapshot = self.snapshots.newest_whole(
            (held for item in waiting for held in item.held), (held for item in waiting for held in item.partitions)
        )
        search = Search(self._terms, waiting, event.waited_s, self._limits, snapshot)
        reasons = search.refused_by(event.group)
        if reasons:
            return (actions.WithdrawCandidates(reasons=reasons),)
        num_recent = sum(restarted_s > at_s - self._limits.window_s for restarted_s in self._restarted_at_s)
        decision = decide_restart(self.wipe_out.step, search, num_recent)
        if isinstance(decision, Restart):
            fewer = {item.member.group: item.stages for item in waiting if item.stages is not None}
            decision = replace(decision, stages=self._terms.stages_of(decision.members, fewer))
        if isinstance(decision, CheckpointCandidate):
            return (actions.ReadFiles(candidate=decision, numbers=search.verification(decision).to_read(event.group)),)
        return () if decision is None else (actions.AppendEntry(index=head, entry=decision),)


_NUM_WITNESSES = 2
"""Groups that must find a file damaged, if there are as many."""


class FileVerification:
    """What all groups have read of one checkpoint. The `readers` (ascending, one or more) divide its files."""

    def __init__(
        self, candidate: CheckpointCandidate, waiting: Iterable[RestartState], readers: Sequence[GroupId]
    ) -> None:
        self._candidate = candidate
        self._readers = readers
        self._readings = {
            item.member.group: reading
            for item in waiting
            for reading in item.readings
            if reading.candidate == candidate
        }
        self._whole = {number for reading in self._readings.values() for number in reading.whole}
        self._damaged: dict[int, set[GroupId]] = {}
        for group, reading in self._readings.items():
            for number in reading.damaged:
                self._damaged.setdefault(number, set()).add(group)

    @property
    def is_whole(self) -> bool:
        return len(self._whole) == self._candidate.num_files

    def damage(self) -> str:
        """What is wrong with the checkpoint; empty while that is not known."""
        damaged = [number for number in self._damaged if number not in self._whole and self._is_certain(number)]
        if not damaged:
            return ""
        witness = min(self._damaged[min(damaged)])
        return self._readings[witness].reason

    def against(self, group: GroupId) -> str:
        """Why the group must not load it: it is damaged, for all or for this group."""
        reason = self.damage()
        if not reason and group in self._readings and self._whole.intersection(self._readings[group].damaged):
            reason = f"{self._readings[group].reason}; another group finds it whole"
        return reason

    def to_read(self, group: GroupId) -> tuple[int, ...]:
        return tuple(
            number
            for number in range(self._candidate.num_files)
            if number not in self._whole and not self._is_certain(number) and self._next_reader(number) == group
        )

    def _is_certain(self, number: int) -> bool:
        return len(self._damaged.get(number, ())) >= min(_NUM_WITNESSES, len(self._readers))

    def _next_reader(self, number: int) -> GroupId | None:
        """The reader of a file: groups take turns, skipping those that have found it damaged."""
        readers, seen = self._readers, self._damaged.get(number, set())
        first = number % len(readers)
        in_turn = (readers[(first + shift) % len(readers)] for shift in range(len(readers)))
        return next((reader for reader in in_turn if reader not in seen), None)


class Search:
    """What the waiting groups have, and how far it is known to be whole.

    Only groups in `able` may take part. `is_over`: the asking group has waited for `limits.wait_s`; `is_early`: further
    groups may still come.
    """

    def __init__(
        self,
        terms: LogTerms,
        waiting: Sequence[RestartState],
        waited_s: float,
        limits: RestartLimits,
        snapshot: WholeSnapshot | None = None,
    ) -> None:
        whole = [item.member.group for item in waiting if item.stages is None]
        self.terms, self.limits = terms, limits
        if len(whole) < len(waiting) and (not whole or self.uncovered(whole)):
            snapshot = None  # only groups with the whole pipeline can load it
        self.snapshot = snapshot
        self.waiting = [_with_failure(item, limits) for item in waiting]
        self.able = [item for item in self.waiting if not item.failure or snapshot is not None]
        self.groups = frozenset(item.member.group for item in self.able)
        self.is_over = waited_s >= limits.wait_s
        self.home = frozenset(map(GroupId, range(terms.placement.num_groups)))  # further groups host no shard
        self.is_early = not self.home <= self.groups and not self.is_over
        self._verifications: dict[CheckpointCandidate, FileVerification] = {}

    def uncovered(self, groups: Collection[GroupId]) -> tuple[ShardId, ...]:
        """Shards that none of these groups can compute."""
        return () if self.terms.last_resort else self.terms.placement.uncovered(frozenset(groups))

    def verification(self, candidate: CheckpointCandidate) -> FileVerification:
        """What has been read of a checkpoint; its offering groups (all while more may come) divide its files."""
        if candidate not in self._verifications:
            groups = {item.member.group for item in self.able if candidate in item.candidates}
            readers = sorted(self.home if self.is_early else groups)
            self._verifications[candidate] = FileVerification(candidate, self.waiting, readers)
        return self._verifications[candidate]

    def refused_by(self, group: GroupId) -> dict[CheckpointCandidate, str]:
        candidates = [candidate for item in self.able if item.member.group == group for candidate in item.candidates]
        found = {candidate: self.verification(candidate).against(group) for candidate in candidates}
        return {candidate: reason for candidate, reason in found.items() if reason}


def decide_restart(step: int, search: Search, num_recent: int) -> Restart | GiveUp | CheckpointCandidate | None:
    """The entry that ends a wipe-out; the checkpoint to verify first; or None to wait.

    Picks the newest checkpoint that every waiting group offers, else the newest one whose offering groups host all
    shards, without the others. A snapshot that is not older wins, without groups that lack stages; the beginning is
    used only if no group finds anything. Waits for groups with damaged offers to name earlier ones, and without a
    snapshot also for groups that cannot look for checkpoints or make no progress in reading.

    >>> from spare_megatron.stacking.placement import make_placement
    >>> from spare_megatron.stacking.layout import Member
    >>> ring = LogTerms(placement=make_placement("golomb", 2, 1), num_steps=9)
    >>> limits = RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)
    >>> new, old = CheckpointCandidate(step=8), CheckpointCandidate(step=4)  # without any files
    >>> first = RestartState(member=Member(0, 1), candidates=(new, old))
    >>> both = [first, RestartState(member=Member(1, 1), candidates=(old,))]
    >>> found = decide_restart(9, Search(ring, both, 0.0, limits), 0)
    >>> found.step, found.members
    (4, (Member(group=0, incarnation=1), Member(group=1, incarnation=1)))
    >>> decide_restart(9, Search(ring, both[:1], 4.9, limits), 0) is None
    True
    """
    limits, able, first_step = search.limits, search.able, search.terms.first_step
    if num_recent >= limits.max_restarts:
        return GiveUp(step=step, reason=_too_many(num_recent, limits))
    uncovered = search.uncovered(search.groups)
    if not search.is_early and (uncovered or not able):
        return GiveUp(step=step, reason=_not_back(search, uncovered))
    candidates = [{candidate for candidate in item.candidates if candidate.step > first_step} for item in able]
    newest = max(set.intersection(*candidates), default=None) if candidates else None
    snapshot = search.snapshot
    newest_step = first_step if newest is None else newest.step
    if snapshot is not None and snapshot.step >= newest_step:
        whole = [item for item in able if item.stages is None]
        entry = Restart(step=snapshot.step, members=_members(whole), snapshot=snapshot.attempt)
        return None if search.is_early else entry
    if any(search.refused_by(group) for group in search.groups):
        return None
    if newest is not None and not search.verification(newest).is_whole:
        return newest
    if search.is_early:
        return None
    if newest is not None or not any(candidates):
        return Restart(step=newest_step, members=_members(able))
    found = _newest_of_some(search) if search.is_over else None
    # The last group to come may offer what others have found damaged, and not yet the earlier ones that they offer.
    found = found or _newest_unread(search, set.union(*candidates))
    return found or (GiveUp(step=step, reason=_nothing_in_common(able)) if search.is_over else None)


def _newest_of_some(search: Search) -> Restart | CheckpointCandidate | None:
    """Restart from the newest checkpoint whose offering groups host all shards, or that if it must be verified first;
    None without one.
    """
    for newest in sorted({candidate for item in search.able for candidate in item.candidates}, reverse=True):
        holders = [item for item in search.able if newest in item.candidates]
        groups = [item.member.group for item in holders]
        if newest.step > search.terms.first_step and not search.uncovered(groups):
            is_whole = search.verification(newest).is_whole
            return Restart(step=newest.step, members=_members(holders)) if is_whole else newest
    return None


def _newest_unread(search: Search, candidates: Collection[CheckpointCandidate]) -> CheckpointCandidate | None:
    """The newest of these checkpoints with files that are still to be read."""
    return next(
        (candidate for candidate in sorted(candidates, reverse=True) if not search.verification(candidate).is_whole),
        None,
    )


def _with_failure(item: RestartState, limits: RestartLimits) -> RestartState:
    """A group without progress in reading for too long cannot look for checkpoints."""
    if not item.is_reading or item.silent_s < limits.wait_s:
        return item
    reason = (
        f"group {item.member.group} made no progress in reading checkpoints for "
        f"checkpoint.restart_wait_s={limits.wait_s:g}"
    )
    return replace(item, failure=item.failure or reason)


def _members(waiting: Sequence[RestartState]) -> tuple[Member, ...]:
    return tuple(sorted(item.member for item in waiting))


def _nothing_in_common(waiting: Sequence[RestartState]) -> str:
    by_group = sorted((int(item.member.group), [candidate.step for candidate in item.candidates]) for item in waiting)
    found = "; ".join(f"group {group} {steps or 'none'}" for group, steps in by_group)
    return f"no checkpoint is valid for groups with hosts of all shards; each finds those after these steps: {found}"


def _not_back(search: Search, uncovered: Sequence[ShardId]) -> str:
    absent = sorted(search.home - search.groups)
    reason = (
        f"groups {absent} have not come back within checkpoint.restart_wait_s={search.limits.wait_s:g}, and no other "
        f"group hosts shards {[int(shard) for shard in uncovered]}"
    )
    failures = dict.fromkeys(item.failure for item in search.waiting if item.failure)
    return reason + "".join(f"; {failure}" for failure in failures)


def _too_many(num_recent: int, limits: RestartLimits) -> str:
    if not limits.max_restarts:
        return "checkpoint.max_restarts=0 allows no restart"
    return (
        f"training has restarted {num_recent} times within {limits.window_s:g} seconds of training, the most that "
        f"checkpoint.max_restarts allows"
    )
