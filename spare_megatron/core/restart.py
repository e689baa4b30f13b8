"""When training starts again after a wipe-out, with whom, and from where; and when it does not.

All ranks of the run have ended by then, or hold nothing. Every group that is started again says which checkpoints lack
nothing at a glance, and which snapshots are whole in the memory of its nodes. The newest checkpoint that comes into
question is read by all of them together (`core.read_quorum`) before it counts; whoever sees that enough groups wait,
and that all of it is whole, writes the entry.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from spare_megatron.core.actions import AppendEntry, CheckpointCandidate, ReadFiles, StopWipeOut, WithdrawOffers
from spare_megatron.core.entries import GiveUp, Restart
from spare_megatron.core.events import RestartState, WaitingRead
from spare_megatron.core.read_quorum import FileVerification
from spare_megatron.core.snapshot_policy import SnapshotPolicy, Snapshots, WholeSnapshot
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """What keeps a run from starting again and again.

    Attributes:
        max_restarts: Restarts within the window after which the next wipe-out ends the run.
        window_s: Length of the window, on the clock of the log. A run that commits nothing between two wipe-outs
            stands still on it, so that these always fall into one window.
        wait_s: Longest wait for groups that have not come back, or get no further with what they read; the others then
            start without them.
    """

    max_restarts: int
    window_s: float
    wait_s: float


class Restarts:
    """Wipe-outs and restarts of one run, as the log has them.

    Args:
        limits: None leaves it to the driver when training starts again.
        placement: Who hosts what.
        snapshots: When they are taken, and who keeps them; None: they are not.
        first_step: Committed steps with which the run begins, whether or not there is a checkpoint.
        last_resort: Every group can compute every shard.

    Attributes:
        wipe_out: That under way.
        num_restarts: Times that training has started again.
        snapshots: Those taken so far.
    """

    def __init__(
        self,
        limits: RestartLimits | None,
        placement: Placement,
        snapshots: SnapshotPolicy | None = None,
        first_step: int = 0,
        *,
        last_resort: bool = False,
    ) -> None:
        self._limits = limits
        self._placement = placement
        self._last_resort = last_resort
        self._first_step = first_step
        self._restarted_at_s: list[float] = []
        self.wipe_out: StopWipeOut | None = None
        self.snapshots = Snapshots(snapshots)

    @property
    def num_restarts(self) -> int:
        return len(self._restarted_at_s)

    def wiped_out(self, stop: StopWipeOut) -> tuple[StopWipeOut]:
        """Only a checkpoint helps; returns what the driver is told."""
        self.wipe_out = stop
        return (stop,)

    def restarted(self, step: int, at_s: float) -> None:
        """Training starts again after this many committed steps, at this time on the clock of the log."""
        self.wipe_out = None
        self._restarted_at_s.append(at_s)
        self.snapshots.restarted(step)

    def decide(
        self, event: WaitingRead, saved: Collection[int], over: Mapping[GroupId, int], at_s: float, head: int
    ) -> tuple[()] | tuple[AppendEntry | ReadFiles | WithdrawOffers]:
        """What follows from who waits, for the group that asks.

        Args:
            event: Who has ever said that it waits.
            saved: Committed steps of which this training may have checkpoints. Others are what a restart has undone,
                or hold state that was found to be wrong.
            over: The last incarnation of each group that was lost or took part; only later ones wait.
            at_s: The time on the clock of the log.
            head: Where the next entry stands.
        """
        if self._limits is None or self.wipe_out is None or self.wipe_out.reason:
            return ()
        waiting = [
            replace(item, offers=tuple(offer for offer in item.offers if offer.step in saved))
            for item in event.waiting
            if item.member.incarnation > over.get(item.member.group, -1)
        ]
        snapshot = self.snapshots.newest_whole(
            (held for item in waiting for held in item.held), (held for item in waiting for held in item.slices)
        )
        search = Search(self._placement, waiting, event.waited_s, self._limits, snapshot)
        reasons = search.refused_by(event.group)
        if reasons:
            return (WithdrawOffers(reasons=reasons),)
        decision = decide_restart(
            self.wipe_out.step,
            search,
            sum(restarted_s > at_s - self._limits.window_s for restarted_s in self._restarted_at_s),
            last_resort=self._last_resort,
            first_step=self._first_step,
        )
        if isinstance(decision, CheckpointCandidate):
            return (ReadFiles(offer=decision, numbers=search.evidence(decision).to_read(event.group)),)
        return () if decision is None else (AppendEntry(index=head, entry=decision),)


class Search:
    """What those who wait have, and how far it is known to be whole.

    Args:
        placement: Who hosts what.
        waiting: Groups in lives that have not taken part, each group once.
        waited_s: Seconds for which whoever asks has waited.
        limits: When to go on without groups.
        snapshot: The newest that those who wait have whole.

    Attributes:
        able: Who may take part.
        is_early: Others may be about to come.
    """

    def __init__(
        self,
        placement: Placement,
        waiting: Sequence[RestartState],
        waited_s: float,
        limits: RestartLimits,
        snapshot: WholeSnapshot | None = None,
    ) -> None:
        self.placement, self.limits, self.snapshot = placement, limits, snapshot
        self.waiting = [_with_failure(item, limits) for item in waiting]
        self.able = [item for item in self.waiting if not item.failure or snapshot is not None]
        self.groups = frozenset(item.member.group for item in self.able)
        self.is_over = waited_s >= limits.wait_s
        self.is_early = len(self.groups) < placement.num_groups and not self.is_over
        self._evidence: dict[CheckpointCandidate, FileVerification] = {}

    def evidence(self, offer: CheckpointCandidate) -> FileVerification:
        """What has been read of a checkpoint, and who has to read the rest: of those who offer it, and may yet come."""
        if offer not in self._evidence:
            groups = {item.member.group for item in self.able if offer in item.offers}
            readers = map(GroupId, range(self.placement.num_groups)) if self.is_early else groups
            self._evidence[offer] = FileVerification(offer, self.waiting, sorted(readers))
        return self._evidence[offer]

    def refused_by(self, group: GroupId) -> dict[CheckpointCandidate, str]:
        """What the group offers and must not load, and why."""
        offers = [offer for item in self.able if item.member.group == group for offer in item.offers]
        found = {offer: self.evidence(offer).against(group) for offer in offers}
        return {offer: reason for offer, reason in found.items() if reason}


def decide_restart(
    step: int, search: Search, num_recent: int, *, last_resort: bool = False, first_step: int = 0
) -> Restart | GiveUp | CheckpointCandidate | None:
    """The entry that ends a wipe-out; or the checkpoint that has to be read before; None while it is better to wait.

    The newest checkpoint counts that lacks nothing for all who wait: every one of them has to load it. Where there is
    none, the newest counts that lacks nothing for groups with hosts of all shards, and the others are left out: one
    group whose storage fails must not send all back to the beginning. They begin there only if nobody finds anything.
    All files have to be read by somebody. While somebody offers what is known to be damaged, earlier ones may not have
    been named: that is waited for. A snapshot that is not older is there sooner. Who cannot look for checkpoints, or
    gets no further with reading, is waited for, too, where there is no snapshot: training from the beginning for want
    of a folder that is back soon would cost much.

    Args:
        step: The step that was wiped out.
        search: What those who wait have.
        num_recent: Restarts within the window.
        last_resort: Every group can compute every shard.
        first_step: Committed steps with which the run begins: there is always that.

    >>> from spare_megatron.stacking.placement import make_placement
    >>> from spare_megatron.stacking.layout import Member
    >>> ring, limits = make_placement("golomb", 2, 1), RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)
    >>> new, old = CheckpointCandidate(step=8), CheckpointCandidate(step=4)  # without any files
    >>> both = [RestartState(member=Member(0, 1), offers=(new, old)), RestartState(member=Member(1, 1), offers=(old,))]
    >>> decide_restart(9, Search(ring, both, 0.0, limits), 0)
    Restart(step=4, members=(Member(group=0, incarnation=1), Member(group=1, incarnation=1)), snapshot=None)
    >>> decide_restart(9, Search(ring, both[:1], 4.9, limits), 0) is None
    True
    """
    placement, limits, able = search.placement, search.limits, search.able
    if num_recent >= limits.max_restarts:
        return GiveUp(step=step, reason=_too_many(num_recent, limits))
    uncovered = () if last_resort else placement.uncovered(search.groups)
    if not search.is_early and (uncovered or not able):
        return GiveUp(step=step, reason=_not_back(search, uncovered))
    offers = [{offer for offer in item.offers if offer.step > first_step} for item in able]
    newest = max(set.intersection(*offers), default=None) if offers else None
    snapshot = search.snapshot
    newest_step = first_step if newest is None else newest.step
    if snapshot is not None and snapshot.step >= newest_step:
        entry = Restart(step=snapshot.step, members=_members(able), snapshot=snapshot.attempt)
        return None if search.is_early else entry
    if any(search.refused_by(group) for group in search.groups):
        return None
    if newest is not None and not search.evidence(newest).is_whole:
        return newest
    if search.is_early:
        return None
    if newest is not None or not any(offers):
        return Restart(step=newest_step, members=_members(able))
    found = _newest_of_some(search, first_step, is_everywhere=last_resort) if search.is_over else None
    # Whoever came last may offer what the others have found damaged, and not yet name what they do.
    found = found or _newest_unread(search, set.union(*offers))
    return found or (GiveUp(step=step, reason=_nothing_in_common(able)) if search.is_over else None)


def _newest_of_some(search: Search, first_step: int, *, is_everywhere: bool) -> Restart | CheckpointCandidate | None:
    """From the newest checkpoint that lacks nothing for groups with hosts of all shards, without the others.

    Args:
        search: What those who wait have.
        first_step: Only later steps count.
        is_everywhere: Every group can compute every shard.

    Returns:
        None if there is none; the checkpoint if it has to be read.
    """
    for newest in sorted({offer for item in search.able for offer in item.offers}, reverse=True):
        holders = [item for item in search.able if newest in item.offers]
        groups = frozenset(item.member.group for item in holders)
        if newest.step > first_step and (is_everywhere or not search.placement.uncovered(groups)):
            is_whole = search.evidence(newest).is_whole
            return Restart(step=newest.step, members=_members(holders)) if is_whole else newest
    return None


def _newest_unread(search: Search, offers: Collection[CheckpointCandidate]) -> CheckpointCandidate | None:
    """The newest of these checkpoints of which files have yet to be read."""
    return next((offer for offer in sorted(offers, reverse=True) if not search.evidence(offer).is_whole), None)


def _with_failure(item: RestartState, limits: RestartLimits) -> RestartState:
    """Who has got no further with reading for too long cannot look for checkpoints."""
    if not item.is_reading or item.silent_s < limits.wait_s:
        return item
    reason = (
        f"group {item.member.group} has got no further with reading checkpoints for "
        f"checkpoint.restart_wait_s={limits.wait_s:g}"
    )
    return replace(item, failure=item.failure or reason)


def _members(waiting: Sequence[RestartState]) -> tuple[Member, ...]:
    return tuple(sorted(item.member for item in waiting))


def _nothing_in_common(waiting: Sequence[RestartState]) -> str:
    by_group = sorted((int(item.member.group), [offer.step for offer in item.offers]) for item in waiting)
    found = "; ".join(f"group {group} {steps or 'none'}" for group, steps in by_group)
    return f"no checkpoint is valid for groups with hosts of all shards; each finds those after these steps: {found}"


def _not_back(search: Search, uncovered: Sequence[ShardId]) -> str:
    absent = sorted(set(range(search.placement.num_groups)) - search.groups)
    reason = (
        f"groups {absent} have not come back within checkpoint.restart_wait_s={search.limits.wait_s:g}, and no other "
        f"group hosts shards {[int(shard) for shard in uncovered]}"
    )
    failures = dict.fromkeys(item.failure for item in search.waiting if item.failure)
    return reason + "".join(f"; {failure}" for failure in failures)


def _too_many(num_recent: int, limits: RestartLimits) -> str:
    if not limits.max_restarts:
        return "checkpoint.max_restarts=0 starts no run again"
    return (
        f"training has started again {num_recent} times within checkpoint.restart_window_s={limits.window_s:g} "
        f"seconds of training, as often as checkpoint.max_restarts allows"
    )
