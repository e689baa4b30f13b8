"""When training starts again after a wipe-out, with whom, and from where; and when it does not.

All ranks of the run have ended by then, or hold nothing. Every group that is started again says which checkpoints it
finds valid, and which snapshots are whole in the memory of its nodes; whoever sees that enough groups wait writes the
entry.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from spare_megatron.core.messages import AppendEntry, Restart, StopWipeOut
from spare_megatron.core.placement import Placement
from spare_megatron.core.restart_messages import GiveUp, Waiting, WaitingRead
from spare_megatron.core.snapshots import SnapshotPolicy, Snapshots, WholeSnapshot
from spare_megatron.core.topology import GroupId, Member, ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """What keeps a run from starting again and again.

    Attributes:
        max_restarts: Restarts within the window after which the next wipe-out ends the run.
        window_s: Length of the window, on the clock of the log. A run that commits nothing between two wipe-outs
            stands still on it, so that these always fall into one window.
        wait_s: Longest wait for groups that have not come back; the others then start without them.
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
    ) -> tuple[()] | tuple[AppendEntry]:
        """What follows from who waits.

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
            replace(item, steps=tuple(step for step in item.steps if step in saved))
            for item in event.waiting
            if item.member.incarnation > over.get(item.member.group, -1)
        ]
        entry = decide_restart(
            self.wipe_out.step,
            self._placement,
            waiting,
            event.waited_s,
            sum(restarted_s > at_s - self._limits.window_s for restarted_s in self._restarted_at_s),
            self._limits,
            last_resort=self._last_resort,
            first_step=self._first_step,
            snapshot=self.snapshots.newest_whole(
                (held for item in waiting for held in item.held), (held for item in waiting for held in item.slices)
            ),
        )
        return () if entry is None else (AppendEntry(index=head, entry=entry),)


def decide_restart(
    step: int,
    placement: Placement,
    waiting: Sequence[Waiting],
    waited_s: float,
    num_recent: int,
    limits: RestartLimits,
    *,
    last_resort: bool = False,
    first_step: int = 0,
    snapshot: WholeSnapshot | None = None,
) -> Restart | GiveUp | None:
    """The entry that ends a wipe-out; None while it is better to wait for more groups.

    The newest checkpoint counts that all who wait find valid: every one of them has to load it. Where there is none,
    the newest counts that groups with hosts of all shards find valid, and the others are left out: one group whose
    storage fails must not send all back to the beginning. They begin there only if nobody finds anything. A snapshot
    that is not older is there sooner. Who cannot look for checkpoints is waited for, too, where there is no snapshot:
    training from the beginning for want of a folder that is back soon would cost much.

    Args:
        step: The step that was wiped out.
        placement: Who hosts what.
        waiting: Groups in lives that have not taken part, each group once.
        waited_s: Seconds for which whoever asks has waited.
        num_recent: Restarts within the window.
        limits: When to give up.
        last_resort: Every group can compute every shard.
        first_step: Committed steps with which the run begins: there is always that.
        snapshot: The newest that those who wait have whole.

    >>> from spare_megatron.core.placement import make_placement
    >>> from spare_megatron.core.topology import Member
    >>> ring, limits = make_placement("golomb", 2, 1), RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)
    >>> both = [Waiting(member=Member(0, 1), steps=(8, 4)), Waiting(member=Member(1, 1), steps=(4,))]
    >>> decide_restart(9, ring, both, 0.0, 0, limits)
    Restart(step=4, members=(Member(group=0, incarnation=1), Member(group=1, incarnation=1)), snapshot=None)
    >>> decide_restart(9, ring, both[:1], 4.9, 0, limits) is None
    True
    """
    if num_recent >= limits.max_restarts:
        return GiveUp(step=step, reason=_too_many(num_recent, limits))
    able = [item for item in waiting if not item.failure or snapshot is not None]
    groups = frozenset(item.member.group for item in able)
    if len(groups) < placement.num_groups and waited_s < limits.wait_s:
        return None
    uncovered = () if last_resort else placement.uncovered(groups)
    if uncovered or not groups:
        return GiveUp(step=step, reason=_not_back(placement, groups, uncovered, waiting, limits))
    common = set.intersection(*(set(item.steps) for item in able)) | {first_step}
    newest = max(common)
    if snapshot is not None and snapshot.step >= newest:
        return Restart(step=snapshot.step, members=_members(able), snapshot=snapshot.attempt)
    if newest > first_step or not any(step > first_step for item in able for step in item.steps):
        return Restart(step=newest, members=_members(able))
    if waited_s < limits.wait_s:
        return None
    covering = None if last_resort else placement
    return _newest_of_some(able, first_step, covering) or GiveUp(step=step, reason=_nothing_in_common(able))


def _newest_of_some(able: Sequence[Waiting], first_step: int, placement: Placement | None) -> Restart | None:
    """From the newest checkpoint that groups with hosts of all shards find, without the others; None if there is none.

    Args:
        able: Who waits.
        first_step: Only later steps count.
        placement: Who hosts what; None if every group can compute every shard.
    """
    for newest in sorted({step for item in able for step in item.steps if step > first_step}, reverse=True):
        holders = [item for item in able if newest in item.steps]
        if placement is None or not placement.uncovered(frozenset(item.member.group for item in holders)):
            return Restart(step=newest, members=_members(holders))
    return None


def _members(waiting: Sequence[Waiting]) -> tuple[Member, ...]:
    return tuple(sorted(item.member for item in waiting))


def _nothing_in_common(waiting: Sequence[Waiting]) -> str:
    by_group = sorted((int(item.member.group), item.steps) for item in waiting)
    found = "; ".join(f"group {group} {list(steps) or 'none'}" for group, steps in by_group)
    return f"no checkpoint is valid for groups with hosts of all shards; each finds those after these steps: {found}"


def _not_back(
    placement: Placement,
    groups: frozenset[GroupId],
    uncovered: Sequence[ShardId],
    waiting: Sequence[Waiting],
    limits: RestartLimits,
) -> str:
    absent = sorted(set(range(placement.num_groups)) - groups)
    reason = (
        f"groups {absent} have not come back within checkpoint.restart_wait_s={limits.wait_s:g}, and no other "
        f"group hosts shards {[int(shard) for shard in uncovered]}"
    )
    failures = dict.fromkeys(item.failure for item in waiting if item.failure)
    return reason + "".join(f"; {failure}" for failure in failures)


def _too_many(num_recent: int, limits: RestartLimits) -> str:
    if not limits.max_restarts:
        return "checkpoint.max_restarts=0 starts no run again"
    return (
        f"training has started again {num_recent} times within checkpoint.restart_window_s={limits.window_s:g} "
        f"seconds of training, as often as checkpoint.max_restarts allows"
    )
