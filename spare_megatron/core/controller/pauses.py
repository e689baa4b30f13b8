"""Pauses: shards have no host, but every piece of state has one, so that survivors keep the state and wait for hosts.

The step is then computed again from zero sums with the groups that have come back. No committed step is done again.
"""

from collections.abc import Sequence

from spare_megatron.core.log.actions import AwaitHosts
from spare_megatron.core.log.entries import GiveUp, Resume
from spare_megatron.stacking.layout import Member, ShardId
from spare_megatron.stacking.placement import Placement

MAX_RESUMES_WITHOUT_COMMIT = 5
"""Pauses of one step or evaluation that may end with a return; another wipe-out of it ends the run."""


def decide_pause(
    pause: AwaitHosts,
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
    >>> left = AwaitHosts(index=7, step=4, epoch=2, voters=(Member(0),), shards=(1, 2))
    >>> decide_pause(left, ring, 5, [Member(1, 1)], 0.0, 60.0) is None
    True
    >>> decide_pause(left, ring, 5, [Member(1, 1), Member(2, 3)], 0.0, 60.0)
    Resume(step=4, attempt=5, admit=(Member(group=1, incarnation=1), Member(group=2, incarnation=3)))
    """
    groups = frozenset(member.group for member in (*pause.voters, *waiting))
    uncovered = placement.uncovered(groups)
    if not uncovered:
        return Resume(step=pause.step, attempt=attempt, admit=tuple(waiting))
    if is_end_due:
        return GiveUp(step=pause.step, reason="the run is to end, and no step can be completed before that")
    if waited_s < wait_s:
        return None
    return GiveUp(step=pause.step, reason=_not_back(placement, uncovered, wait_s))


def _not_back(placement: Placement, uncovered: Sequence[ShardId], wait_s: float) -> str:
    hosts = sorted({int(host) for shard in uncovered for host in placement.hosts[shard]})
    return (
        f"none of groups {hosts}, which host shards {[int(shard) for shard in uncovered]}, has come back within "
        f"checkpoint.restart_wait_s={wait_s:g}"
    )
